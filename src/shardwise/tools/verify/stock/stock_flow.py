"""Verifies a stock script: decides which runs are needed and what their results mean.

runs                                    result
-------------------------------------------------------------------------------------------
ranks and one process                   done if they are identical or within 1e-8
both in fp64                            within 1e-8: equal within rounding
one process in fp64 again               differs: the script is not deterministic
one process, noting draws, twice        the first operation without a seed
ranks, without a suspect                agree: the suspect is the cause

If buffers change in evaluations or recomputations, one process runs again without these changes.
It is a mistake if it then trains differently, even if the runs above agree.

If the models receive other inputs than in one process, or the ranks make different numbers of
steps, the result is not proved. One process then runs again as it is, only to find an operation
without a seed, which may be the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.errors import LaunchError
from shardwise.layout import fingerprints
from shardwise.tools.report.output import last_words
from shardwise.tools.verify import verdicts
from shardwise.tools.verify.comparing import Comparison, compare
from shardwise.tools.verify.runs import RunFailed
from shardwise.tools.verify.stock import draws, metrics
from shardwise.tools.verify.stock.batches import UnjoinableBatches
from shardwise.tools.verify.stock.findings import Finding, findings, parts_of_ranks, some
from shardwise.tools.verify.stock.stateful_forwards import (
    EVALUATION,
    MICRO_BATCH,
    RECOMPUTATION,
)
from shardwise.tools.verify.stock.stock_runs import StockRecords, StockRuns
from shardwise.tools.verify.stock.suspects import StockSuspect, of_bf16, suspects
from shardwise.tools.verify.verdicts import TOLERANCE, TrainingVerdict

METRICS = 1e-4
"""Maximum relative difference in training at which evaluations are still compared."""

OF_FP32 = 1e-4
"""A difference in fp64 that is smaller than this may be due to casts to fp32, if there are any."""

UNJOINABLE = UnjoinableBatches.__name__
WIDE = "float64"


@dataclass(frozen=True, kw_only=True)
class StockResult:
    """The verdict on a stock script, and the evidence."""

    verdict: TrainingVerdict
    steps: int
    ranks: int
    rows: Sequence[int]
    """Number of rows over all ranks, for each step except the first."""
    own: Comparison
    wide: Comparison | None = None
    findings: Sequence[Finding] = ()
    cause: StockSuspect | None = None
    why: str = ""
    finds_causes: bool = True
    """Whether the cause of a difference is searched for."""
    losses: tuple[Sequence[float], Sequence[float]] = field(default=((), ()))

    @property
    def judged(self) -> Comparison:
        """The comparison that determines the verdict."""
        return self.own if self.wide is None else self.wide


def verify(runs: StockRuns, *, finds_causes: bool = True) -> StockResult:
    """Run the ranks and the reference, compare them, and find the cause of a difference.

    Raises:
        LaunchError: If no torch optimizer completes a step, or if a run hangs.
        RunFailed: If the ranks exit with an error.
    """
    made = runs.ranks("the ranks")
    check(made)
    result = StockResult(
        verdict=TrainingVerdict.BITS,
        steps=made.training.steps,
        ranks=len(made.ranks),
        rows=[total.rows for total in map(_fed, _by_step(made)[1:])],
        own=Comparison([], {}),
        findings=findings(made),
        finds_causes=finds_causes,
    )
    if len(made.ranks) == 1:
        return _unproved(result, "the command started one rank only, so there is nothing to prove.")
    try:
        reference = runs.reference("one process")
    except RunFailed as error:
        return _unproved(result, _why_failed(error))
    if not reference.training.steps:
        return _unproved(result, "the script makes no step in one process.")
    result = replace(
        result, own=_compared(reference, made), losses=(_losses(reference), _losses(made))
    )
    proved = findings(made, reference)
    if result.own.trains_the_same(METRICS):
        proved += metrics.findings(reference, made)
    result = replace(result, findings=proved)
    if parts := parts_of_ranks(made, reference):
        return _unproved(
            result, f"{some(parts)} have other sizes on the ranks than in one process."
        )
    if not result.findings and finds_causes:
        result = replace(result, findings=list(_stateful_forwards(runs, reference)))
    if result.findings:
        return replace(result, verdict=TrainingVerdict.DIFFERS)
    if why := _other_data(reference, made) or _uneven(made):
        return _unproved(result, _after_noise(runs, reference, why))
    if result.own.same_bits:
        return result
    if result.own.within(TOLERANCE):
        return replace(result, verdict=TrainingVerdict.ROUNDING)
    return _judge_in_fp64(runs, result, finds_causes=finds_causes)


def check(made: StockRecords) -> None:
    """Raise LaunchError if there is nothing to compare. The message says why."""
    if not made.ranks:
        raise LaunchError(
            "The command started no process that has a rank (RANK, OMPI_COMM_WORLD_RANK, PMI_RANK "
            "or SLURM_PROCID), or was started by torch.multiprocessing.spawn, and that imports "
            "torch. Give a command that starts several ranks. If Lightning or Fabric starts the "
            "ranks, give -n and the script instead, shardwise verify -n 2 --stock train.py, and "
            'set devices=int(os.environ.get("WORLD_SIZE", 1)) in the script.'
        )
    size = max(facts["world_size"] for facts in made.ranks)
    if len(made.ranks) < size:
        raise LaunchError(
            f"Only {len(made.ranks)} of {size} ranks were recorded: all ranks must run on this "
            "host, and import torch in a Python that reads PYTHONPATH."
        )
    if made.training.steps:
        return
    if library := next((f["unnamed"] for f in made.ranks if f["unnamed"]), None):
        how = "deepspeed" if library == "deepspeed" else None
        hint = f" shardwise verify --adopt {how} can verify the script." if how else ""
        raise LaunchError(
            f"The optimizers of {library} step on partitions without parameter names, which "
            f"cannot be compared.{hint}"
        )
    if any(facts["spawns"] for facts in made.ranks):
        raise LaunchError(
            "The script starts its ranks itself, by torch.multiprocessing.spawn. Give the command "
            'that starts it, without -n: --stock "python train.py".'
        )
    raise LaunchError(
        "The ranks made no step of a torch optimizer, so there is nothing to compare."
    )


def _unproved(result: StockResult, why: str) -> StockResult:
    """Return the result for runs that cannot be compared for the reason `why`.

    If there are findings, the verdict is still DIFFERS.
    """
    verdict = TrainingVerdict.DIFFERS if result.findings else TrainingVerdict.UNPROVED
    return replace(result, verdict=verdict, why=why)


def _why_failed(error: RunFailed) -> str:
    if UNJOINABLE in error.output:
        return error.output.rpartition(f"{UNJOINABLE}: ")[2].splitlines()[0]
    return f"the script fails in one process: {last_words(error.output)}"


def _judge_in_fp64(runs: StockRuns, result: StockResult, *, finds_causes: bool) -> StockResult:
    """Run the ranks and the reference in fp64, and find the cause of any remaining difference."""
    why, rounded, cast = "", None, None
    for wide in ("default", "promoted"):
        try:
            made = runs.ranks("the ranks in fp64", wide=wide)
            reference = runs.reference("one process in fp64", wide=wide)
        except RunFailed as error:
            why = f"the script does not run in fp64: {error}"
            continue
        dtypes = {each for facts in (*made.ranks, *reference.ranks) for each in facts["dtypes"]}
        if dtypes <= {WIDE}:
            compared = _compared(reference, made)
            cast = made, reference, wide
            # The script may cast to fp32 and back, as losses over logits.float() do. With
            # "promoted", such casts have no effect.
            if wide == "promoted" or not _is_small(compared):
                break
            continue
        narrow = ", ".join(sorted(dtypes - {WIDE}))
        why = f"gradients are {narrow} also with fp64 as the default."
        rounded = rounded or (made, reference, wide)
    if cast is not None:
        made, reference, wide = cast
    else:
        unproved = _unproved(result, f"it differs as it is, and {why}")
        if rounded is None or not finds_causes:
            return unproved
        # The script forces narrow dtypes, so only a trial without bf16 is possible.
        made, reference, wide = rounded
        cause = _confirmed(runs, of_bf16(made), reference, wide)
        return unproved if cause is None else _caused(result, cause)
    result = replace(result, wide=_compared(reference, made))
    if result.judged.within(TOLERANCE):
        return replace(result, verdict=TrainingVerdict.ROUNDING)
    if noise := _noise(runs, reference, wide)[0]:
        return _unproved(result, noise)
    tried = suspects(reference, made, result.judged, TOLERANCE) if finds_causes else ()
    cause = _confirmed(runs, tried, reference, wide)
    first = result.judged.without_losses.first(TOLERANCE)
    rounds = [entry for facts in (*made.ranks, *reference.ranks) for entry in facts["narrow"]]
    if cause is None and first is not None and first.largest < OF_FP32 and rounds:
        return _unproved(
            result,
            f"it differs by {first.largest:.1e} {verdicts.name_step(first)} in fp64. This may be "
            f"rounding, because the backward pass is not all in fp64 even then: {rounds[0]}.",
        )
    return _caused(result, cause)


def _caused(result: StockResult, cause: StockSuspect | None) -> StockResult:
    """Return the result for a difference with this cause. The cause is not always a mistake."""
    if cause is not None and not cause.is_mistake:
        return _unproved(result, cause.words)
    return replace(result, verdict=TrainingVerdict.DIFFERS, cause=cause)


def _compared(reference: StockRecords, made: StockRecords) -> Comparison:
    """Compare two runs, ignoring losses if everything else agrees.

    A script's gradients may be correct even if the average of the ranks' losses is not the
    reference's loss.
    """
    compared = compare(reference.training, made.training)
    plain = compared.without_losses
    return plain if plain.within(TOLERANCE) else compared


def _is_small(compared: Comparison) -> bool:
    """Return whether a difference may be due to casts to fp32."""
    return TOLERANCE < compared.without_losses.largest < OF_FP32


def _losses(made: StockRecords) -> list[float]:
    return [step.loss for step in made.training.engines[0][1:]] if made.training.engines else []


# -- data -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Totals:
    """Totals over all ranks' model inputs in a step (see `tensor_log.FeedTotals`)."""

    elements: int
    hashes: int
    squares: float
    rows: int


