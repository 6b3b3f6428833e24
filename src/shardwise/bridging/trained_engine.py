"""Defines an engine together with its models and optimizers, as the bridges use it.

backward ── clip ── clip ── one optimizer's step ── the other one's step: the engine steps
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from torch import Tensor, nn, optim

import shardwise as sw
from shardwise.engine.loss_terms import read
from shardwise.engine.usage_checks import mark_schedulers
from shardwise.errors import UsageError

EPSILON = 1e-6
"""The constant that torch.nn.utils.clip_grad_norm_ adds to the norm."""


@dataclass(frozen=True, eq=False)
class LossItems:
    """The items over which a loss is averaged: their `number`, and their `batch` if it is known.

    The number is None if the engine reads it from the loss.
    """

    number: float | Tensor | None
    batch: object = None
    same_items: bool | None = None
    """True if an earlier loss had the same items. None if the script does not say."""
    rows: int | None = None
    """Number of rows in the forward pass.

    It weights this rank's buffers in their means. None if unknown.
    """


@dataclass(eq=False)
class TrainedEngine:
    """An engine with its models and optimizers, and the calls recorded since its last step."""

    engine: sw.Engine
    models: list[nn.Module]
    optimizers: list[optim.Optimizer]
    owner: Any
    """The `TrainedModels` that created it.

    It must release the engine if another one takes its models.
    """
    skipped: bool = False
    """True if its last step updated nothing."""
    norm: float = 0.0
    """Norm of the current gradient, if the script has clipped by it."""
    max_norm: float | None = None
    """Maximum gradient norm in the next step."""
    always_clips: float | None = None
    """Maximum gradient norm in every step, overriding the script's. None: use the script's."""
    cleared: bool = True
    """True if the script has cleared the gradients since the last step."""
    _number: float | Tensor = 0.0
    """Number of items of the last loss."""
    _batch: object = None
    """The batch of the last loss."""
    _stepped: list[optim.Optimizer] = field(default_factory=list)

    def parameters(self) -> set[int]:
        """Return the ids of the parameters that its optimizers currently train."""
        groups = (group for each in self.optimizers for group in each.param_groups)
        return {id(p) for group in groups for p in group["params"] if p.requires_grad}

    @property
    def waits(self) -> bool:
        """True if some, but not all, of the engine's optimizers have been stepped."""
        return bool(self._stepped)

    def check_complete(self, call: str) -> None:
        """Raise UsageError if some, but not all, of the engine's optimizers have been stepped."""
        if self._stepped:
            left = [each for each in self.optimizers if each not in self._stepped]
            names = " and ".join(type(each).__name__ for each in left)
            raise UsageError(
                f"{call} before {names} was stepped: the optimizers of one model step together, "
                "because one backward computes the gradients of all. Step all of them after each "
                "backward, or give each optimizer a separate model."
            )

    def step(self, optimizer: optim.Optimizer, closure: Callable[[], Any] | None) -> None:
        """Record a step of `optimizer`. Once all optimizers have been stepped, step the engine."""
        if optimizer in self._stepped:
            self.check_complete(f"{type(optimizer).__name__}.step() again")
        if closure is not None and len(self.optimizers) > 1:
            raise UsageError(
                f"{type(optimizer).__name__}.step(closure) is not supported for a model with "
                "several optimizers: they step together, so a closure cannot run for only one of "
                "them. Call backward first, and step without a closure."
            )
        self._stepped.append(optimizer)
        if len(self._stepped) < len(self.optimizers):
            return
        self._stepped.clear()
        max_norm, self.max_norm = self.max_norm, None
        self.skipped = False
        if closure is None and not self.has_gradients(f"{type(optimizer).__name__}.step()"):
            # torch warns if a scheduler steps before its optimizer. This optimizer was stepped.
            mark_schedulers(self.optimizers)
            return
        max_norm = max_norm if self.always_clips is None else self.always_clips
        self.skipped = self.engine.step(max_norm or None, closure=closure).skipped
        self.cleared = False

    def has_gradients(self, call: str) -> bool:
        """Return whether a backward pass has run since the last step.

        If none has, raises UsageError unless the script has cleared the gradients: in `call`, a
        plain optimizer would use the gradients of the last step again, but the engine has freed
        them.
        """
        if self.engine.has_gradients or self.cleared:
            return self.engine.has_gradients
        raise UsageError(
            f"{call} was called again without a backward since the last step, which cleared the "
            "gradients. Call backward first, or zero_grad() for a step that does nothing."
        )

    def weighted(self, items: LossItems, loss: Tensor) -> dict[str, Any]:
        """Return the keyword arguments that weight a backward pass of `loss`, a mean over `items`.

        A further loss on the same batch is added to the previous one, as in plain PyTorch.
        """
        again = items.same_items
        if again is None and items.batch is not None:
            again = (items.batch is self._batch and self.engine.has_gradients) or None
        self._batch, number = items.batch, items.number
        sw.world().current_batch.own_rows = items.rows
        if number is None:
            return {"same_items": again}
        # Only if the items were counted in the batch and the script has not passed their number.
        if items.rows and items.batch is not None:
            main = read(loss, items.rows).main
            # A further loss of the batch gets the weight of the first one.
            number = self._number if again else number if main is None else main.items
        self._number = number
        return {"weight": number, "same_items": again}

    def clear(self) -> None:
        """Discard the gradients accumulated since the last step."""
        self._stepped.clear()
        self.max_norm = None
        self.cleared = True
        self.engine.zero_grad()

    def clip(self, max_norm: float, coefficient: float | None = None) -> None:
        """Make the next step clip to `max_norm` or, if `coefficient` is passed, scale by it.

        A coefficient of 1 or more has no effect. A second call clips gradients that are already
        clipped, so the smaller limit applies.
        """
        if coefficient is not None:
            max_norm = coefficient * (self.norm + EPSILON) if coefficient < 1 else math.inf
        if math.isfinite(self.norm) and math.isfinite(max_norm):
            self.max_norm = max_norm if self.max_norm is None else min(max_norm, self.max_norm)

    def clipped_norm(self) -> float:
        """Return the gradient norm after all clipping so far."""
        return self.norm * self.coefficient

    @property
    def coefficient(self) -> float:
        """The factor by which clipping scales the gradients in the next step."""
        return 1.0 if self.max_norm is None else min(1.0, self.max_norm / (self.norm + EPSILON))

    def apply_clipping(self) -> None:
        """Clip the full gradients now instead of in the next step, for code that reads them."""
        coefficient, self.max_norm = self.coefficient, None
        if coefficient < 1:
            for optimizer in self.optimizers:
                for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                    if parameter.grad is not None:
                        parameter.grad.mul_(coefficient)


