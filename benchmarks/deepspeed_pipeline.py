"""A small language model as a PipelineModule, and in plain PyTorch: a case of deepspeed_parity.py.

Its embedding is its head too. It trains in two stages, in fp32 on the CPU over Gloo.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STEPS, MICRO, ROWS = 10, 4, 2
WORDS, WIDTH, LENGTH, BLOCKS = 13, 16, 8, 4
STAGES = 2
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}
CASES = {
    "stage 0, parameters, no clipping": (0, 0.0, {"partition_method": "parameters"}),
    "stage 0, parameters": (0, 1.0, {"partition_method": "parameters"}),
    "stage 1, uniform": (1, 1.0, {"partition_method": "uniform"}),
    "stage 1, type:Block": (1, 1.0, {"partition_method": "type:Block"}),
    "stage 1, layers run again": (1, 1.0, {"activation_checkpoint_interval": 1}),
}
"""By name the stage of ZeRO, the norm for clipping, and arguments of PipelineModule."""


class Block(nn.Module):
    """Attention and a feed-forward layer, as in GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        """Mixed and transformed `x`, of the same shape (rows, length, width)."""
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(x)


class Words(nn.Embedding):
    """An embedding, which is called `as_head` to score words."""

    def as_head(self, x: Tensor) -> Tensor:
        """The score of each word, (rows, length, words)."""
        return F.linear(x, self.weight)


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of the words that follow."""
    return F.cross_entropy(outputs.reshape(-1, WORDS), labels.reshape(-1))


class Plain(nn.Module):
    """The same layers under their names in a PipelineModule."""

    def __init__(self) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict({"words": Words(WORDS, WIDTH)})
        for number in range(1, BLOCKS + 1):
            self.add_module(str(number), Block(WIDTH))
        self.add_module(str(BLOCKS + 1), nn.LayerNorm(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """The score of each word."""
        words: Any = self.tied_modules["words"]
        x = words(x)
        for number in range(1, BLOCKS + 2):
            x = self.get_submodule(str(number))(x)
        return words.as_head(x)


def weights() -> dict[str, Tensor]:
    """Return the first weights of all."""
    torch.manual_seed(0)
    return Plain().state_dict()


def batches(replica: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of words and the words that follow them, endlessly."""
    draws = torch.Generator().manual_seed(replica)
    while True:
        text = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=draws)
        yield text[:, :-1], text[:, 1:]


def plain(replicas: int, clipping: float) -> list[list[float]]:
    """Return loss and norm of each step in one process."""
    model = Plain()
    model.load_state_dict(weights())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    data = [batches(replica) for replica in range(replicas)]
    rows = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = [loss_fn(model(x), y) for s in data for x, y in (next(s) for _ in range(MICRO))]
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clipping or float("inf"))
        optimizer.step()
        rows.append([loss.item(), norm.item()])
    return rows


def train(
    deepspeed: Any, stage: int, clipping: float, arguments: dict[str, Any]
) -> list[list[float]]:
    """Return loss and norm of each step through DeepSpeed's interface."""
    pipe = import_module(f"{deepspeed.__name__}.pipe")
    tied = ("words", Words, WORDS, WIDTH)
    layers = [
        pipe.TiedLayerSpec(*tied),
        *(pipe.LayerSpec(Block, WIDTH) for _ in range(BLOCKS)),
        pipe.LayerSpec(nn.LayerNorm, WIDTH),
        pipe.TiedLayerSpec(*tied, forward_fn=Words.as_head),
    ]
    model = pipe.PipelineModule(layers, num_stages=STAGES, loss_fn=loss_fn, **arguments)
    whole = weights()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(whole[name])
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": clipping,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": stage},
        "pipeline": {"use_reentrant": False},
    }
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    data = batches(engine.grid.get_data_parallel_rank())
    rows = []
    for _ in range(STEPS):
        loss = engine.train_batch(data_iter=data)
        norm = engine.get_global_grad_norm()
        rows.append([float(loss), float("nan" if norm is None else norm)])
    engine.destroy()
    return rows
