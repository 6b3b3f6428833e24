"""Holds the results of a verification, and converts them to JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.tools.report.output import finite, machine_facts
from shardwise.tools.verify import verdicts
from shardwise.tools.verify.comparing import Comparison, TensorDifference, largest_by_step
from shardwise.tools.verify.request import VerifyRequest
from shardwise.tools.verify.verdicts import TOLERANCE, Result, TrainingVerdict

STYLES = {
    TrainingVerdict.BITS: "green",
    TrainingVerdict.ROUNDING: "green",
    TrainingVerdict.UNPROVED: "yellow",
    TrainingVerdict.DIFFERS: "red",
}
SHOWN = 12
"""Maximum number of tensors per placement on the page, largest differences first."""


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The results of all placements of a plan."""

    plan: VerifyRequest
    results: Sequence[Result]

    @property
    def command(self) -> str:
        """The script and its arguments, as the user wrote them."""
        return " ".join(self.plan.script.words)

    @property
    def reference(self) -> str:
        """The placement or script of the reference, as text."""
        if self.plan.against is not None:
            return " ".join(self.plan.against.words)
        return str(self.plan.reference)

    @property
    def verdict(self) -> TrainingVerdict:
        """The worst verdict of all placements."""
        return verdicts.worst(self.results)

    @property
    def exit_code(self) -> int:
        """The exit code of the worst verdict, or 0 if that verdict is accepted."""
        worst = self.verdict
        accepted = worst is TrainingVerdict.ROUNDING and self.plan.accepts_rounding
        return 0 if accepted else worst.value

    def machine(self) -> dict[str, str]:
        return machine_facts()


def largest(comparison: Comparison, count: int = SHOWN) -> list[tuple[int, TensorDifference]]:
    """Return (step number, difference) for the tensors with the largest differences."""
    worst: dict[str, tuple[int, TensorDifference]] = {}
    for step in comparison.steps:
        for each in step.tensors:
            if each.name not in worst or worst[each.name][1].relative < each.relative:
                worst[each.name] = step.number, each
    return sorted(worst.values(), key=lambda pair: -pair[1].relative)[:count]


def as_json(report: VerifyReport) -> dict[str, Any]:
    """Return the report as values that JSON can represent. Non-finite numbers become None."""
    return {
        "command": report.command,
        "reference": report.reference,
        "steps": report.plan.steps,
        "tolerance": TOLERANCE,
        "verdict": report.verdict.name.lower(),
        "exit_code": report.exit_code,
        **report.machine(),
        "placements": [_result(result) for result in report.results],
    }


def _result(result: Result) -> dict[str, Any]:
    first = result.judged.first(TOLERANCE) if result.verdict is TrainingVerdict.DIFFERS else None
    tensors = [] if first is None else first.beyond(TOLERANCE)
    causes = result.found.causes if result.found is not None else []
    return {
        "placement": str(result.placement),
        "verdict": result.verdict.name.lower(),
        "words": verdicts.sentences(result),
        "steps": result.steps,
        "largest_difference": finite(result.own.largest),
        "largest_difference_fp64": None if result.wide is None else finite(result.wide.largest),
        # Users number steps from 0, so -1 is the state before the first step.
        "first_step": None if first is None else first.number - 1,
        "first_tensor": tensors[0].name if tensors else None,
        "tensors": [
            {k: finite(v) if isinstance(v, float) else v for k, v in asdict(each).items()}
            for each in tensors
        ],
        "smallest_placement": None if result.smallest is None else str(result.smallest),
        "causes": [{"name": each.name, "words": each.words} for each in causes],
        "reference_losses": [finite(value) for value in result.losses[0]],
        "losses": [finite(value) for value in result.losses[1]],
        "difference_by_step": [finite(value) for _, value in largest_by_step(result.own)],
        "difference_by_step_fp64": None
        if result.wide is None
        else [finite(value) for _, value in largest_by_step(result.wide)],
    }
