"""Uses hooks on torch's optimizers to record scripts that train without an engine.

Such scripts are the original script of `--against`, and scripts that use `shardwise.horovod`.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
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
from shardwise.model.module_records import ForwardInputs, joined, other_tensors
from shardwise.tools.verify.watching import Facts
from shardwise.world.tensor_log import FeedTotals, Part, TensorLog


class Recorder:
    """Records the training of rank `rank` in `folder` if the script uses no engine.

    If `plain` is true, the script runs without a launcher, so the recorder also has to stop it. It
    does so after `stop_after` steps of the optimizer that steps first. `preset` is the precision to
    apply to models.
    """

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
        self._optimizers: list[_TrackedOptimizer] = []
        self._loss, self._norm = 0.0, math.nan
        self._backwards, self._is_inside = 0, False
        self._first_loss: float | None = None
        """Loss of the first backward pass inside a step with a closure."""
        self._follow_losses()
        self._follow_optimizers()
        # torch's global hooks also see optimizers that a library creates.
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    @property
    def _is_on(self) -> bool:
        return self._plain or "shardwise.horovod" in sys.modules

    def write_facts(self) -> None:
        """Write the facts about the script to a file. Called when the script ends."""
        driver = "plain" if self._plain else "horovod"
        facts = {"driver": driver if self._optimizers else ""}
        if self._facts.engines:
            facts = {"driver": "engine"}
        folder = self._folder / f"rank-{self._rank}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "facts.json").write_text(json.dumps({**self._facts.plain(), **facts}))

    def _follow_losses(self) -> None:
        """Patch torch to sum the losses of backward passes, and to store the norm when it clips."""
        backward: Any = torch.autograd.backward  # Tensor.backward calls it too
        clip = nn.utils.clip_grad_norm_

        @wraps(backward)
        def noted(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside:  # a torch function mode calls this function again from inside
                return backward(tensors, *args, **kwargs)
            # Several backward passes before a step are micro-batches. Add up their losses, like
            # their gradients.
            self._backwards += 1
            for loss in (tensors,) if isinstance(tensors, Tensor) else tensors:
                if self._is_on and loss.numel() == 1:
                    self._loss += float(loss.detach())
                    self._first_loss = self._loss if self._first_loss is None else self._first_loss
            self._is_inside = True
            try:
                with nullcontext() if self._preset is None else self._preset.in_backward():
                    return backward(tensors, *args, **kwargs)
            finally:
                self._is_inside = False

        forget: Any = optim.Optimizer.zero_grad

        @wraps(forget)
        def cleared(optimizer: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._loss = 0.0  # the script discards these gradients without a step
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
        """Patch torch to track every optimizer from its construction."""
        plain: Callable[..., None] = optim.Optimizer.__init__

        @wraps(plain)
        def made(optimizer: optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            plain(optimizer, *args, **kwargs)
            if self._is_on and not self._facts.engines:
                self._track(optimizer)

        optim.Optimizer.__init__ = made  # type: ignore[method-assign, assignment]

    def _track(self, optimizer: optim.Optimizer) -> None:
        tracked = _TrackedOptimizer(optimizer)
        # A library may create an optimizer for parameters that belong to no module. They cannot be
        # compared, because they have no names.
        if not tracked.models:
            return
        self._optimizers.append(tracked)
        if self._preset is not None and self._preset.cast is not None:
            models = [model for _, model in tracked.models]
            precision.cast_models(models, self._preset.cast)
            kind = next(iter(models[0].parameters())).device.type
            for model in models:
                precision.ForwardPrecision(self._preset, kind).attach(model)
        tracked.follow()

    def _find(self, optimizer: optim.Optimizer) -> tuple[int, _TrackedOptimizer] | None:
        for number, tracked in enumerate(self._optimizers):
            if tracked.is_of(optimizer):
                return number, tracked
        return None

    def _before_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        match = self._find(optimizer) if not self._facts.engines else None
        if match is None or not (self._backwards or _has_closure(args, kwargs)):
            return  # hvd.broadcast_optimizer_state calls step without any gradients
        number, tracked = match
        tracked.is_stepping = True
        if not tracked.steps:
            self._write(number, tracked, {})
        tracked.norm = self._norm if self._norm == self._norm else _norm(optimizer)
        self._norm, self._first_loss = math.nan, None
        if _has_closure(args, kwargs):
            tracked.norm = math.nan  # the closure has not run yet, so these gradients are old

    def _after_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        match = self._find(optimizer) if not self._facts.engines else None
        if match is None or not match[1].is_stepping:
            return
        number, tracked = match
        tracked.is_stepping = False
        tracked.steps += 1
        loss = self._loss
        if _has_closure(args, kwargs) and self._first_loss is not None:
            # A closure may run several times per step. Use its first loss, as an engine does.
            loss = self._first_loss
        figures = {"loss": loss, "grad_norm": tracked.norm}
        self._loss = 0.0
        self._write(number, tracked, figures)
        first = next(n for n, each in enumerate(self._optimizers) if each.steps)
        if self._plain and number == first and tracked.steps >= self._stop_after:
            raise SystemExit(0)

    def _write(self, number: int, tracked: _TrackedOptimizer, figures: dict[str, Any]) -> None:
        if self._log is None:
            self._log = TensorLog(self._folder, self._rank)
        with torch.no_grad():
            parts = list(tracked.parts(self._rank))
            if not tracked.steps:  # a forward pass has already run and may have changed buffers
                parts = [part for part in parts if part.kind in ("model", "optimizer")]
            self._log.write(number, tracked.steps, figures | tracked.figures(), parts)


class _TrackedOptimizer:
    """An optimizer, and the models that contain its parameters."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.steps = 0
        self.is_stepping = False
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
        """Return whether `optimizer` is this one, or a Horovod optimizer that wraps it."""
        # Horovod's wrapper is a separate object that shares the list of parameter groups.
        mine = self._optimizer
        return optimizer is mine or optimizer.param_groups is mine.param_groups

    def follow(self) -> None:
        self.inputs = ForwardInputs(self.models, lambda: None)

    def figures(self) -> dict[str, Any]:
        """Return the figures of a step's file except the loss and the norm."""
        assert self.inputs is not None
        # Inputs belong to the step after them, not to the state before the first step.
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
        """Yield the parameters, optimizer state and buffers. Every rank has full copies of them."""
        for parameter, name in self.names.items():
            yield Part("model", name, parameter, copy=rank)
            for key, value in self._state(parameter):
                if isinstance(value, Tensor) and value.ndim:
                    yield Part("optimizer", f"{name}.{key}", value, copy=rank)
        for part in other_tensors(self.models, rank):
            yield Part(part.kind, _without_wrapper(part.name), part.values, copy=rank)

    def _state(self, parameter: Tensor) -> Iterator[tuple[str, Any]]:
        yield from self._optimizer.state.get(parameter, {}).items()


