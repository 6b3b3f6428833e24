"""One engine with the models and optimizers that it was made from, as a bridge uses it.

backward ── clip ── clip ── step of one optimizer ── step of the other: the engine steps
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
"""As torch.nn.utils.clip_grad_norm_ has it."""


@dataclass(frozen=True, eq=False)
class LossItems:
    """The items that a loss is a mean over: their `number`, and their `batch` if known."""

    number: float | Tensor
    batch: object = None
    same_items: bool | None = None
    """Whether an earlier loss was over the same items, if the script says so."""
    rows: int | None = None
    """The rows that the forward saw, which weigh the means of buffers; None if unknown."""


@dataclass(eq=False)
class TrainedEngine:
    """An engine with its models and optimizers, and the requests since its last step."""

    engine: sw.Engine
    models: list[nn.Module]
    optimizers: list[optim.Optimizer]
    owner: Any
    """The TrainedModels that made it, and must give it up if another one takes its models."""
    skipped: bool = False
    """Whether its last step updated nothing."""
    norm: float = 0.0
    """The gradient's norm, if the script asked to clip by it."""
    max_norm: float | None = None
    """The norm that the next step clips to."""
    always_clips: float | None = None
    """The norm that every step clips to, also if the script asks for another; None for the
    script's."""
    cleared: bool = True
    """Whether a plain optimizer would have no gradients before the next backward."""
    _number: float | Tensor = 0.0
    """The number of items of the last loss."""
    _batch: object = None
    """The batch of the last loss."""
    _stepped: list[optim.Optimizer] = field(default_factory=list)

    def parameters(self) -> set[int]:
        """Return the ids of the parameters that its optimizers train now."""
        groups = (group for each in self.optimizers for group in each.param_groups)
        return {id(p) for group in groups for p in group["params"] if p.requires_grad}

    @property
    def waits(self) -> bool:
        """Whether some of its optimizers were stepped, but not all."""
        return bool(self._stepped)

    def check_complete(self, call: str) -> None:
        """Raise UsageError if some optimizers were stepped, but not all."""
        if self._stepped:
            left = [each for each in self.optimizers if each not in self._stepped]
            names = " and ".join(type(each).__name__ for each in left)
            raise UsageError(
                f"{call} before {names} was stepped: the optimizers of one model step together, "
                "since their gradients are made together. Step all of them after each backward; "
                "or give each optimizer a model of its own."
            )

    def step(self, optimizer: optim.Optimizer, closure: Callable[[], Any] | None) -> None:
        """Step `optimizer`. The engine steps once all of its optimizers were asked to."""
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
        self.skipped = False
        if closure is None and not self.has_gradients(f"{type(optimizer).__name__}.step()"):
            mark_schedulers(self.optimizers)  # it was stepped, if to no effect
            return
        max_norm = max_norm if self.always_clips is None else self.always_clips
        self.skipped = self.engine.step(max_norm or None, closure=closure).skipped
        self.cleared = False

    def has_gradients(self, call: str) -> bool:
        """Return whether there was a backward since the last step.

        Without one, a plain optimizer whose gradients were cleared does nothing in `call`. Raises
        UsageError if they were not cleared: it would use the gradients of the last step again.
        """
        if self.engine.has_gradients or self.cleared:
            return self.engine.has_gradients
        raise UsageError(
            f"{call} again without a backward since the last step, whose gradients are cleared "
            "here: make a backward before; or call zero_grad() before, for a step that does "
            "nothing."
        )

    def weighted(self, items: LossItems, loss: Tensor) -> dict[str, Any]:
        """Return the keywords that weigh a backward of `loss`, a mean over `items`. A further loss
        of the same batch is added to the earlier ones, as in plain PyTorch."""
        again = items.same_items
        if again is None and items.batch is not None:
            again = (items.batch is self._batch and self.engine.has_gradients) or None
        self._batch, number = items.batch, items.number
        # A batch stands for items whose number the script has not said.
        if items.rows and items.batch is not None:
            main = read(loss, items.rows).main
            # A further loss of the batch has the weight with which its items were counted.
            number = self._number if again else number if main is None else main.items
        self._number = number
        sw.world().current_batch.own_rows = items.rows
        return {"weight": number, "same_items": again}

    def clear(self) -> None:
        """Forget the gradients since the last step."""
        self._stepped.clear()
        self.max_norm = None
        self.cleared = True
        self.engine.zero_grad()

    def clip(self, max_norm: float, coefficient: float | None = None) -> None:
        """Make the next step clip to `max_norm` or, with a `coefficient` below 1, multiply by it.

        Clipping twice clips gradients that are clipped already, so the smaller limit wins.
        """
        if coefficient is not None:
            max_norm = coefficient * (self.norm + EPSILON) if coefficient < 1 else math.inf
        if math.isfinite(self.norm) and math.isfinite(max_norm):
            self.max_norm = max_norm if self.max_norm is None else min(max_norm, self.max_norm)

    def clipped_norm(self) -> float:
        """Return the norm after the clipping that was asked for so far."""
        return self.norm * self.coefficient

    @property
    def coefficient(self) -> float:
        """The factor by which the next step clips."""
        return 1.0 if self.max_norm is None else min(1.0, self.max_norm / (self.norm + EPSILON))

    def apply_clipping(self) -> None:
        """Clip whole gradients now, as the next step would, for code that reads them."""
        coefficient, self.max_norm = self.coefficient, None
        if coefficient < 1:
            for optimizer in self.optimizers:
                for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                    if parameter.grad is not None:
                        parameter.grad.mul_(coefficient)


_made: list[ref[TrainedEngine]] = []
"""All trained engines of this process, oldest first."""

_HELD = "_shardwise_trained"
"""The attribute of a model that holds what trains it."""


class _Held:
    """A model's reference to its TrainedEngine, which copies of the model do not get."""

    # The models keep their TrainedEngine alive: garbage collection then ends it on all ranks or
    # none, since all ranks hold the same models.

    def __init__(self, trained: TrainedEngine | None = None) -> None:
        self.trained = trained

    def __reduce__(self) -> tuple[type[_Held], tuple[()]]:
        return _Held, ()


def in_training() -> list[TrainedEngine]:
    """Return all trained engines of this process, oldest first."""
    found = [(each, each()) for each in _made]
    _made[:] = [each for each, trained in found if trained is not None]
    return [trained for _, trained in found if trained is not None]


def remember(trained: TrainedEngine) -> None:
    _made.append(ref(trained))
    for model in trained.models:
        vars(model)[_HELD] = _Held(trained)


def forget(trained: TrainedEngine) -> None:
    _made[:] = [each for each in _made if each() is not trained]
    for model in trained.models:
        vars(model).pop(_HELD, None)
