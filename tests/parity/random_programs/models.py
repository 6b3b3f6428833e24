"""Random models, their data and their losses. Imports only torch."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.parity.random_programs import blocks
from tests.parity.random_programs.blocks import WIDTH
from tests.parity.random_programs.program import Net, Part, Program

TOKENS, TIME, PIXELS, PAD = 11, 5, 4, -100

Batch = tuple[Tensor, Tensor]
"""Inputs, and targets: numbers (rows, WIDTH), or classes (rows, TIME), PAD for no target."""


class Pictures(nn.Module):
    """A stem for pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.norm = nn.GroupNorm(3, WIDTH)
        self.second = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.norm(self.conv(x)))).mean((2, 3))


class Model(nn.Module):
    """A model of a stem, blocks and a head, by the program."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.checkpoint = net.checkpoint
        known = blocks.ANY | blocks.OVER_TIME | blocks.FURTHER
        if net.modality == "tokens":
            self.stem: nn.Module = nn.Embedding(TOKENS, WIDTH, **dict(net.embedding))
        else:
            self.stem = Pictures() if net.modality == "pictures" else nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(known[name]() for name in net.blocks)
        self.head = nn.Linear(WIDTH, TOKENS if net.modality == "tokens" else WIDTH)
        if net.tied:
            self.head.weight = self.stem.weight
        self.kept: list[Tensor] = []

    def features(self, x: Tensor) -> Tensor:
        """Return the input of the head."""
        x = self.stem(x)
        for block in self.blocks:
            if self.checkpoint and self.training and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=self.checkpoint == "reentrant")
            else:
                x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def build(program: Program) -> list[Model]:
    """Build the program's models, the same in every process."""
    torch.manual_seed(program.seed)
    models = []
    for net in program.nets:
        model = Model(net).double()
        for module in model.modules():
            if isinstance(module, blocks.Single):
                module.float()
        if net.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        models.append(model)
    return models


def tell_step(models: Sequence[Model], number: int) -> None:
    """Set the number of the step in all blocks."""
    for model in models:
        for module in model.modules():
            if isinstance(module, blocks.Block):
                module.now = number


def batch(program: Program, step: int, part: int, rows: int) -> Batch:
    """Return the global batch of one part of a step."""
    draw = torch.Generator().manual_seed(program.seed * 1009 + step * 31 + part)
    modality = program.nets[0].modality
    if modality == "tokens":
        x = torch.randint(0, TOKENS, (rows, TIME), generator=draw)
        y = torch.randint(0, TOKENS, (rows, TIME), generator=draw)
        lengths = torch.randint(1, TIME + 1, (rows, 1), generator=draw)
        return x, y.masked_fill(torch.arange(TIME) >= lengths, PAD)
    shape = (rows, 3, PIXELS, PIXELS) if modality == "pictures" else (rows, WIDTH)
    return (
        torch.randn(shape, generator=draw, dtype=torch.float64),
        torch.randn((rows, WIDTH), generator=draw, dtype=torch.float64),
    )


CLASS_WEIGHTS = torch.linspace(0.2, 3.0, TOKENS, dtype=torch.float64)
"""Weights of the classes for the loss "class_weights"."""


def items(losses: Sequence[str], data: Batch) -> float:
    """Return the number of items of `data` that the losses are means over."""
    if "ignored" in losses:
        return int((data[1] != PAD).sum())
    if "class_weights" in losses:
        return float(CLASS_WEIGHTS[data[1][data[1] != PAD]].sum())
    return int((data[1] != PAD).sum()) if "tokens" in losses else len(data[0])


def explicit(part: Part) -> bool:
    """Return whether the weight of a part must be passed."""
    return part.explicit or part.factor != 1 or "tokens" in part.losses


# -- losses -----------------------------------------------------------------------------------


def output(program: Program, models: Sequence[Model], x: Tensor) -> Tensor:
    """Return the output for `x`: of all models in a chain, else of the first."""
    y: Tensor = models[0](x)
    return models[1](y) if program.family == "chain" else y


def loss_of(
    program: Program, models: Sequence[Model], engine: int, name: str, data: Batch
) -> Tensor:
    """Return a mean over the items of `data`, for the models of `engine`."""
    if program.family == "gan":
        return _of_a_gan(models, engine, data)
    x, y = data
    models[0].kept = []
    if name == "penalty":
        return _with_penalty(program, models, data)
    if name == "sum":
        return _base("mse", output(program, models, x), y) * items((name,), data) * 0.1
    if name == "method":
        return models[0].head(models[0].features(x)).square().mean()
    if name == "functional":
        values = dict(models[0].named_parameters())
        return torch.func.functional_call(models[0], values, (x,)).square().mean()
    return _base(name, output(program, models, x), y) + _further(name, models)


def losses_of_one_graph(
    program: Program, models: Sequence[Model], names: Sequence[str], data: Batch
) -> list[Tensor]:
    """Return several losses of one forward."""
    out = output(program, models, data[0])
    return [_base(name, out, data[1]) for name in names]


def _base(name: str, out: Tensor, y: Tensor) -> Tensor:
    if name == "abs":
        return 0.5 * (out.square() + 0.1).sqrt().mean()
    if name == "class_weights":
        weights = CLASS_WEIGHTS.to(out.dtype)
        return functional.cross_entropy(
            out.flatten(0, -2), y.flatten(), weight=weights, ignore_index=PAD
        )
    if name in ("tokens", "ignored"):
        return functional.cross_entropy(out.flatten(0, -2), y.flatten(), ignore_index=PAD)
    if y.is_floating_point():
        return (out - y).square().mean() if name != "square" else out.square().mean()
    if name == "mse":
        return functional.cross_entropy(out.flatten(0, -2), y.flatten().clamp(min=0))
    return 0.1 * out.square().mean()


def _further(name: str, models: Sequence[Model]) -> Tensor | float:
    """Return a further term of the loss: a penalty, or a mean of kept activations."""
    weights = [p for model in models for p in model.parameters()]
    if name == "l2":
        return 0.01 * torch.stack([p.abs().square().sum() for p in weights]).sum()
    if name == "norms":
        return 0.01 * torch.stack([p.norm() for p in weights if p.ndim > 1]).sum()
    if name == "hook":
        kept = [each.square().mean() for each in models[0].kept]
        return 0.1 * torch.stack(kept).sum() if kept else 0.0
    return 0.0


def _with_penalty(program: Program, models: Sequence[Model], data: Batch) -> Tensor:
    """Return the loss plus a gradient penalty of the output by the input."""
    x = data[0].clone().requires_grad_()
    out = output(program, models, x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return _base("mse", out, data[1]) + 0.1 * slope.flatten(1).square().sum(1).mean()


def _of_a_gan(models: Sequence[Model], engine: int, data: Batch) -> Tensor:
    makes, judges = models
    made = makes(data[0])
    if engine == 0:
        return (judges(made) - 1).square().mean()
    return (judges(data[1]) - 1).square().mean() + judges(made.detach()).square().mean()


def keep_activations(model: Model) -> None:
    """Attach the hooks that the loss "hook" needs."""
    for module in model.modules():
        if isinstance(module, blocks.Hooked):
            module.act.register_forward_hook(
                lambda _, __, out: model.kept.append(out) if out.requires_grad else None
            )
