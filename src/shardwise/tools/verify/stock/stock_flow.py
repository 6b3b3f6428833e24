"""Verifies a stock script: which runs are made, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.errors import LaunchError
from shardwise.tools.verify.comparing import Comparison, compare
from shardwise.tools.verify.runs import RunFailed
from shardwise.tools.verify.stock.batches import UnjoinableBatches
from shardwise.tools.verify.stock.findings import Finding, StockSuspect, findings, suspects
from shardwise.tools.verify.stock.stock_runs import StockRecords, StockRuns
from shardwise.tools.verify.verdicts import TOLERANCE, TrainingVerdict

UNJOINABLE = UnjoinableBatches.__name__


@dataclass(frozen=True, kw_only=True)
class StockResult:
    """What was found about a stock script. `judged` is the comparison that the verdict is about."""

    verdict: TrainingVerdict
    steps: int
    ranks: int
    rows: Sequence[int]
    """Rows of each step, over all ranks."""
    own: Comparison
    judged: Comparison
    findings: Sequence[Finding] = ()
    cause: StockSuspect | None = None
    why: str = ""
    losses: tuple[Sequence[float], Sequence[float]] = field(default=((), ()))


def verify(runs: StockRuns) -> StockResult:
    """Run the ranks and the reference, compare them, and find the cause of a difference.

    Raises:
        LaunchError: If the script makes no step of a torch optimizer.
        RunFailed: If a run ends with an error.
    """
    made = runs.ranks("the ranks")
    if not made.training.steps:
        raise LaunchError(
            "The ranks made no step of a torch optimizer, so there is nothing to compare."
        )
    found = findings(made)
    try:
        reference = runs.reference("one process")
    except RunFailed as error:
        if UNJOINABLE not in error.output:
            raise
        nothing = Comparison([], {})
        return StockResult(
            verdict=TrainingVerdict.DIFFERS if found else TrainingVerdict.UNPROVED,
            steps=made.training.steps,
            ranks=len(made.ranks),
            rows=_rows(made),
            own=nothing,
            judged=nothing,
            findings=found,
            why=error.output.rpartition(f"{UNJOINABLE}: ")[2].splitlines()[0],
        )
    own = _compared(reference, made)
    known = {
        "steps": made.training.steps,
        "ranks": len(made.ranks),
        "rows": _rows(made),
        "own": own,
        "losses": (
            [s.loss for s in reference.training.engines[0][1:]],
            [s.loss for s in made.training.engines[0][1:]],
        ),
        "findings": found,
    }
    if found:
        return StockResult(verdict=TrainingVerdict.DIFFERS, judged=own, **known)
    if own.same_bits:
        return StockResult(verdict=TrainingVerdict.BITS, judged=own, **known)
    if own.within(TOLERANCE):
        return StockResult(verdict=TrainingVerdict.ROUNDING, judged=own, **known)
    try:
        wide_made = runs.ranks("the ranks in fp64", wide=True)
        wide_reference = runs.reference("one process in fp64", wide=True)
    except RunFailed as error:
        return StockResult(verdict=TrainingVerdict.UNPROVED, judged=own, why=str(error), **known)
    judged = _compared(wide_reference, wide_made)
    if judged.within(TOLERANCE):
        return StockResult(verdict=TrainingVerdict.ROUNDING, judged=judged, **known)
    cause = _cause(runs, wide_reference, wide_made, judged)
    return StockResult(verdict=TrainingVerdict.DIFFERS, judged=judged, cause=cause, **known)


def _compared(reference: StockRecords, made: StockRecords) -> Comparison:
    """Compare two runs. What backward is called on need not be the mean over all ranks, so losses
    do not count if everything else agrees."""
    compared = compare(reference.training, made.training)
    plain = compared.without_losses
    return plain if plain.within(TOLERANCE) else compared


def _cause(
    runs: StockRuns, reference: StockRecords, made: StockRecords, judged: Comparison
) -> StockSuspect | None:
    """Return the first suspect without which the runs agree."""
    for suspect in suspects(reference, made, judged, TOLERANCE):
        words = f"trial: {suspect.name}"
        try:
            ours = runs.ranks(words, wide=True, alter=suspect.ranks)
            theirs = reference
            if suspect.reference:
                theirs = runs.reference(words, wide=True, alter=suspect.reference)
        except RunFailed:
            continue  # a trial that fails proves nothing
        if _compared(theirs, ours).within(TOLERANCE):
            return suspect
    return None


def _rows(made: StockRecords) -> list[int]:
    """Return the rows of each step, over all ranks."""
    return [step.fed.rows for step in made.training.engines[0][1:]]
