"""Records a training that no engine makes, by hooks on torch's optimizers: the original script of
`--against`, and those that train with `shardwise.horovod`."""

from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardwise.model import precision
from shardwise.model.module_records import ForwardInputs, joined, tensors_beside
from shardwise.tools.verify.watching import Facts
from shardwise.world.tensor_log import FeedTotals, Part, TensorLog


class Recorder:
    """Records into `folder` as rank `rank`, where the script trains without an engine; alone
    (`plain`) it ends the run after `stop_after` steps of the first optimizer."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        stop_after: int,
        preset: precision.Preset | None,
        facts: Facts,
        *,
        plain: bool,
    ) -> None:
        self._folder, self._rank, self._facts = folder, rank, facts
        self._stop_after, self._preset, self._plain = stop_after, preset, plain
        self._log: TensorLog | None = None
        self._optimizers: list[_Followed] = []
        self._loss, self._norm = 0.0, math.nan
        self._backwards, self._is_inside = 0, False
        self._first: float | None = None
        """The loss of the first backward inside of a step with a closure."""
        self._follow_losses()
        self._follow_optimizers()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    @property
    def _is_on(self) -> bool:
        return self._plain or "shardwise.horovod" in sys.modules

    def leave(self) -> None:
        """The script has ended: write what was noted about it."""
        driver = "plain" if self._plain else "horovod"
        known = {"driver": driver if self._optimizers else ""}
        if self._facts.engines:
            known = {"driver": "engine"}
        folder = self._folder / f"rank-{self._rank}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "facts.json").write_text(json.dumps({**self._facts.plain(), **known}))

    def _follow_losses(self) -> None:
        """Add up what backward is called on, and take note of norms that are clipped by."""
        backward: Any = torch.autograd.backward  # Tensor.backward calls it too
        clip = nn.utils.clip_grad_norm_

        @wraps(backward)
        def noted(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside:  # called again for itself, as a mode of torch functions does
                return backward(tensors, *args, **kwargs)
            self._backwards += 1
            for loss in (tensors,) if isinstance(tensors, Tensor) else tensors:
                if self._is_on and loss.numel() == 1:
                    self._loss += float(loss.detach())
                    self._first = self._loss if self._first is None else self._first
            self._is_inside = True
            try:
                return backward(tensors, *args, **kwargs)
            finally:
                self._is_inside = False

        forget: Any = optim.Optimizer.zero_grad

        @wraps(forget)
        def cleared(optimizer: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._loss = 0.0  # what backward had brought is not stepped on
            return forget(optimizer, *args, **kwargs)

        @wraps(clip)
        def clipped(*args: Any, **kwargs: Any) -> Any:
            norm = clip(*args, **kwargs)
            self._norm = float(norm)
            return norm

        torch.autograd.backward = noted
        optim.Optimizer.zero_grad = cleared  # type: ignore[method-assign, assignment]
        nn.utils.clip_grad_norm_ = clipped
        nn.utils.clip_grad.clip_grad_norm_ = clipped

    def _follow_optimizers(self) -> None:
        """Know every optimizer as it is made."""
        plain: Callable[..., None] = optim.Optimizer.__init__

        @wraps(plain)
        def made(optimizer: optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            plain(optimizer, *args, **kwargs)
            if self._is_on and not self._facts.engines:
                self._meet(optimizer)

        optim.Optimizer.__init__ = made  # type: ignore[method-assign, assignment]

    def _meet(self, optimizer: optim.Optimizer) -> None:
        followed = _Followed(optimizer)
        if not followed.models:
            return  # one of a library's own, over what no module has
        self._optimizers.append(followed)
        if self._preset is not None and self._preset.cast is not None:
            models = [model for _, model in followed.models]
            precision.cast_models(models, self._preset.cast)
            kind = next(iter(models[0].parameters())).device.type
            for model in models:
                precision.ForwardPrecision(self._preset, kind).attach(model)
        followed.follow()

    def _found(self, optimizer: optim.Optimizer) -> tuple[int, _Followed] | None:
        for number, followed in enumerate(self._optimizers):
            if followed.is_of(optimizer):
                return number, followed
        return None

    def _before_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        found = self._found(optimizer) if not self._facts.engines else None
        if found is None or not (self._backwards or _has_closure(args, kwargs)):
            return  # hvd.broadcast_optimizer_state makes a step that trains nothing
        number, followed = found
        followed.stepping = True
        if not followed.steps:
            self._write(number, followed, {})
        followed.norm = self._norm if self._norm == self._norm else _norm(optimizer)
        self._norm, self._first = math.nan, None
        if _has_closure(args, kwargs):
            followed.norm = math.nan  # its gradients are those of a step before

    def _after_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        found = self._found(optimizer) if not self._facts.engines else None
        if found is None or not found[1].stepping:
            return
        number, followed = found
        followed.stepping = False
        followed.steps += 1
        loss = self._loss
        if _has_closure(args, kwargs) and self._first is not None:
            loss = self._first
        figures = {"loss": loss, "grad_norm": followed.norm}
        self._loss = 0.0
        self._write(number, followed, figures)
        first = next(n for n, each in enumerate(self._optimizers) if each.steps)
        if self._plain and number == first and followed.steps >= self._stop_after:
            raise SystemExit(0)

    def _write(self, number: int, followed: _Followed, figures: dict[str, Any]) -> None:
        if self._log is None:
            self._log = TensorLog(self._folder, self._rank)
        with torch.no_grad():
            parts = list(followed.parts(self._rank))
            if not followed.steps:  # a forward has run by now, and buffers are not as they were
                parts = [part for part in parts if part.kind in ("model", "optimizer")]
            self._log.write(number, followed.steps, figures | followed.figures(), parts)


class _Followed:
    """An optimizer, and the models that have what it trains."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.steps = 0
        self.stepping = False
        self.norm = math.nan
        self.models = list(_named_models(self._parameters))
        self.inputs: ForwardInputs | None = None
        self.names: dict[Tensor, str] = {
            parameter: _without_wrapper(joined(prefix, name))
            for prefix, model in self.models
            for name, parameter in model.named_parameters()
        }

    @property
    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def is_of(self, optimizer: optim.Optimizer) -> bool:
        """Whether `optimizer` is this one, or a Horovod one around it."""
        mine = self._optimizer
        return optimizer is mine or optimizer.param_groups is mine.param_groups

    def follow(self) -> None:
        """Note from now on what the models are fed."""
        self.inputs = ForwardInputs(self.models, lambda: None)

    def figures(self) -> dict[str, Any]:
        """What a step's file has beside tensors."""
        assert self.inputs is not None
        # What is fed belongs to the step that it leads to, not to the state before the first.
        fed, samples = self.inputs.taken() if self.steps else (FeedTotals(), [])
        shapes = [(self.names[p], tuple(p.shape)) for p in self._parameters if p in self.names]
        return {
            "lr": [float(g["lr"]) for g in self._optimizer.param_groups if "lr" in g],
            "numbers": {
                f"{name}.{key}": float(value)
                for parameter, name in self.names.items()
                for key, value in self._state(parameter)
                if isinstance(value, int | float) or (isinstance(value, Tensor) and not value.ndim)
            },
            "order": [_without_wrapper(name) for name in self.inputs.order],
            "fed": vars(fed),
            "samples": samples,
            "parameters": [shapes],
        }

    def parts(self, rank: int) -> Iterator[Part]:
        """Parameters, optimizer state and buffers, whole on this rank."""
        for parameter, name in self.names.items():
            yield Part("model", name, parameter, copy=rank)
            for key, value in self._state(parameter):
                if isinstance(value, Tensor) and value.ndim:
                    yield Part("optimizer", f"{name}.{key}", value, copy=rank)
        for part in tensors_beside(self.models, rank):
            yield Part(part.kind, _without_wrapper(part.name), part.values, copy=rank)

    def _state(self, parameter: Tensor) -> Iterator[tuple[str, Any]]:
        yield from self._optimizer.state.get(parameter, {}).items()


def _named_models(trained: list[Tensor]) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that have `trained`, in the order of it, named as an engine does."""
    wanted = {id(parameter): place for place, parameter in enumerate(trained)}
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    found = []
    for module in modules:
        if id(module) not in inner:
            places = [wanted[id(p)] for p in module.parameters() if id(p) in wanted]
            if places:
                found.append((min(places), module))
    found.sort(key=lambda pair: pair[0])
    several = len(found) > 1
    for number, (_, module) in enumerate(found):
        yield f"models[{number}]" if several else "", module


def _without_wrapper(name: str) -> str:
    """The name without what DistributedDataParallel puts before it."""
    return name.removeprefix("module.") if name != "module" else ""


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Whether a step was given one; of what a hook is given the optimizer may be the first."""
    given = [*(each for each in args if not isinstance(each, optim.Optimizer)), *kwargs.values()]
    return any(callable(each) for each in given)


def _norm(optimizer: optim.Optimizer) -> float:
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    return math.sqrt(math.fsum(float(grad.double().square().sum()) for grad in grads))