def _by_step(made: StockRecords) -> list[list[dict[str, Any]]]:
    """Return the inputs to the first optimizer's models, by step and rank."""
    inputs = [[row["fed"] for row in rows] for rows in zip(*made.steps, strict=False)]
    if made.ranks[0]["tensor_parallel"]:
        # Ranks that share layers receive the same rows.
        return [list({each["hashes"]: each for each in row}.values()) for row in inputs]
    return inputs


def _fed(inputs: Sequence[dict[str, Any]]) -> _Totals:
    return _Totals(
        sum(each["elements"] for each in inputs),
        sum(each["hashes"] for each in inputs) % fingerprints.WORD,
        sum(each["sums"][1] for each in inputs),
        sum(each["rows"] for each in inputs),
    )


def _other_data(reference: StockRecords, made: StockRecords) -> str | None:
    """Describe the first step in which the reference had different inputs, or return None.

    The first step's inputs are unknown, because models are found through their optimizers.
    """
    pairs = list(zip(_by_step(made), _by_step(reference), strict=False))
    reads_loaders = all(any(e["trains"] and e["rows"] for e in f["seen"]) for f in made.ranks)
    if len(pairs) < 2 and not reads_loaders:
        return "the inputs of the models are known only from the second step on. Run two steps."
    for number, (ours, theirs) in enumerate(pairs[1:], 1):
        one, two = _fed(ours), _fed(theirs)
        if one.hashes == two.hashes:
            continue
        if one.elements != two.elements and one.rows != two.rows:
            return (
                f"in step {number}, the models of all ranks received {one.rows} rows, and the "
                f"models of one process {two.rows}. Either the batches do not come from a "
                "DataLoader, or they depend on the rank. Pass the arguments that one process needs "
                'for the total batch, for example: --total-batch "--batch-size 64".'
            )
        # Inputs may be results of another model, which differ by rounding, or be padded.
        scale = max(abs(one.squares), 1e-300)
        if one.elements == two.elements and abs(one.squares - two.squares) > 1e-3 * scale:
            return (
                f"in step {number}, the models received other values than in one process, for "
                "example because each rank draws noise or augments its own samples."
            )
    return None


