"""Finds the parameter, rank and samples that caused a non-finite gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.comm import Collectives
from shardwise.engine.build import States
from shardwise.engine.loss_accumulation import LossAccumulation
from shardwise.errors import NonFiniteError
from shardwise.guard.spikes import largest_loss
from shardwise.messages.printable import listed

SKIPS = 20
"""Number of consecutive skipped steps before a warning. A loss scale settles in fewer steps."""


class Skips:
    """Counts consecutive skipped steps. `scaled` is True if there is a loss scale."""

    def __init__(self, *, scaled: bool) -> None:
        self._scaled = scaled
        self._count = 0

    def words(self, *, finite: bool) -> str:
        """Record whether a step's gradient was `finite`.

        Returns a warning if too many consecutive steps have been skipped, otherwise "".
        """
        self._count = 0 if finite else self._count + 1
        if self._count != SKIPS:
            return ""
        line = f"{SKIPS} steps in a row were skipped because their gradients are not finite: "
        if self._scaled:
            return f"{line}no loss scale helps. Check the loss, or try --precision bf16-mixed."
        return f"{line}the model does not learn. --nonfinite stop names the parameter and the rank."


@dataclass(frozen=True, kw_only=True)
class _RankReport:
    parameters: list[str]
    loss_is_bad: bool
    gradient_is_bad: bool | None
    """None if this is unknown because the sum has overwritten this rank's part."""
    samples: list[int]

    def accusation(self, rank: int) -> str | None:
        if not (self.loss_is_bad or self.gradient_is_bad):
            return None
        cause = "loss" if self.loss_is_bad else "gradient"
        return f"rank {rank} (its {cause}; samples {listed(self.samples)})"


def nonfinite_error(
    step: int, states: States, accumulation: LossAccumulation, group: Collectives
) -> NonFiniteError:
    """Return the NonFiniteError that all ranks should raise. Collective."""
    return NonFiniteError(
        f"{nonfinite_cause(step, states, accumulation, group)} Nothing was updated. Check these "
        "samples, lower the learning rate, or clip with engine.step(max_norm=1.0). To skip such "
        "steps, use --nonfinite skip."
    )


def nonfinite_cause(
    step: int, states: States, accumulation: LossAccumulation, group: Collectives
) -> str:
    """Describe which parameters, ranks and samples caused a non-finite gradient. Collective."""
    named = states.parameters.named
    mine = _RankReport(
        parameters=[named[index].name for index in states.gradients.nonfinite()],
        # The step has failed, so synchronising with the device does not matter.
        loss_is_bad=not math.isfinite(float(sum(accumulation.losses))),
        gradient_is_bad=states.gradients.suspect(),
        samples=[index for indices in accumulation.indices for index in indices],
    )
    reports: list[_RankReport] = group.gather_objects(mine)
    # With sharded gradients each rank checks only its own part, so combine the names.
    names = sorted({name for each in reports for name in each.parameters})
    return f"Step {step}: the gradient is not finite in {listed(names)}. {_origin(reports)}"


def largest_losses(accumulation: LossAccumulation, group: Collectives) -> str:
    """Describe which rank has the largest loss, and on which samples. Collective."""
    weight = float(sum(accumulation.weights))
    mine = float(sum(accumulation.losses)) / (accumulation.divisor or weight or 1.0)
    samples = [index for indices in accumulation.indices for index in indices]
    reports: list[tuple[float, list[int]]] = group.gather_objects((mine, samples))
    return largest_loss(reports)


def _origin(reports: Sequence[_RankReport]) -> str:
    """Describe the cause of the non-finite gradient, or say that it is unknown."""
    accused = [text for rank, each in enumerate(reports) if (text := each.accusation(rank))]
    if accused:
        return f"The cause is {' and '.join(accused)}."
    if len(reports) == 1:
        return f"The loss is finite; samples {listed(reports[0].samples)}."
    # Finite parts with a non-finite sum: the sum itself overflowed.
    if all(each.gradient_is_bad is False for each in reports):
        return "The sum over the ranks has overflowed (each rank's own part is finite)."
    samples = "; ".join(
        f"samples of rank {rank}: {listed(each.samples)}" for rank, each in enumerate(reports[:8])
    )
    return f"Losses are finite, and it is not known which rank is the cause ({samples})."
