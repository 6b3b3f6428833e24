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

from torch import Tensor, nn, optim

import shardwise as sw
from shardwise.bridging.trained_engine import (
    EPSILON,
    LossItems,
    Trained,
    forget,
    in_training,
    remember,
)
from shardwise.errors import UsageError

Make = Callable[[list[nn.Module], list[optim.Optimizer]], sw.Engine]


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
        self.followers: list[Callable[[Trained], None]] = []
        """What is called with an engine that has updated, such as the step of its schedule."""

    @property
    def has_optimizers(self) -> bool:
        """Whether an optimizer was prepared, or another Accelerator took over what one trained."""
        return bool(self._trained or self._waiting or self._was_taken)

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
            remember(new)
            self._was_taken = False

    def of(self, optimizer: optim.Optimizer) -> Trained | None:
        """What trains with `optimizer`, where its engine is made."""
        found = [each for each in self._trained if _meet(each.optimizers, [optimizer])]
        return found[0] if found else None

    def of_model(self, model: nn.Module) -> Trained | None:
        """What trains `model`, or a model that it is a part of, here or for another
        Accelerator."""
        found = [each for each in in_training() if any(model in m.modules() for m in each.models)]
        return found[0] if found else None

    def close(self) -> None:
        """Give models and optimizers back as plain ones. Collective."""
        while self._trained:
            self._end(self._trained[-1])
        self.followers.clear()

    def tell_followers(self, trained: Trained) -> None:
        """Call what goes on with the updates of `trained`, which has made one."""
        for follow in self.followers:
            follow(trained)

    def _end(self, trained: Trained) -> None:
        self._trained.remove(trained)
        forget(trained)
        trained.engine.close()

    def clip_always(self, max_norm: float | None) -> None:
        """Clip to `max_norm` in each step, whatever a script asks for; None: as it asks."""
        for each in self._trained:
            each.always_clips = max_norm

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

    def backward(
        self,
        loss: Tensor,
        *,
        last: bool,
        retain_graph: bool = False,
        weight: LossItems | None = None,
    ) -> None:
        """Backward of `loss` in every engine that it reaches, as with DistributedDataParallel;
        with a `weight`, as a mean over its items, among all of the step."""
        reached = self._reached(loss)
        for number, each in enumerate(reached, 1):
            each.check_complete("A backward")
            how: dict[str, Any] = (
                {"reduction": "ddp"} if weight is None else each.weighted(weight, loss)
            )
            keep = retain_graph or number < len(reached)
            each.engine.backward(loss, last=last, retain_graph=keep, **how)

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
        # One without gradients is left as it is: a limit would wait for its next backward.
        chosen = [each for each in chosen if each.has_gradients("clip_grad_norm_()")]
        for each in chosen:
            if each.max_norm is None:
                each.norm = each.engine.reduce()
        norm = math.hypot(*(each.clipped_norm() for each in chosen))
        for each in chosen:
            if len(chosen) == 1:
                each.clip(max_norm)
            else:
                each.clip(max_norm, each.coefficient * max_norm / (norm + EPSILON))
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
                if each.parameters() & wanted and each.has_gradients("Clipping gradients"):
                    blocks.enter_context(each.engine.full_gradients())
                    each.apply_clipping()
            yield


def _take_over(models: Sequence[nn.Module]) -> None:
    """End what other Accelerators train of `models`, on all ranks in the same order."""
    wanted = {id(p) for model in models for p in model.parameters()}
    for each in in_training():
        if any(id(p) in wanted for model in each.models for p in model.parameters()):
            each.owner.lose(each)


def _names(trained: Sequence[Trained], parameters: Sequence[Tensor]) -> str:
    """What the first of `parameters` is called, and how many there are more."""
    models = [model for each in trained for model in each.models]
    names = {id(p): name for model in models for name, p in model.named_parameters()}
    first = names.get(id(parameters[0]), "a parameter of another model")
    more = len(parameters) - 1
    return f"{first} and {more} more" if more else first


def _parameters_of(loss: Tensor) -> set[int]:
    """The identities of the tensors in which a backward of `loss` leaves gradients.

    Raises UsageError where some of them cannot be seen.
    """
    found: set[int] = set()
    nodes: list[Any] = [loss.grad_fn]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise UsageError(
                "A reentrant activation checkpoint with several engines hides which of their "
                "models a loss reaches: write checkpoint(..., use_reentrant=False), or "
                'gradient_checkpointing_kwargs={"use_reentrant": False}.'
            )
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
