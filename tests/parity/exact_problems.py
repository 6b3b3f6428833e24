"""Problems for tests of the exact mode: models whose bits differ in plain fp32."""

import hashlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.data import TensorDataset

import shardwise as sw
from tests.parity import problems

ROWS = 30
"""Rows of the dataset: batches of 8 and a last one of 6, with micro-shards of unequal length."""

BATCH = 8
MAX_NORM = 0.05
TOKENS = problems.TOKENS


class DroppingGPT(problems.GPT):
    """The GPT with dropout after its embedding."""

    def forward(self, x: Tensor) -> Tensor:
        """x: (N, T) tokens; returns (N, TOKENS, T)."""
        x = F.dropout(self.tokens(x) + self.places, 0.2, self.training)
        for block in self.blocks:
            x = F.dropout(block(x), 0.1, self.training)
        return self.head(self.norm(x)).transpose(1, 2)


class LSTM(nn.Module):
    """Two layers with dropout between them; (N, T) tokens to (N, TOKENS, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, 12)
        self.lstm = nn.LSTM(12, 20, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(20, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(x))[0]).transpose(1, 2)


class MoEBlock(nn.Module):
    """A mixture of four experts with dropout, every router loss and a shared expert."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(problems.WIDTH)
        self.moe = sw.MoE(
            nn.Linear(problems.WIDTH, 4, bias=False),
            nn.ModuleList([_expert(11, dropout=0.1) for _ in range(4)]),
            shared=_expert(5),
            balance=0.3,
            z_loss=0.05,
            bias_rate=0.02,
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, WIDTH) to the same."""
        return x + self.moe(self.norm(x))


class PlannedBlock(nn.Module):
    """A mixture of four experts written by hand, for `expert_plan`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(problems.WIDTH, 4, bias=False)
        self.experts = nn.ModuleList([_expert(11) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, WIDTH) to the same."""
        gates, chosen = self.gate(x).softmax(-1).topk(2, -1)
        gates = gates / gates.sum(-1, keepdim=True)
        total = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            gate = (gates * (chosen == index)).sum(-1, keepdim=True)
            total = total + gate * expert(x)
        return total


def _expert(hidden: int, dropout: float = 0.0) -> nn.Module:
    width = problems.WIDTH
    return nn.Sequential(
        nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, width)
    )


class Twice(nn.Module):
    """An expert that uses its weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(problems.WIDTH, problems.WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        """(n, WIDTH) to the same."""
        return F.linear(F.linear(x, self.weight).tanh(), self.weight)


class TwiceBlock(nn.Module):
    """A mixture of four experts that use their weights twice."""

    def __init__(self) -> None:
        super().__init__()
        experts = nn.ModuleList([Twice() for _ in range(4)])
        self.moe = sw.MoE(nn.Linear(problems.WIDTH, 4, bias=False), experts)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, WIDTH) to the same."""
        return x + self.moe(x)


class MoEGPT(DroppingGPT):
    """The GPT with two mixtures of experts in place of its blocks."""

    def __init__(self, block: type[nn.Module] = MoEBlock) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(2)])


class Mixtral(nn.Module):
    """A Mixtral of Transformers, whose experts share tensors."""

    def __init__(self, hidden: int, kernel: str) -> None:
        import transformers

        super().__init__()
        config = transformers.MixtralConfig(
            vocab_size=TOKENS,
            hidden_size=12,
            intermediate_size=hidden,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            use_cache=False,
        )
        self.model = transformers.MixtralForCausalLM(config)
        self.model.set_experts_implementation(kernel)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T) tokens to (N, TOKENS, T)."""
        return self.model(input_ids=x).logits.transpose(1, 2)


MODELS = {"gpt": DroppingGPT, "convnet": problems.ConvNet, "lstm": LSTM}
EXPERTS = {
    "moe": MoEGPT,
    "moe-twice": partial(MoEGPT, TwiceBlock),
    "planned": partial(MoEGPT, PlannedBlock),
    # Experts of 288 and 144 elements, so that a group of 64 would cross them.
    "mixtral": partial(Mixtral, 12, "eager"),
    "mixtral-grouped": partial(Mixtral, 12, "grouped_mm"),
    "mixtral-odd": partial(Mixtral, 11, "eager"),
}
KINDS = {"gpt": "gpt", "convnet": "convnet", "lstm": "gpt"} | dict.fromkeys(EXPERTS, "gpt")


def train(
    world: Any,
    model: str,
    settings: dict[str, Any],
    optimizer: str = "adamw",
    epochs: int = 2,
    scale: float = 1.0,
) -> str:
    """Train `model` with an engine of `settings` on `scale` x its loss, and return one hash.

    It covers the statistics of every step, parameters, buffers and optimizer state.
    """
    net, engine, loader = _made(world, model, settings, optimizer)
    told = [figure for step in _steps(net, engine, loader, epochs, scale) for figure in step]
    assert max(told[1::3]) > MAX_NORM, "clipping was never on"
    return hash_of([*told, *_ended(net, engine)])


def train_on(
    world: Any, model: str, settings: dict[str, Any], folder: str, steps: int, epochs: int = 2
) -> str:
    """Resume from the newest checkpoint in `folder`, train until step `steps`, and save.

    Returns a hash of the last step's statistics, parameters, buffers and optimizer state.
    """
    net, engine, loader = _made(world, model, settings, "adamw")
    engine.track(loader=loader)
    engine.resume(folder)
    told = []
    for figures in _steps(net, engine, loader, epochs):
        told.append(figures)
        if engine.steps == steps:
            break
    assert engine.steps == steps
    engine.save(folder)
    return hash_of([*told[-1], *_ended(net, engine)])


def _made(
    world: Any, model: str, settings: dict[str, Any], optimizer: str
) -> tuple[nn.Module, sw.Engine, sw.Loader]:
    world.engines = 0  # each training is the first of its run, and draws the same numbers
    torch.manual_seed(7)
    net = {**MODELS, **EXPERTS}[model]()
    engine = sw.Engine(net, OPTIMIZERS[optimizer](net), **settings)
    return net, engine, sw.Loader(data_of(model), BATCH, shuffle=True)


def _steps(
    net: nn.Module, engine: sw.Engine, loader: sw.Loader, epochs: int, scale: float = 1.0
) -> Iterator[tuple[float, float, float]]:
    """Run the remaining steps, and yield loss, norm and weight of each."""
    for _ in loader.epochs(epochs):
        for step in loader.steps():
            for x, y in step:
                loss = problems.loss_of(net, x, y)
                engine.backward(scale * loss, weight=problems.weight_of(y))
            stats = engine.step(max_norm=MAX_NORM)
            yield stats.loss, stats.grad_norm, stats.weight


def _ended(net: nn.Module, engine: sw.Engine) -> list[Any]:
    """Close an engine, and return its parameters, buffers and optimizer state."""
    with engine.full_parameters():
        values: list[Any] = [value.clone() for value in net.state_dict().values()]
    state = engine.optimizer_state_dict()["state"]
    engine.close()
    return values + [value for key in sorted(state) for value in state[key].values()]


def data_of(model: str) -> TensorDataset:
    """Return rows of inputs and targets."""
    return TensorDataset(*problems.DATA[KINDS[model]](ROWS, torch.float32))


def hash_of(values: Iterable[Any]) -> str:
    """Return one hash of the bits of numbers and tensors."""
    found = hashlib.blake2b(digest_size=8)
    for value in values:
        told = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64)
        found.update(told.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


OPTIMIZERS = {
    "adamw": lambda model: optim.AdamW(problems.parameter_groups(model, 2), lr=3e-3),
    "rmsprop": lambda model: optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5),
    "sgd": lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True),
}