def _uneven(made: StockRecords) -> str | None:
    """Describe the ranks' step counts if they differ, or return None if they do not."""
    counts = [len(rows) for rows in made.steps]
    if min(counts) == max(counts):
        return None
    return f"the ranks made different numbers of steps: {', '.join(map(str, counts))}."


# -- causes ---------------------------------------------------------------------------------


def _stateful_forwards(runs: StockRuns, reference: StockRecords) -> Iterator[Finding]:
    """Yield a finding if buffers change the training at times when they should not change."""
    for kind, name, when, advice in (
        (
            EVALUATION,
            "evaluation changes the training",
            "Forward passes in an evaluation",
            "Change them only if module.training is true.",
        ),
        (
            RECOMPUTATION,
            "buffers change again in recomputation",
            "Forward passes in a recomputation",
            "Change them in the training loop, once per optimizer step.",
        ),
        (
            MICRO_BATCH,
            "buffers updated per micro-batch",
            "Lines between the micro-batches of a step",
            "Change them once per optimizer step, with the counts of all its micro-batches.",
        ),
    ):
        if not (names := reference.ranks[0]["stateful"][kind]):
            continue
        try:
            kept = runs.reference(f"trial: {name}", alter={"keep_buffers": kind})
            again = runs.reference("one process again")
        except (RunFailed, LaunchError):
            continue  # a trial that fails proves nothing
        # Buffers themselves may differ, such as a counter of evaluations.
        differs, is_random = (
            any(
                step.loss > TOLERANCE or any(t.kind != "buffer" for t in step.beyond(TOLERANCE))
                for step in compare(reference.training, other.training).steps
            )
            for other in (kept, again)
        )
        if differs and not is_random:
            yield Finding(
                name,
                f"{when} change buffers ({some(names)}), and the buffers change the training. "
                f"{advice} One process makes the same mistake, so it may agree with the ranks.",
            )


