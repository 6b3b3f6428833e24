"""Creates one engine for each set of models and optimizers that share parameters.

    prepare(generator, optimizer_g)           one engine
    prepare(discriminator, optimizer_d)       a second engine, which steps independently
    prepare(model, optimizer_a, optimizer_b)  one engine, which steps after both optimizers

A backward pass runs in every engine that the loss's graph reaches, just as a plain backward pass
computes a gradient for every parameter that it reaches.
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
    TrainedEngine,
    forget,
    remember,
    trained_engines,
)
from shardwise.engine.loss_terms import graph_nodes
from shardwise.errors import UsageError

Make = Callable[[list[nn.Module], list[optim.Optimizer]], sw.Engine]


class TrainedModels:
    """The engines of a script that prepares models and optimizers in any order.

    `make` creates an engine for some models and optimizers.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._trained: list[TrainedEngine] = []
        self._waiting: list[optim.Optimizer] = []
        self._was_taken = False
        """True if another owner took over the models that were trained here."""
        self.followers: list[Callable[[TrainedEngine], None]] = []
        """Functions to call with an engine after its update, such as its schedule's step."""

    @property
    def has_optimizers(self) -> bool:
        """True if an optimizer was prepared, even if another owner now trains its models."""
        return bool(self._trained or self._waiting or self._was_taken)

    def __iter__(self) -> Iterator[TrainedEngine]:
        return iter(self._trained)

    def __len__(self) -> int:
        return len(self._trained)

    def form(self, models: Sequence[nn.Module], optimizers: Sequence[optim.Optimizer]) -> None:
        """Create the engines for all prepared `models` and `optimizers`. Collective.

        The engine of an optimizer is created once the models with all of its parameters are
        prepared. If an optimizer is added for a model that has an engine, a new engine replaces the
        old one. If another owner trains a model, that owner releases it.
        """
        self._waiting = []
        for part in connected_parts(models, optimizers):
            if not part.models or not part.covers_optimizers():
                self._waiting += part.optimizers
                continue
            before = [each for each in self._trained if _meet(each.optimizers, part.optimizers)]
            if len(before) == 1 and len(before[0].optimizers) == len(part.optimizers):
                continue
            for each in before:
                self._end(each)
            wanted = {id(p) for model in part.models for p in model.parameters()}
            # Closing an engine is collective, so all ranks must close them in the same order.
            # `trained_engines` returns that order.
            for each in trained_engines():
                if any(id(p) in wanted for model in each.models for p in model.parameters()):
                    each.owner.lose(each)
            engine = self._make(part.models, part.optimizers)
            new = TrainedEngine(engine, part.models, part.optimizers, owner=self)
            self._trained.append(new)
            remember(new)
            self._was_taken = False

    def of(self, optimizer: optim.Optimizer) -> TrainedEngine | None:
        """Return the engine that steps `optimizer`, or None if it does not exist yet."""
        found = [each for each in self._trained if _meet(each.optimizers, [optimizer])]
        return found[0] if found else None

    def of_model(self, model: nn.Module) -> TrainedEngine | None:
        """Return the engine, of any owner, that trains `model` or a model that contains it."""
        return engine_of_model(model)

    def close(self) -> None:
        """Close all engines. Models and optimizers become plain again. Collective."""
        while self._trained:
            self._end(self._trained[-1])
        self.followers.clear()

    def call_followers(self, trained: TrainedEngine) -> None:
        """Call all followers with `trained`, which has just updated its parameters."""
        for follow in self.followers:
            follow(trained)

    def _end(self, trained: TrainedEngine) -> None:
        self._trained.remove(trained)
        forget(trained)
        trained.engine.close()

    def clip_always(self, max_norm: float | None) -> None:
        """Clip to `max_norm` in every step, overriding the script's clipping. None undoes this."""
        for each in self._trained:
            each.always_clips = max_norm

    def lose(self, trained: TrainedEngine) -> None:
        """Close the engine of `trained`, because another owner takes its models. Collective."""
        self._end(trained)
        self._was_taken = True

    @property
    def taken_over(self) -> str:
        """Message text that says that another owner has taken the models, or "" if none has."""
        if not self._was_taken:
            return ""
        return (
            "another Accelerator or Trainer has prepared the model meanwhile and trains it now: "
            "prepare it again with this one"
        )

    # -- parts of a step --------------------------------------------------------------------

    def backward(
        self,
        loss: Tensor,
        *,
        last: bool,
        retain_graph: bool = False,
        weight: LossItems | None = None,
    ) -> None:
        """Run the backward pass of `loss` in every engine that it reaches.

        With a `weight`, losses are averaged over all items. Otherwise, they are averaged across
        workers, as in DistributedDataParallel.
        """
        reached = self._reached(loss)
        # Each engine runs one backward pass over the same graph, so only the last may free it.
        for number, each in enumerate(reached, 1):
            each.check_complete("A backward")
            how: dict[str, Any] = (
                {"reduction": "ddp"} if weight is None else each.weighted(weight, loss)
            )
            keep = retain_graph or number < len(reached)
            each.engine.backward(loss, last=last, retain_graph=keep, **how)
        # Libraries call torch's collectives between micro-batches. While a rank waits there, it
        # does not advance sums, for which a slower rank may wait in its backward pass.
        sw.world().collectives.settle()

    def _reached(self, loss: Tensor) -> list[TrainedEngine]:
        if len(self._trained) < 2:  # avoids a walk through the graph
            self._check_any()
            return self._trained
        found = _parameters_of(loss)
        reached = [each for each in self._trained if each.parameters() & found]
        if not reached:
            raise UsageError(
                "This loss reaches no parameter of a prepared optimizer. Compute it with the "
                "prepared models."
            )
        return reached

    def _check_any(self) -> None:
        if self._trained:
            return
        names = " and ".join(type(each).__name__ for each in self._waiting)
        why = self.taken_over or (
            f"{names} has parameters of a model that was not prepared, or of a copy of it: prepare "
            "the model itself"
            if names
            else "no model was prepared with an optimizer: prepare both"
        )
        raise UsageError(f"There is nothing to train: {why}, before the loop.")

    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> float | None:
        """Clip the gradients of `parameters` by their joint 2-norm in the next steps.

        Returns the norm before clipping. If `parameters` are not exactly the parameters of one or
        more engines, does nothing and returns None.
        """
        wanted = {id(parameter) for parameter in parameters}
        chosen = [each for each in self._trained if each.parameters() & wanted]
        if not chosen or any(each.parameters() - wanted for each in chosen):
            return None
        # Skip engines that have no gradients, because their limit would apply to a later backward
        # pass.
        chosen = [each for each in chosen if each.has_gradients("clip_grad_norm_()")]
        for each in chosen:
            # A second clip in a step uses the norm from the first one, which saves a collective.
            if each.max_norm is None:
                each.norm = each.engine.reduce()
        norm = math.hypot(*(each.clipped_norm() for each in chosen))
        for each in chosen:
            if len(chosen) == 1:
                each.clip(max_norm)
            else:
                each.clip(max_norm, each.coefficient * max_norm / (norm + EPSILON))
        return norm

    def check_trained(self, parameters: Iterable[Tensor], call: str) -> None:
        """Raise UsageError if one of the `parameters` has no optimizer.

        Stock Accelerate computes gradients for such parameters, but the engine does not, so `call`
        would silently omit them.
        """
        self._check_any()
        known = {p for each in self._trained for p in each.parameters()}
        left = [p for p in parameters if p.requires_grad and id(p) not in known]
        if left:
            models = [model for each in self._trained for model in each.models]
            names = {id(p): name for model in models for name, p in model.named_parameters()}
            first = names.get(id(left[0]), "a parameter of another model")
            shown = f"{first} and {len(left) - 1} more" if len(left) > 1 else first
            raise UsageError(
                f"{call} of {shown}, which no prepared optimizer trains: such parameters have no "
                "gradient here, so the norm would be wrong. Freeze them (requires_grad_(False)), "
                "add them to a prepared optimizer, or leave them out of the call."
            )

    @contextmanager
    def full_gradients(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Gather the full gradients of `parameters` inside the block, to read or write. Collective.

        All other gradients of these parameters' engines are gathered too.
        """
        wanted = {id(parameter) for parameter in parameters}
        self._check_any()
        with ExitStack() as blocks:
            for each in self._trained:
                if each.parameters() & wanted and each.has_gradients("Clipping gradients"):
                    blocks.enter_context(each.engine.full_gradients())
                    each.apply_clipping()
            yield


def engine_of_model(model: nn.Module) -> TrainedEngine | None:
    """Return the engine that trains `model` or a model that contains it, or None."""
    found = (each for each in trained_engines() if any(model in m.modules() for m in each.models))
    return next(found, None)


def _parameters_of(loss: Tensor) -> set[int]:
    """Return the ids of the tensors that get a gradient in a backward pass from `loss`.

    Raises UsageError if a reentrant checkpoint hides some of them.
    """
    found: set[int] = set()
    for node in graph_nodes(loss):
        if node.name() == "CheckpointFunctionBackward":
            raise UsageError(
                "With several engines, a reentrant activation checkpoint hides which models a loss "
                "reaches. Write checkpoint(..., use_reentrant=False), or "
                'gradient_checkpointing_kwargs={"use_reentrant": False}.'
            )
        if hasattr(node, "variable"):
            found.add(id(node.variable))
    return found


@dataclass
class ConnectedPart:
    """Models and optimizers that share parameters, directly or through others in the same part."""

    parameters: set[int]
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[optim.Optimizer] = field(default_factory=list)

    def covers_optimizers(self) -> bool:
        """Return whether every parameter of the optimizers belongs to one of the models."""
        known = {id(p) for model in self.models for p in model.parameters()}
        groups = (group for each in self.optimizers for group in each.param_groups)
        return all(id(p) in known for group in groups for p in group["params"])


def connected_parts(
    models: Sequence[nn.Module], optimizers: Sequence[optim.Optimizer]
) -> list[ConnectedPart]:
    """Return the connected parts that have an optimizer.

    Models inside other models are left out.
    """
    outer = [m for m in models if not any(m is not o and m in o.modules() for o in models)]
    parts: list[ConnectedPart] = []
    for model in dict.fromkeys(outer):
        _join(parts, ConnectedPart({id(p) for p in model.parameters()}, models=[model]))
    for optimizer in dict.fromkeys(optimizers):
        groups = optimizer.param_groups
        own = {id(p) for group in groups for p in group["params"]}
        _join(parts, ConnectedPart(own, optimizers=[optimizer]))
    return [part for part in parts if part.optimizers]


def _join(parts: list[ConnectedPart], new: ConnectedPart) -> None:
    """Add `new` to `parts`, merging it with all parts that share parameters with it."""
    for each in [part for part in parts if part.parameters & new.parameters]:
        parts.remove(each)
        new.parameters |= each.parameters
        new.models = each.models + new.models
        new.optimizers = each.optimizers + new.optimizers
    parts.append(new)


def _meet(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return any(a is b for a in one for b in other)
