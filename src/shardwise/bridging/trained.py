"""One engine for each set of models and optimizers that have parameters in common.

    prepare(generator, optimizer_g)           one engine
    prepare(discriminator, optimizer_d)       another: each steps as often as it likes
    prepare(model, optimizer_a, optimizer_b)  one, which steps when both optimizers have

A loss goes to every engine that its graph reaches, as a plain backward leaves a gradient in every
parameter that it reaches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from torch import Tensor, nn, optim

import shardwise as sw
from shardwise.errors import UsageError

Make = Callable[[list[nn.Module], list[optim.Optimizer]], sw.Engine]


@dataclass(eq=False)
class Trained:
    """An engine with what it is made of, and what it was asked since its last step."""

    engine: sw.Engine
    models: list[nn.Module]
    optimizers: list[optim.Optimizer]
    owner: TrainedModels
    skipped: bool = False
    """Whether its last step updated nothing."""
    norm: float = 0.0
    """Of the gradient, where it was asked to be clipped."""
    max_norm: float | None = None
    """What the next step clips to."""
    _stepped: list[optim.Optimizer] = field(default_factory=list)

    def parameters(self) -> set[int]:
        """The identities of what its optimizers train now."""
        groups = (group for each in self.optimizers for group in each.param_groups)
        return {id(p) for group in groups for p in group["params"] if p.requires_grad}

    @property
    def waits(self) -> bool:
        """Whether some of its optimizers were stepped, and others are to be."""
        return bool(self._stepped)

    def check_complete(self, call: str) -> None:
        """Raise UsageError where some optimizers were stepped and not all."""
        if self._stepped:
            left = [each for each in self.optimizers if each not in self._stepped]
            names = " and ".join(type(each).__name__ for each in left)
            raise UsageError(
                f"{call} before {names} was stepped: the optimizers of one model step together, "
                "since their gradients are made together. Step all of them after each backward; "
                "or give each optimizer a model of its own."
            )

    def step(self, optimizer: optim.Optimizer, closure: Callable[[], Any] | None) -> None:
        """Step `optimizer`: the engine does when the last of its optimizers is asked to."""
        if optimizer in self._stepped:
            self.check_complete(f"{type(optimizer).__name__}.step() again")
        if closure is not None and len(self.optimizers) > 1:
            raise UsageError(
                f"{type(optimizer).__name__}.step(closure) where the model has several "
                "optimizers, which step together: make the backward before, and step without."
            )
        self._stepped.append(optimizer)
        if len(self._stepped) < len(self.optimizers):
            return
        self._stepped.clear()
        max_norm, self.max_norm = self.max_norm, None
        self.skipped = self.engine.step(max_norm, closure=closure).skipped

    def clear(self) -> None:
        """Forget the gradients since the last step."""
        self._stepped.clear()
        self.max_norm = None
        self.engine.zero_grad()

    def clip(self, max_norm: float, coefficient: float | None = None) -> None:
        """Let the next step clip to `max_norm`; or, with a `coefficient` below 1, multiply by it.

        Clipping again clips what is clipped already, so the smallest counts.
        """
        if coefficient is not None:
            max_norm = coefficient * (self.norm + _EPSILON) if coefficient < 1 else math.inf
        if math.isfinite(self.norm) and math.isfinite(max_norm):
            self.max_norm = max_norm if self.max_norm is None else min(max_norm, self.max_norm)

    def clipped_norm(self) -> float:
        """The norm as it is after what was asked so far."""
        return self.norm * self.coefficient

    @property
    def coefficient(self) -> float:
        """What the next step multiplies by to clip."""
        return 1.0 if self.max_norm is None else min(1.0, self.max_norm / (self.norm + _EPSILON))


_made: list[ref[Trained]] = []
"""What was made in this process by whichever Accelerator, in that order. It lives as long as its
models, which hold it: so it is there on all ranks, or on none."""

_HELD = "_shardwise_trained"
"""The attribute of a model that holds what trains it."""


class _Held:
    """What a model holds of what trains it; copies of the model hold nothing."""

    def __init__(self, trained: Trained | None = None) -> None:
        self.trained = trained

    def __reduce__(self) -> tuple[type[_Held], tuple[()]]:
        return _Held, ()


def _in_training() -> list[Trained]:
    """What is trained now in this process."""
    found = [(each, each()) for each in _made]
    _made[:] = [each for each, trained in found if trained is not None]
    return [trained for _, trained in found if trained is not None]


def _remember(trained: Trained) -> None:
    _made.append(ref(trained))
    for model in trained.models:
        vars(model)[_HELD] = _Held(trained)


def _forget(trained: Trained) -> None:
    _made[:] = [each for each in _made if each() is not trained]
    for model in trained.models:
        vars(model).pop(_HELD, None)


_EPSILON = 1e-6
"""As torch.nn.utils.clip_grad_norm_ has it."""


class TrainedModels:
    """The engines of a script that prepares models and optimizers in any order.

    `make` makes an engine of models and optimizers.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._trained: list[Trained] = []
        self._waiting: list[optim.Optimizer] = []
        self._was_taken = False
        """Whether another one took over what was trained here."""

    def __iter__(self) -> Iterator[Trained]:
        return iter(self._trained)

    def __len__(self) -> int:
        return len(self._trained)

    def form(self, models: Sequence[nn.Module], optimizers: Sequence[optim.Optimizer]) -> None:
        """Make the engines that `models` and `optimizers`, all that are prepared, allow now.

        An optimizer waits until the models of all its parameters are there. One that comes later
        for a model that is trained already has its engine made anew; so has a model that another
        Accelerator has trained until now. Collective.
        """
        self._waiting = []
        for part in _parts(models, optimizers):
            if not part.models or not part.covers_optimizers():
                self._waiting += part.optimizers
                continue
            before = [each for each in self._trained if _meet(each.optimizers, part.optimizers)]
            if len(before) == 1 and len(before[0].optimizers) == len(part.optimizers):
                continue
            for each in before:
                self._end(each)
            _take_over(part.models)
            engine = self._make(part.models, part.optimizers)
            new = Trained(engine, part.models, part.optimizers, owner=self)
            self._trained.append(new)
            _remember(new)
            self._was_taken = False

    def of(self, optimizer: optim.Optimizer) -> Trained | None:
        """What trains with `optimizer`, where its engine is made."""
        found = [each for each in self._trained if _meet(each.optimizers, [optimizer])]
        return found[0] if found else None

    def of_model(self, model: nn.Module) -> Trained | None:
        """What trains `model`, or a model that it is a part of, here or for another
        Accelerator."""
        found = [each for each in _in_training() if any(model in m.modules() for m in each.models)]
        return found[0] if found else None

    def close(self) -> None:
        """Give models and optimizers back as plain ones. Collective."""
        while self._trained:
            self._end(self._trained[-1])

    def _end(self, trained: Trained) -> None:
        self._trained.remove(trained)
        _forget(trained)
        trained.engine.close()

    def lose(self, trained: Trained) -> None:
        """Give up `trained`, whose models another Accelerator takes. Collective."""
        self._end(trained)
        self._was_taken = True

    @property
    def taken_over(self) -> str:
        """Why nothing is trained here, where another one has taken the models; else empty."""
        if not self._was_taken:
            return ""
        return (
            "another Accelerator or Trainer has prepared the model since, and trains it now: "
            "prepare it here again"
        )

    # -- a step, piece by piece -------------------------------------------------------------

    def backward(self, loss: Tensor, *, last: bool, retain_graph: bool = False) -> None:
        """Backward of `loss` in every engine that it reaches, as with DistributedDataParallel."""
        reached = self._reached(loss)
        for number, each in enumerate(reached, 1):
            each.check_complete("A backward")
            keep = retain_graph or number < len(reached)
            each.engine.backward(loss, reduction="ddp", last=last, retain_graph=keep)

    def _reached(self, loss: Tensor) -> list[Trained]:
        if len(self._trained) < 2:
            self._check_any()
            return self._trained
        found = _parameters_of(loss)
        reached = [each for each in self._trained if each.parameters() & found]
        if not reached:
            raise UsageError(
                "This loss reaches no parameter that a prepared optimizer trains: compute it with "
                "the models that were prepared."
            )
        return reached

    def _check_any(self) -> None:
        """Raise UsageError where nothing can be trained."""
        if self._trained:
            return
        names = " and ".join(type(each).__name__ for each in self._waiting)
        why = self.taken_over or (
            f"{names} trains parameters of a model that was not prepared, or of a copy of it: "
            "prepare the model itself"
            if names
            else "no model was prepared with an optimizer: prepare both"
        )
        raise UsageError(f"There is nothing to train: {why}, before the loop.")

    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> float | None:
        """Clip the gradients of `parameters` by their common 2-norm in the next steps; returns the
        norm before, or None where they are not all that one or several engines train."""
        chosen = self._whole(parameters)
        if chosen is None:
            return None
        for each in chosen:
            if each.max_norm is None:
                each.norm = each.engine.reduce()
        norm = math.hypot(*(each.clipped_norm() for each in chosen))
        for each in chosen:
            if len(chosen) == 1:
                each.clip(max_norm)
            else:
                each.clip(max_norm, each.coefficient * max_norm / (norm + _EPSILON))
        return norm

    def _whole(self, parameters: Iterable[Tensor]) -> list[Trained] | None:
        wanted = {id(parameter) for parameter in parameters}
        chosen = [each for each in self._trained if each.parameters() & wanted]
        if not chosen or any(each.parameters() - wanted for each in chosen):
            return None
        return chosen

    def check_trained(self, parameters: Iterable[Tensor], call: str) -> None:
        """Raise UsageError for a parameter that has gradients in stock Accelerate and none here,
        since no optimizer has it: `call` would silently leave it out."""
        self._check_any()
        known = {p for each in self._trained for p in each.parameters()}
        left = [p for p in parameters if p.requires_grad and id(p) not in known]
        if left:
            names = _names(self._trained, left)
            raise UsageError(
                f"{call} of {names}, which no prepared optimizer trains: such parameters have no "
                "gradient here, so that the norm would be another one. Freeze them "
                "(requires_grad_(False)), give them to an optimizer that is prepared, or leave "
                "them out of the call."
            )

    @contextmanager
    def full_gradients(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Inside the block the gradients of `parameters`, and of what is trained with them, are
        whole on every worker, to read or to write. Collective."""
        wanted = {id(parameter) for parameter in parameters}
        self._check_any()
        with ExitStack() as blocks:
            for each in self._trained:
                if each.parameters() & wanted:
                    blocks.enter_context(each.engine.full_gradients())
                    _apply(each)
            yield


def _take_over(models: Sequence[nn.Module]) -> None:
    """End what other Accelerators train of `models`, on all ranks in the same order."""
    wanted = {id(p) for model in models for p in model.parameters()}
    for each in _in_training():
        if any(id(p) in wanted for model in each.models for p in model.parameters()):
            each.owner.lose(each)


def _names(trained: Sequence[Trained], parameters: Sequence[Tensor]) -> str:
    """What the first of `parameters` is called, and how many there are more."""
    models = [model for each in trained for model in each.models]
    names = {id(p): name for model in models for name, p in model.named_parameters()}
    first = names.get(id(parameters[0]), "a parameter of another model")
    more = len(parameters) - 1
    return f"{first} and {more} more" if more else first


def _apply(trained: Trained) -> None:
    """Clip whole gradients as the next step would: what follows is of what is clipped."""
    coefficient, trained.max_norm = trained.coefficient, None
    if coefficient < 1:
        for optimizer in trained.optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.mul_(coefficient)


def _parameters_of(loss: Tensor) -> set[int]:
    """The identities of the tensors in which a backward of `loss` leaves gradients."""
    found: set[int] = set()
    nodes: list[Any] = [loss.grad_fn]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        nodes.extend(child for child, _ in node.next_functions)
    return found


@dataclass
class _Part:
    """Models and optimizers that are connected by the parameters they have in common."""

    parameters: set[int]
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[optim.Optimizer] = field(default_factory=list)

    def covers_optimizers(self) -> bool:
        """Whether every parameter of the optimizers belongs to one of the models."""
        known = {id(p) for model in self.models for p in model.parameters()}
        groups = (group for each in self.optimizers for group in each.param_groups)
        return all(id(p) in known for group in groups for p in group["params"])


def _parts(models: Sequence[nn.Module], optimizers: Sequence[optim.Optimizer]) -> list[_Part]:
    """The connected parts that have an optimizer; a model inside another one is left out."""
    outer = [m for m in models if not any(m is not o and m in o.modules() for o in models)]
    parts: list[_Part] = []
    for model in dict.fromkeys(outer):
        _join(parts, _Part({id(p) for p in model.parameters()}, models=[model]))
    for optimizer in dict.fromkeys(optimizers):
        groups = optimizer.param_groups
        own = {id(p) for group in groups for p in group["params"]}
        _join(parts, _Part(own, optimizers=[optimizer]))
    return [part for part in parts if part.optimizers]


def _join(parts: list[_Part], new: _Part) -> None:
    """Add `new`, with all that it touches, as one part."""
    for each in [part for part in parts if part.parameters & new.parameters]:
        parts.remove(each)
        new.parameters |= each.parameters
        new.models = each.models + new.models
        new.optimizers = each.optimizers + new.optimizers
    parts.append(new)


def _meet(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return any(a is b for a in one for b in other)
