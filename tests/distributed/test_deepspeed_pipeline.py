"""PipelineModule on Shardwise's pipeline, compared with the same layers in plain PyTorch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwise.errors import ConfigError, UsageError

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
    """Return a language model whose embedding is also its head, with a function between layers."""
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


def plain(replicas, max_norm, data=None, loss_fn=loss_fn):
    """Return losses and norms of a single process, then an evaluation, then the weights."""
    model = Plain()
    model.load_state_dict(weights())
    trained = [*model.parameters(), *getattr(loss_fn, "parameters", list)()]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
    data = data or [batches(rank) for rank in range(replicas)]
    seen = []
    for _ in range(STEPS):
        total = 0.0
        for _ in range(MICRO):
            for source in data:
                x, y = next(source)
                loss = loss_fn(model(x), y) / (MICRO * replicas)
                loss.backward()
                total += loss.item()
        norm = nn.utils.clip_grad_norm_(trained, max_norm)
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
            # Where gradients are almost zero, the last fp32 bits decide in which direction AdamW
            # moves.
            assert torch.allclose(state[name], value, atol=2e-3), name
    close(engine, world)


@pytest.mark.slow
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


def saved_case(world, folder):
    """Resume a two-stage run with one stage, using an iterator that is passed once."""
    expected, _ = plain(1, 0.5)
    engine = made(world, 2, json_of())
    with pytest.raises(UsageError, match="has no batches on worker"):
        engine.train_batch()
    with pytest.raises(UsageError, match=r"Write engine\.train_batch"):
        engine.step()
    data = batches(0)
    engine.train_batch(data)
    engine.set_dataiterator(data)
    engine.train_batch()
    engine.save_checkpoint(folder, client_state={"seen": 2 * MICRO})
    close(engine, world)
    world.barrier()
    engine = made(world, 1, json_of(zero_optimization={"stage": 3}))
    assert world.data_size == 2
    _, client = engine.load_checkpoint(folder)
    assert client == {"seen": 2 * MICRO}
    data = batches(0)
    for _ in range(client["seen"]):
        next(data)
    loss = engine.train_batch(data)  # both replicas have the same batches: the same mean
    assert [loss.item(), engine.get_global_grad_norm()] == pytest.approx(expected[4:6], rel=1e-6)
    mean, outputs = engine.eval_batch(data, return_logits=True)
    assert mean.item() == pytest.approx(expected[6], rel=1e-6)
    assert outputs.shape == (ROWS, LENGTH, WORDS)
    close(engine, world)


def test_a_checkpoint_goes_on_in_another_number_of_stages(group, tmp_path):
    group(2, quiet=True)(saved_case, str(tmp_path))


def refusals_case(world):
    import shardwise.deepspeed as deepspeed

    pipe = deepspeed.pipe
    for arguments, words in (
        ({"layers": specs(pipe)}, "needs num_stages or a topology"),
        ({"layers": [3], "num_stages": 1}, "must be a module, a LayerSpec or a function, not 3"),
        ({"layers": [nn.Linear(1, 1)], "num_stages": 2}, r"1 layer\(s\) cannot have 2 stages"),
        (
            {"layers": specs(pipe), "num_stages": 2, "partition_method": "best"},
            "partition_method='best' does not exist",
        ),
        (
            {"layers": specs(pipe), "num_stages": 2, "partition_method": "type:Conv"},
            "matches no layer. The types of layers are <lambda>, Block, Embedding",
        ),
        (
            {"layers": specs(pipe), "topology": pipe.PipeDataParallelTopology(2, 2)},
            "has 4 workers, but this run has 2",
        ),
    ):
        with pytest.raises(UsageError, match=words):
            pipe.PipelineModule(**arguments)
    with pytest.raises(ConfigError, match="--pipeline 3 does not divide 2 worker"):
        pipe.PipelineModule(layers=specs(pipe), num_stages=3)
    pipe.PipelineModule(layers=specs(pipe), num_stages=2)
    with pytest.raises(UsageError, match="--pipeline 2 needs a PipelineModule, not a Linear"):
        deepspeed.initialize(model=nn.Linear(1, 1), config=json_of())
    from shardwise.bridging.joining import divide

    divide(world, "the test", pipeline=1)


def test_what_cannot_be_a_pipeline_is_said(group):
    group(2, quiet=True)(refusals_case)
