"""PipelineModule over our pipeline, beside the same layers in plain PyTorch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

WORDS, WIDTH, LENGTH, ROWS = 11, 8, 5, 2
STEPS, MICRO = 3, 3


class Block(nn.Module):
    """Attention and a feed-forward layer, as in GPT."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x):
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(x)


def scores(embedding, x):
    return F.linear(x, embedding.weight)


def loss_fn(outputs, labels):
    return F.cross_entropy(outputs.reshape(-1, WORDS), labels.reshape(-1))


def specs(pipe):
    """A language model whose embedding is its head too, and a function between the layers."""
    blocks = [pipe.LayerSpec(Block, WIDTH) for _ in range(3)]
    return [
        pipe.TiedLayerSpec("embed", nn.Embedding, WORDS, WIDTH),
        lambda x: 3 * x,
        *blocks,
        nn.LayerNorm(WIDTH),
        pipe.TiedLayerSpec("embed", nn.Embedding, WORDS, WIDTH, forward_fn=scores),
    ]


class Plain(nn.Module):
    """The same layers, with the names that a PipelineModule gives them."""

    def __init__(self):
        super().__init__()
        self.tied_modules = nn.ModuleDict({"embed": nn.Embedding(WORDS, WIDTH)})
        for number in (2, 3, 4):
            self.add_module(str(number), Block(WIDTH))
        self.add_module("5", nn.LayerNorm(WIDTH))

    def forward(self, x):
        x = 3 * self.tied_modules["embed"](x)
        for number in (2, 3, 4, 5):
            x = getattr(self, str(number))(x)
        return scores(self.tied_modules["embed"], x)


def batches(data_rank):
    """Endless pairs of words and the words that follow."""
    draw = torch.Generator().manual_seed(data_rank)
    while True:
        text = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=draw)
        yield text[:, :-1], text[:, 1:]


def weights():
    torch.manual_seed(0)
    return Plain().state_dict()


def plain(replicas, max_norm):
    """Losses and norms of one process, then an evaluation, then the weights."""
    model = Plain()
    model.load_state_dict(weights())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    data = [batches(rank) for rank in range(replicas)]
    seen = []
    for _ in range(STEPS):
        total = 0.0
        for _ in range(MICRO):
            for source in data:
                x, y = next(source)
                loss = loss_fn(model(x), y) / (MICRO * replicas)
                loss.backward()
                total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        seen += [total, norm.item()]
    with torch.no_grad():
        pairs = [next(source) for _ in range(MICRO) for source in data]
        seen.append(sum(loss_fn(model(x), y).item() for x, y in pairs) / len(pairs))
    return seen, model.state_dict()


def json_of(**more):
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
    } | more


def made(world, stages, config, **keywords):
    import shardwise.deepspeed as deepspeed

    model = deepspeed.PipelineModule(
        specs(deepspeed.pipe), num_stages=stages, loss_fn=loss_fn, **keywords
    )
    model.load_state_dict(weights())
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine


def close(engine, world):
    from shardwise.bridging.joining import divide

    engine.destroy()
    divide(world, "the test", pipeline=1, tensor=1)


def parity_case(world, stages, zero, method, interval):
    replicas = world.size // stages
    expected, after = plain(replicas, 0.5)
    config = json_of(
        zero_optimization={"stage": zero}, pipeline={"activation_checkpoint_interval": interval}
    )
    engine = made(world, stages, config, partition_method=method)
    assert (engine.num_stages, engine.stage_id) == (stages, world.pipeline_rank)
    data, seen = batches(world.data_rank), []
    for _ in range(STEPS):
        loss = engine.train_batch(data)
        seen += [loss.item(), engine.get_global_grad_norm()]
    seen.append(engine.eval_batch(data).item())
    assert seen == pytest.approx(expected, rel=1e-6)
    assert (engine.global_steps, engine.micro_steps) == (STEPS, STEPS * MICRO)
    state = engine.module_state_dict()
    if world.is_main:
        assert state.keys() == after.keys()
        for name, value in after.items():
            # The last bits of fp32 gradients decide how AdamW moves what has nearly none.
            assert torch.allclose(state[name], value, atol=2e-3), name
    close(engine, world)


@pytest.mark.parametrize(
    ("size", "stages", "zero", "method", "interval"),
    [
        (1, 1, 0, "parameters", 0),
        (2, 2, 0, "parameters", 0),
        (2, 2, 1, "uniform", 2),
        (4, 2, 1, "type:Block", 1),
        (4, 2, 3, "parameters", 0),
    ],
)
def test_a_tied_model_in_stages_trains_as_plain_pytorch(
    group, size, stages, zero, method, interval
):
    group(size, quiet=True)(parity_case, stages, zero, method, interval)