def _after_noise(runs: StockRuns, reference: StockRecords, why: str) -> str:
    """Return the reason `why`, after an operation without a seed if there is one."""
    try:
        noise, names_operation = _noise(runs, reference)
    except (RunFailed, LaunchError):
        return why  # a further run that fails proves nothing
    # Rounding that differs from run to run does not explain other inputs.
    return f"{noise} Also, {why}" if names_operation else why


def _noise(runs: StockRuns, reference: StockRecords, wide: str | None = None) -> tuple[str, bool]:
    """Run the reference again, and describe why the results differ.

    Returns:
        The description, or "" if they agree, and whether it names an operation without a seed.
    """
    again = runs.reference("one process again", wide=wide)
    compared = compare(reference.training, again.training)
    first = compared.first(TOLERANCE)
    if first is None and compared.same_counts:
        return "", False
    words, operation = "one process, noting draws", None
    # Logging draws slows down every operation, so do it only if necessary.
    with suppress(RunFailed, LaunchError):  # the runs above differ anyway
        noted = [runs.reference(words, wide=wide, notes_draws=True) for _ in "12"]
        operation = draws.first_without_seed(*(each.ranks[0]["draws"] for each in noted))
    place = "in their number of steps" if first is None else verdicts.name_step(first)
    where = "" if first is None else f" {verdicts.describe_step(first, TOLERANCE)}"
    how = f" {operation}." if operation else " No operation without a seed was found."
    said = f"the script is not deterministic on one process: two runs differ {place}.{how}{where}"
    return said, operation is not None


def _confirmed(
    runs: StockRuns, tried: Iterable[StockSuspect], reference: StockRecords, wide: str
) -> StockSuspect | None:
    """Return the first suspect that is proved or whose removal makes the runs agree."""
    for suspect in tried:
        if suspect.is_proved:
            return suspect
        compared = _try(runs, suspect, reference, wide)
        # Casts to fp32 in the script leave a small difference (see _judge_in_fp64).
        if compared is not None and wide == "default" and _is_small(compared):
            compared = _try(runs, suspect, None, "promoted")
        if compared is not None and compared.within(TOLERANCE):
            return suspect
    return None


def _try(
    runs: StockRuns, suspect: StockSuspect, reference: StockRecords | None, wide: str
) -> Comparison | None:
    """Run the trial of a suspect, and compare the results. Return None if a run fails.

    If `reference` is None, the reference also runs again.
    """
    words = f"trial: {suspect.name}"
    try:
        ours = runs.ranks(words, wide=wide, alter=suspect.ranks)
        if suspect.reference or reference is None:
            reference = runs.reference(words, wide=wide, alter=suspect.reference)
    except (RunFailed, LaunchError):
        return None  # a trial that fails proves nothing
    return _compared(reference, ours)