def _named_models(trained: list[Tensor]) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) for the outermost modules that contain the parameters `trained`.

    The names are those that an engine would use.
    """
    # Optimizers do not know their models, so search all live modules. Sort the modules by their
    # first parameter in the optimizer, as in sw.Engine([model, ...], optimizer).
    position = {id(parameter): number for number, parameter in enumerate(trained)}
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    models = []
    for module in modules:
        # Outermost modules only, because an engine receives these and names parameters from there.
        if id(module) not in inner:
            positions = [position[id(p)] for p in module.parameters() if id(p) in position]
            if positions:
                models.append((min(positions), module))
    models.sort(key=lambda pair: pair[0])
    # As in an engine, a single model has no prefix.
    several = len(models) > 1
    for number, (_, module) in enumerate(models):
        yield f"models[{number}]" if several else "", module


def _without_wrapper(name: str) -> str:
    """Return the name without the "module." prefix of DistributedDataParallel."""
    return name.removeprefix("module.") if name != "module" else ""


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Return whether `step` was called with a closure.

    The hook's `args` may start with the optimizer.
    """
    arguments = [
        *(each for each in args if not isinstance(each, optim.Optimizer)),
        *kwargs.values(),
    ]
    return any(callable(each) for each in arguments)


def _norm(optimizer: optim.Optimizer) -> float:
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    return math.sqrt(math.fsum(float(grad.double().square().sum()) for grad in grads))