_all_trained: list[ref[TrainedEngine]] = []
"""All trained engines of this process, oldest first."""

_ATTRIBUTE = "_shardwise_trained"
"""The attribute of a model that stores its `_EngineReference`."""


class _EngineReference:
    """A model's reference to its TrainedEngine. Copying the model creates an empty reference."""

    # The models keep their TrainedEngine alive. All ranks hold the same models, so either all ranks
    # collect the engine or none does.

    def __init__(self, trained: TrainedEngine | None = None) -> None:
        self.trained = trained

    def __reduce__(self) -> tuple[type[_EngineReference], tuple[()]]:
        return _EngineReference, ()


def trained_engines() -> list[TrainedEngine]:
    """Return all trained engines of this process, oldest first."""
    found = [(each, each()) for each in _all_trained]
    _all_trained[:] = [each for each, trained in found if trained is not None]
    return [trained for _, trained in found if trained is not None]


def remember(trained: TrainedEngine) -> None:
    """Register `trained`, and store a reference to it in its models."""
    _all_trained.append(ref(trained))
    for model in trained.models:
        vars(model)[_ATTRIBUTE] = _EngineReference(trained)


def forget(trained: TrainedEngine) -> None:
    """Unregister `trained`, and remove the references to it from its models."""
    _all_trained[:] = [each for each in _all_trained if each() is not trained]
    for model in trained.models:
        vars(model).pop(_ATTRIBUTE, None)
