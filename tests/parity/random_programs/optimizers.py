"""Optimizers of random programs and their schedules. Imports only torch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from tests.parity.random_programs.models import Model
from tests.parity.random_programs.program import Optimizer


class _Own(optim.Optimizer):
    """An optimizer that the script defines."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group["lr"], self.state[p])

    def update(self, p: Tensor, grad: Tensor, lr: float, state: dict[str, Any]) -> None:
        raise NotImplementedError


class OwnMomentum(_Own):
    """Element by element."""

    def update(self, p: Tensor, grad: Tensor, lr: float, state: dict[str, Any]) -> None:
        mean = state.setdefault("mean", torch.zeros_like(p))
        mean.mul_(0.8).add_(grad, alpha=0.2)
        p.sub_(mean / (1 + mean.abs()), alpha=lr)


class WholeTensors(_Own):
    """LARS: the size of a step depends on the norm of the tensor."""

    def update(self, p: Tensor, grad: Tensor, lr: float, state: dict[str, Any]) -> None:
        p.sub_(grad * ((p.norm() + 0.1) / (grad.norm() + 1e-3)), alpha=lr)


class WarmLars(_Own):
    """The same, from its fourth step on."""

    def update(self, p: Tensor, grad: Tensor, lr: float, state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        ratio = (p.norm() + 0.1) / (grad.norm() + 1e-3) if state["step"] > 3 else 1.0
        p.sub_(grad * ratio, alpha=lr)


class ClippedTensors(_Own):
    """An optimizer that clips each tensor's gradient at a norm that is rarely reached."""

    def update(self, p: Tensor, grad: Tensor, lr: float, state: dict[str, Any]) -> None:
        p.sub_(grad * (0.3 / grad.norm()).clamp(max=1.0), alpha=lr)


class Centralised(_Own):
    """An optimizer that subtracts the mean over the first dimension from each gradient."""

    def update(self, p: Tensor, grad: Tensor, lr: float, state: dict[str, Any]) -> None:
        if grad.ndim > 1:
            grad = grad - grad.mean(0, keepdim=True)
        p.sub_(grad, alpha=lr)


CLASSES: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": optim.SGD,
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "adamax": optim.Adamax,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "adadelta": optim.Adadelta,
    "adagrad": optim.Adagrad,
    "rmsprop": optim.RMSprop,
    "asgd": optim.ASGD,
    "rprop": optim.Rprop,
    "adafactor": optim.Adafactor,
    "sparse_adam": optim.SparseAdam,
    "muon": optim.Muon,
    "own_momentum": OwnMomentum,
    "whole_tensors": WholeTensors,
    "warm_lars": WarmLars,
    "clipped_tensors": ClippedTensors,
    "centralised": Centralised,
}

OWN = ("own_momentum", "whole_tensors", "warm_lars", "clipped_tensors", "centralised")

VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "sgd": (
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"momentum": 0.8, "dampening": 0.1},
        {"weight_decay": 0.05, "maximize": True, "lr": 0.001},
        {"momentum": 0.9, "foreach": True},
        {"fused": True},
    ),
    "adam": (
        {},
        {"amsgrad": True},
        {"weight_decay": 0.02},
        {"fused": True},
        {"foreach": True, "betas": (0.8, 0.95)},
    ),
    "adamw": ({}, {"weight_decay": 0.1}, {"amsgrad": True}, {"fused": True}, {"maximize": True}),
    "adamax": ({}, {"weight_decay": 0.01}),
    "nadam": ({}, {"decoupled_weight_decay": True, "weight_decay": 0.02}),
    "radam": ({}, {"weight_decay": 0.02}),
    "adadelta": ({"lr": 0.5}, {"lr": 0.5, "rho": 0.8}),
    "adagrad": ({"eps": 1e-6}, {"eps": 1e-6, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "rmsprop": ({}, {"momentum": 0.5}, {"centered": True, "alpha": 0.9}),
    "asgd": ({}, {"t0": 2, "lambd": 0.01}),
    "rprop": ({},),
    "adafactor": ({}, {"weight_decay": 0.1}, {"d": 1.5}),
    "sparse_adam": ({},),
    "muon": ({}, {"momentum": 0.8, "nesterov": False}),
}
"""Options to draw, by optimizer; `lr` is 0.01 unless given."""

EPS = 1e-4
"""For optimizers that divide by the size of a gradient: far above the effect of rounding."""

DIVIDING = {"adam", "adamw", "adamax", "nadam", "radam", "rmsprop"}

BY_SIGN = {"rprop", "adafactor"}
"""Optimizers that treat a gradient of 1e-17 like a gradient of 1."""

REAL_ONLY = {"adafactor", "muon", "sparse_adam", "rprop", "nadam", "clipped_tensors"}
"""Optimizers that do not define updates of complex parameters, or no stable ones."""


def make(optimizer: Optimizer, models: Sequence[Model]) -> list[optim.Optimizer]:
    """Return the optimizers of `models`: one, or one for matrices and one for the rest."""
    named = {p: name for model in models for name, p in model.named_parameters()}
    later = _later(optimizer, models)
    params = [p for p in named if all(p is not each for each in later)]
    given = {"lr": 0.01} | dict(optimizer.options)
    if optimizer.name in DIVIDING:
        given["eps"] = EPS
    if not optimizer.rest:
        return [CLASSES[optimizer.name](_groups(optimizer, params, named), **given)]
    matrices = [p for p in params if p.ndim == 2 and not p.is_complex()]
    if optimizer.name == "sparse_adam":  # it takes no other gradients
        matrices = [models[0].stem.weight]
    rest = [p for p in params if all(p is not each for each in matrices)]
    return [CLASSES[optimizer.name](matrices, **given), optim.AdamW(rest, lr=0.003, eps=EPS)]


def _groups(
    optimizer: Optimizer, params: Sequence[nn.Parameter], named: dict[nn.Parameter, str]
) -> list[Any]:
    if optimizer.groups == "decay":
        groups: list[Any] = [
            {"params": [p for p in params if p.ndim > 1]},
            {"params": [p for p in params if p.ndim <= 1], "lr": 0.005},
        ]
        if "weight_decay" in dict(optimizer.options):
            groups[1]["weight_decay"] = 0.0
        return [group for group in groups if group["params"]]
    if optimizer.groups == "layers":
        heads = list(dict.fromkeys(named[p].split(".")[0] for p in params))
        return [
            {"params": [p for p in params if named[p].split(".")[0] == head], "lr": 0.01 / (i + 1)}
            for i, head in enumerate(heads)
        ]
    return list(params)


def _later(optimizer: Optimizer, models: Sequence[Model]) -> list[nn.Parameter]:
    """Return the parameters that are added to the optimizer during training."""
    return list(models[0].get_submodule(optimizer.later).parameters()) if optimizer.later else []


def add_later(optimizer: Optimizer, made: Sequence[optim.Optimizer], model: Model) -> None:
    """Add these parameters to the optimizer."""
    made[0].add_param_group({"params": _later(optimizer, [model]), "lr": 0.004})


def schedule(optimizer: Optimizer, made: optim.Optimizer, total: int) -> Any:
    """Return the learning-rate schedule or None; `total` is the number of all steps."""
    if optimizer.schedule == "cosine":
        return lr_scheduler.CosineAnnealingLR(made, total + 1)
    if optimizer.schedule == "steps":
        return lr_scheduler.StepLR(made, 2, 0.5)
    if optimizer.schedule == "lambda":
        return lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))
    if optimizer.schedule == "one_cycle":
        return lr_scheduler.OneCycleLR(made, max_lr=0.02, total_steps=total + 2)
    if optimizer.schedule == "plateau":
        return lr_scheduler.ReduceLROnPlateau(made, patience=0, factor=0.7)
    return None
