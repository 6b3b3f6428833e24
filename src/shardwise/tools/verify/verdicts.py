"""What a verification finds, in words, with an exit code each. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from shardwise.tools.verify.causes import Found
from shardwise.tools.verify.comparing import Comparison, StepDifference, TensorDifference
from shardwise.tools.verify.placements import Placement

TOLERANCE = 1e-8
"""How far fp64 runs may be apart: relative, in every loss, norm and tensor."""

SAMPLES = 6
"""Numbers of samples that are shown."""


class Verdict(Enum):
    """How a placement trains beside the reference, and the exit code of the worst one."""

    BITS = 0
    ROUNDING = 3
    UNPROVED = 4
    DIFFERS = 5

    @property
    def words(self) -> str:
        """In a few words."""
        return _WORDS[self]


_WORDS = {
    Verdict.BITS: "equal to the last bit",
    Verdict.ROUNDING: "equal within rounding",
    Verdict.UNPROVED: "not proved",
    Verdict.DIFFERS: "differs",
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was found about one placement.

    `own` compares the runs as they are, `wide` those in fp64 where they were made; `smallest` is
    the smallest placement that differs, `causes` what takes the difference away.
    """

    placement: Placement
    verdict: Verdict
    own: Comparison
    wide: Comparison | None = None
    smallest: Placement | None = None
    found: Found | None = None
    why: str = ""
    """Why there are no fp64 runs."""
    losses: tuple[Sequence[float], Sequence[float]] = field(default=((), ()))
    """Of the reference and of the placement, step by step."""
    steps: int = 0
    note: str = ""
    """What is to be said beside the verdict."""

    @property
    def judged(self) -> Comparison:
        """The comparison that the verdict is about."""
        return self.own if self.wide is None else self.wide

    @property
    def tolerance(self) -> float:
        """What counts as a difference in it."""
        return TOLERANCE


def worst(results: Sequence[Result]) -> Verdict:
    """The verdict of all together."""
    return max((result.verdict for result in results), key=lambda each: each.value)


def sentences(result: Result) -> list[str]:
    """What to say about a placement, the verdict first."""
    return [*_verdict(result), *([result.note] if result.note else [])]


def _verdict(result: Result) -> list[str]:
    steps = f"{result.steps} step{'s' * (result.steps != 1)}"
    if result.verdict is Verdict.BITS:
        return [
            f"Equal to the last bit over {steps}: every loss, gradient norm, parameter, buffer and "
            "optimizer state."
        ]
    if result.verdict is Verdict.ROUNDING:
        asked, own = figure(TOLERANCE), figure(result.own.largest)
        if result.wide is None:
            return [f"Equal within rounding over {steps}: it agrees to {own} (asked: {asked})."]
        return [
            f"Equal within rounding over {steps}: in fp64 the same script agrees to "
            f"{figure(result.wide.largest)} (asked: {asked}), so what differs as it is, by {own} "
            "at most, is the rounding of its precision and nothing else."
        ]
    if result.verdict is Verdict.UNPROVED:
        return [
            f"Not proved: it differs by {figure(result.own.largest)} at most over {steps}. Whether "
            f"that is rounding cannot be shown, since the script does not run in fp64: {result.why}"
        ]
    said = _differs(result)
    if result.smallest not in (None, result.placement):
        said.append(f"The smallest placement that differs: {result.smallest}")
    if result.found is not None and not result.found.causes:
        said.append("No cause was found by trying. " + result.found.clue)
    elif result.found is not None:
        said += [f"Cause: {cause.words}" for cause in result.found.causes]
    return said


def _differs(result: Result) -> list[str]:
    comparison = result.judged
    in_fp64 = " in fp64" if result.wide is not None else ""
    said = []
    if (first := comparison.first(result.tolerance)) is not None:
        said = [f"Differs{in_fp64}, first {where(first)}. {what(first, result.tolerance)}"]
    if not comparison.same_counts:
        one, other = next(pair for pair in comparison.counts.values() if pair[0] != pair[1])
        begin = "It" if said else "Differs: it"
        said.append(f"{begin} makes {other} steps, and {one} in the reference.")
    return said


def where(step: StepDifference) -> str:
    """Which step, in words; steps are counted as `engine.steps` was before them."""
    engine = f" of engine {step.engine}" if step.engine else ""
    return (
        f"before the first step{engine}"
        if not step.number
        else f"in step {step.number - 1}{engine}"
    )


def what(step: StepDifference, tolerance: float) -> str:
    """What differs in a step: its figures, the first tensor, and how many."""
    figures = [
        f"the {name} by {figure(value)}"
        for name, value in (
            ("loss", step.loss),
            ("weight", step.weight),
            ("gradient norm", step.grad_norm),
        )
        if not value <= tolerance
    ]
    said = [f"It differs in {_and(figures)}."] if figures else []
    if step.skipped:
        said.insert(0, "One of the two skipped this step, and the other did not.")
    if any(step.samples):
        said.append(samples(*step.samples))
    if tensors := step.beyond(tolerance):
        first, worst = tensors[0], max(tensors, key=lambda each: each.relative)
        several = f"{len(tensors)} tensors differ; the" if len(tensors) > 1 else "The"
        said.append(f"{several} first in order of the forward is {tensor(first)}.")
        if worst is not first:
            said.append(f"The largest difference is that of {tensor(worst)}.")
    return " ".join(said)


def samples(missing: Sequence[int], more: Sequence[int]) -> str:
    """Which samples of the dataset only one of the two trains on."""
    said = [
        f"{words} {_some(numbers)}"
        for words, numbers in (("not on", missing), ("but also on", more))
        if numbers
    ]
    if not missing:
        said = [f"also on {_some(more)}"]
    return f"It trains on other samples of the dataset: {', '.join(said)}."


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:SAMPLES]))
    return shown + (f" and {len(numbers) - SAMPLES} more" if len(numbers) > SAMPLES else "")


def tensor(found: TensorDifference) -> str:
    """A tensor that differs, by how much, and on which ranks."""
    if found.missing:
        return f"{found.name}, which only one of the two has"
    said = f"{found.name}, by {figure(found.relative)}"
    if found.exact and found.worst >= 0 and not found.strays:
        said += f" (element {found.worst}: {found.ours:.9g}, not {found.theirs:.9g})"
    if found.strays:
        ranks = ", ".join(map(str, found.strays))
        said += (
            f", with another value on rank{'s' * (len(found.strays) > 1)} {ranks} than on rank 0"
        )
    return said


def figure(value: float) -> str:
    """A relative difference with as many digits as are of use."""
    return "0" if value == 0 else f"{value:.2g}"


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
