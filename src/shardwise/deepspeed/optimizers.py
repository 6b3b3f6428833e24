"""Creates torch optimizers and schedules from their names in a DeepSpeed config."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn, optim

from shardwise.config.deepspeed.job import DeepSpeedJob, Named
from shardwise.deepspeed import schedules
from shardwise.deepspeed.ops.adam import FusedAdam
from shardwise.errors import ConfigError

Parameters = Sequence[Any]
"""Parameters, or dicts of them in the form of torch's parameter groups."""


def of_json(
    named: Named, parameters: Parameters, models: Sequence[nn.Module], name: str
) -> list[optim.Optimizer]:
    """Create the optimizers that the config `name` specifies, for `parameters`.

    Muon becomes two optimizers, because parameters that are not matrices are trained with AdamW.
    Raises ConfigError for unknown names and arguments.
    """
    try:
        if named.name == "Muon":
            return _muon(named.params, parameters, models)
        if named.name in ("Adam", "AdamW"):
            return [_adam_of(named, parameters)]
        return [_of_torch(named, parameters, name)]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: optimizer {named.name}: {error}.") from None


def one_of_json(
    job: DeepSpeedJob, parameters: Parameters, models: Sequence[nn.Module]
) -> optim.Optimizer:
    """Create the config's optimizer for `parameters`.

    Raises ConfigError for Muon, which needs two optimizers.
    """
    assert job.optimizer is not None
    found = of_json(job.optimizer, parameters, models, job.document.name)
    if len(found) > 1:
        raise ConfigError(
            f"{job.document.name}: {job.optimizer.name} needs two optimizers, but this library "
            "steps only one. Write AdamW, or make the optimizers in the script."
        )
    return found[0]


def _adam_of(named: Named, parameters: Parameters) -> optim.Optimizer:
    params = dict(named.params)
    decoupled = params.pop("adam_w_mode", True) or named.name == "AdamW"
    if params.pop("torch_adam", False):
        params.pop("fp32_optimizer_states", None)
        kind = optim.AdamW if decoupled else optim.Adam
        _check_keywords(kind, params)
        return kind(parameters, **params)
    states = params.pop("fp32_optimizer_states", True)
    if states is False:
        raise ValueError(
            "fp32_optimizer_states=false is not supported, because optimizer state is fp32; leave "
            "it out"
        )
    _check_keywords(FusedAdam, params)
    return FusedAdam(parameters, adam_w_mode=decoupled, **params)


def _of_torch(named: Named, parameters: Parameters, name: str) -> optim.Optimizer:
    kind = getattr(optim, named.name, None)
    if not (isinstance(kind, type) and issubclass(kind, optim.Optimizer)):
        raise ConfigError(
            f"{name}: there is no optimizer {named.name!r}. Write Adam, AdamW, Adagrad, Muon or "
            "another one of torch.optim, or pass your own optimizer to initialize."
        )
    _check_keywords(kind, named.params)
    return kind(parameters, **named.params)


def _check_keywords(kind: Any, params: Mapping[str, Any]) -> None:
    """Raise ValueError if `kind` does not accept one of `params`."""
    _, *known = inspect.signature(kind).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in known):
        return
    takes = [each.name for each in known]
    if unknown := [name for name in params if name not in takes]:
        raise ValueError(f"it has no {unknown[0]}; its keywords are {', '.join(takes)}")


def schedule_of_json(named: Named, optimizer: Any, name: str) -> Any:
    """Create the DeepSpeed or torch schedule that is specified in the config `name`.

    Raises ConfigError for unknown names and arguments.
    """
    kind: Any = schedules.BY_NAME.get(named.name) or getattr(optim.lr_scheduler, named.name, None)
    if not isinstance(kind, type):
        raise ConfigError(
            f"{name}: there is no schedule {named.name!r}. Write one of "
            f"{', '.join(schedules.BY_NAME)}, or one of torch.optim.lr_scheduler."
        )
    try:
        _check_keywords(kind, named.params)
        return kind(optimizer, **named.params)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: scheduler {named.name}: {error}.") from None


# -- Muon -----------------------------------------------------------------------------------------


def _muon(
    params: Mapping[str, Any], parameters: Parameters, models: Sequence[nn.Module]
) -> list[optim.Optimizer]:
    """Create Muon for matrices other than embeddings and the head, and AdamW for the rest."""
    kind = getattr(optim, "Muon", None)
    if kind is None:
        raise ConfigError(
            f"torch {torch.__version__} has no Muon: install a newer torch, or write another "
            "optimizer."
        )
    given = dict(params)
    if given.pop("adam_w_mode", True) is False or given.pop("per_head_muon", False):
        raise ValueError("adam_w_mode=false and per_head_muon are not supported: leave them out")
    if unknown := sorted(set(given) - _MUON_TAKES):
        keywords = ", ".join(sorted(_MUON_TAKES))
        raise ValueError(f"it has no {unknown[0]}; its keywords are {keywords}")
    shared = {key: given[key] for key in ("lr", "weight_decay") if key in given}
    by_muon = {"lr": 0.02, "weight_decay": 0.0} | shared
    by_adam: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-10}
    by_adam |= shared | {key: given[key] for key in ("betas", "eps") if key in given}
    by_muon["lr"] = given.get("muon_lr", by_muon["lr"])
    by_adam["lr"] = given.get("adam_lr", by_adam["lr"])
    if "momentum" in given:
        by_muon["momentum"] = given["momentum"]
    matrices, others = _halves(parameters, models)
    found = []
    if matrices:
        found.append(kind(matrices, **by_muon))
    if others:
        found.append(optim.AdamW(others, **by_adam))
    return found


_MUON_TAKES = {"lr", "muon_lr", "adam_lr", "momentum", "weight_decay", "betas", "eps"}


def _halves(
    parameters: Parameters, models: Sequence[nn.Module]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the parameter groups for Muon and those for AdamW."""
    matrices = {p for model in models for p in _matrices(model)}
    loose = [each for each in parameters if not isinstance(each, Mapping)]
    groups = [dict(each) for each in parameters if isinstance(each, Mapping)]
    if loose:
        groups.append({"params": loose})
    halves: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for group in groups:
        params = group["params"]  # one parameter, or several
        held = [params] if isinstance(params, torch.Tensor) else list(params)
        trained = [p for p in held if p.requires_grad]
        for half, taken in zip(halves, (True, False), strict=True):
            chosen = [p for p in trained if (p in matrices) is taken]
            keys = ("lr", "weight_decay") if taken else ("lr", "weight_decay", "betas", "eps")
            if chosen:
                half.append({"params": chosen} | {k: group[k] for k in keys if k in group})
    return halves


def _matrices(model: nn.Module) -> Iterable[nn.Parameter]:
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and not any(w in name.lower() for w in ("embed", "lm_head")):
            if parameter.ndim > 2:
                shape = tuple(parameter.shape)
                raise ConfigError(
                    f"torch's Muon trains matrices only, but {name} has shape {shape}: write "
                    "another optimizer."
                )
            yield parameter


class ManyOptimizers:
    """Several optimizers that step together and have a single list of parameter groups."""

    def __init__(self, optimizers: Sequence[optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self.defaults = self.optimizers[0].defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The original groups of all optimizers, not copies."""
        return [group for each in self.optimizers for group in each.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        for each in self.optimizers:
            each.zero_grad(set_to_none)
