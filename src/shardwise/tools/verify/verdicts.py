"""Defines the verdicts on placements, and describes results in sentences. Does no I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from shardwise.tools.verify.causes import FoundCauses
from shardwise.tools.verify.comparing import Comparison, StepDifference, TensorDifference
from shardwise.tools.verify.placements import RunPlacement

TOLERANCE = 1e-8
"""Maximum relative difference of any loss, norm or tensor between two fp64 runs."""

SAMPLES = 6
"""Maximum number of sample indices to show."""


class TrainingVerdict(Enum):
    """The verdict on a placement. Its value is the exit code of `shardwise verify`."""

    BITS = 0
    ROUNDING = 3
    UNPROVED = 4
    DIFFERS = 5

    @property
    def words(self) -> str:
        """A short description of the verdict."""
        return _WORDS[self]


_WORDS = {
    TrainingVerdict.BITS: "equal to the last bit",
    TrainingVerdict.ROUNDING: "equal within rounding",
    TrainingVerdict.UNPROVED: "not proved",
    TrainingVerdict.DIFFERS: "differs",
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """The verdict on one placement, and the evidence.

    Attributes:
        placement: The placement.
        verdict: The verdict.
        own: Comparison of the runs in the script's own precision.
        wide: Comparison of the runs in fp64, or None without fp64 runs.
        smallest: The smallest placement that still differs.
        found: The causes of the difference.
    """

    placement: RunPlacement
    verdict: TrainingVerdict
    own: Comparison
    wide: Comparison | None = None
    smallest: RunPlacement | None = None
    found: FoundCauses | None = None
    why: str = ""
    """Reason why there are no fp64 runs."""
    losses: tuple[Sequence[float], Sequence[float]] = field(default=((), ()))
    """Losses of the reference and of the placement, by step."""
    steps: int = 0
    """Number of steps that both runs completed."""
    note: str = ""
    """Remark to print after the verdict."""

    @property
    def judged(self) -> Comparison:
        """The comparison that determines the verdict."""
        return self.own if self.wide is None else self.wide

    @property
    def tolerance(self) -> float:
        """The relative difference above which two values count as different."""
        return TOLERANCE


def worst(results: Sequence[Result]) -> TrainingVerdict:
    return max((result.verdict for result in results), key=lambda each: each.value)


def sentences(result: Result) -> list[str]:
    """Return sentences that describe a result, starting with the verdict."""
    return [*_verdict(result), *([result.note] if result.note else [])]


def _verdict(result: Result) -> list[str]:
    steps = f"{result.steps} step{'s' * (result.steps != 1)}"
    if result.verdict is TrainingVerdict.BITS:
        return [
            f"Equal to the last bit over {steps}: every loss, gradient norm, parameter, buffer and "
            "optimizer state."
        ]
    if result.verdict is TrainingVerdict.ROUNDING:
        required, own = format_difference(TOLERANCE), format_difference(result.own.largest)
        if result.wide is None:
            return [
                f"Equal within rounding over {steps}: it agrees to {own} (required: {required})."
            ]
        return [
            f"Equal within rounding over {steps}: in fp64 the same script agrees to "
            f"{format_difference(result.wide.largest)} (required: {required}). So the largest "
            f"difference in the script's own precision, {own}, is only rounding."
        ]
    if result.verdict is TrainingVerdict.UNPROVED:
        return [
            f"Not proved: it differs by at most {format_difference(result.own.largest)} over "
            f"{steps}. This may be rounding, but the script does not run in fp64: {result.why}"
        ]
    sentences = _differs(result)
    if result.smallest is not None and result.smallest != result.placement:
        sentences.append(f"The smallest placement that differs: {result.smallest}")
    if result.found is not None:
        sentences += [f"Cause: {cause.words}" for cause in result.found.causes] or [
            "No trial removed the difference. " + result.found.clue
        ]
    return sentences


def _differs(result: Result) -> list[str]:
    comparison = result.judged
    in_fp64 = " in fp64" if result.wide is not None else ""
    sentences = []
    if (first := comparison.first(result.tolerance)) is not None:
        sentences = [
            f"Differs{in_fp64}, first {name_step(first)}. {describe_step(first, result.tolerance)}"
        ]
    # A script may stop early under a placement, even if all of its steps agree.
    if not comparison.same_counts:
        one, other = next(pair for pair in comparison.counts.values() if pair[0] != pair[1])
        begin = "It" if sentences else "Differs: it"
        sentences.append(f"{begin} makes {other} steps, and {one} in the reference.")
    return sentences


def name_step(step: StepDifference) -> str:
    """Return a phrase such as "in step 3". Steps are numbered from 0, like `engine.steps`."""
    engine = f" of engine {step.engine}" if step.engine else ""
    return (
        f"before the first step{engine}"
        if not step.number
        else f"in step {step.number - 1}{engine}"
    )


def describe_step(step: StepDifference, tolerance: float) -> str:
    """Describe the differences in a step: loss, weight, norm, samples and tensors."""
    figures = [
        f"{name} {_relative(value)}"
        for name, value in (
            ("loss", step.loss),
            ("weight", step.weight),
            ("gradient norm", step.grad_norm),
        )
        if not value <= tolerance
    ]
    sentences = [f"Relative differences: {', '.join(figures)}."] if figures else []
    if step.skipped:
        sentences.insert(0, "One of the two skipped this step and the other did not.")
    if any(step.samples):
        sentences.append(describe_samples(*step.samples))
    if tensors := step.beyond(tolerance):
        first, worst = tensors[0], max(tensors, key=lambda each: each.relative)
        several = f"{len(tensors)} tensors differ. The" if len(tensors) > 1 else "The"
        # The first tensor in forward order is closest to the cause. The largest difference may be a
        # later effect.
        sentences.append(f"{several} first in forward order is {describe_tensor(first)}.")
        if worst is not first:
            sentences.append(f"The largest difference in this step is in {describe_tensor(worst)}.")
    return " ".join(sentences)


def describe_samples(missing: Sequence[int], more: Sequence[int]) -> str:
    """Describe the samples of the dataset that only one of the runs trains on."""
    parts = [
        f"{words} {_some(numbers)}"
        for words, numbers in (("not on", missing), ("but also on", more))
        if numbers
    ]
    if not missing:
        parts = [f"also on {_some(more)}"]
    return f"It trains on different samples of the dataset: {', '.join(parts)}."


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:SAMPLES]))
    return shown + (f" and {len(numbers) - SAMPLES} more" if len(numbers) > SAMPLES else "")


def describe_tensor(difference: TensorDifference) -> str:
    """Describe a tensor that differs: its name, the difference, and the ranks that deviate."""
    if difference.missing:
        return f"{difference.name}, which only one of the two runs has"
    text = f"{difference.name}, by {_relative(difference.relative)}"
    if difference.exact and difference.worst >= 0 and not difference.strays:
        text += f" (element {difference.worst}: {difference.ours:.9g}, not {difference.theirs:.9g})"
    if difference.strays:
        ranks = ", ".join(map(str, difference.strays))
        have = "s {} have" if len(difference.strays) > 1 else " {} has"
        text += f", and rank{have.format(ranks)} another value than rank 0"
    return text


def _relative(value: float) -> str:
    """Format a relative difference for a sentence, in percent from 1 % on."""
    if not 0.01 <= value < math.inf:
        return format_difference(value)
    return f"{100 * float(f'{value:.2g}'):g} %"


def format_difference(value: float) -> str:
    """Format a relative difference with two significant digits."""
    return "0" if value == 0 else f"{value:.2g}"
