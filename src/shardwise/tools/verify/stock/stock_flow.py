"""Verifies a stock script: which runs are made, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardwise.errors import LaunchError
from shardwise.tools.verify.comparing import Comparison, compare
from shardwise.tools.verify.runs import RunFailed
from shardwise.tools.verify.stock import metrics
from shardwise.tools.verify.stock.batches import UnjoinableBatches
from shardwise.tools.verify.stock.findings import Finding, findings, parts_of_ranks, some
from shardwise.tools.verify.stock.stock_runs import StockRecords, StockRuns
from shardwise.tools.verify.stock.suspects import StockSuspect, suspects
from shardwise.tools.verify.verdicts import TOLERANCE, TrainingVerdict

METRICS = 1e-4
"""Relative difference in training up to which evaluations are compared."""

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
    if not made.ranks:
        raise LaunchError(
            "The command started no process that has a rank (RANK, OMPI_COMM_WORLD_RANK, PMI_RANK "
            "or SLURM_PROCID) and imports torch. Give a command that starts several ranks."
        )
    if not made.training.steps:
        raise LaunchError(
            "The ranks made no step of a torch optimizer, so there is nothing to compare."
        )
    nothing = Comparison([], {})
    result = StockResult(
        verdict=TrainingVerdict.BITS,
        steps=made.training.steps,
        ranks=len(made.ranks),
        rows=_rows(made),
        own=nothing,
        judged=nothing,
        findings=findings(made),
    )
    try:
        reference = runs.reference("one process")
    except RunFailed as error:
        if UNJOINABLE not in error.output:
            raise
        why = error.output.rpartition(f"{UNJOINABLE}: ")[2].splitlines()[0]
        verdict = TrainingVerdict.DIFFERS if result.findings else TrainingVerdict.UNPROVED
        return replace(result, verdict=verdict, why=why)
    own = _compared(reference, made)
    losses = tuple(
        [step.loss for step in each.training.engines[0][1:]] for each in (reference, made)
    )
    proved = findings(made, reference)
    if own.trains_the_same(METRICS):
        proved += metrics.findings(reference, made)
    result = replace(result, own=own, judged=own, losses=(losses[0], losses[1]), findings=proved)
    if parts := parts_of_ranks(made, reference):
        why = f"{some(parts)} have other shapes on the ranks than in one process."
        verdict = TrainingVerdict.DIFFERS if proved else TrainingVerdict.UNPROVED
        return replace(result, verdict=verdict, why=why)
    if result.findings:
        return replace(result, verdict=TrainingVerdict.DIFFERS)
    if own.same_bits:
        return result
    if own.within(TOLERANCE):
        return replace(result, verdict=TrainingVerdict.ROUNDING)
    try:
        wide_made = runs.ranks("the ranks in fp64", wide=True)
        wide_reference = runs.reference("one process in fp64", wide=True)
    except RunFailed as error:
        why = f"it differs as it is, and the script does not run in fp64: {error}"
        return replace(result, verdict=TrainingVerdict.UNPROVED, why=why)
    judged = _compared(wide_reference, wide_made)
    result = replace(result, judged=judged)
    if judged.within(TOLERANCE):
        return replace(result, verdict=TrainingVerdict.ROUNDING)
    cause = _cause(runs, wide_reference, wide_made, judged)
    if cause is not None and not cause.is_mistake:
        return replace(result, verdict=TrainingVerdict.UNPROVED, why=cause.words)
    return replace(result, verdict=TrainingVerdict.DIFFERS, cause=cause)


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
        if suspect.is_proved:
            return suspect
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
    """Return the rows of each step, over all ranks; of training loaders only."""
    rows = [step.fed.rows for step in made.training.engines[0][1:]]
    # The first step's inputs are seen before its optimizer is known.
    return rows[1:]
