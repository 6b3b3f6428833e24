"""Verifies that a stock script resumes: compares a resumed run with an uninterrupted one.

    whole       step 1 ... K  K+1 ... S
    stopped     step 1 ... K  SIGTERM           the script saves its own checkpoint
    resumed              R+1 ... S              the command again, in the stopped run's folder

The script saved its last checkpoint after step R. The resumed run starts with these parameters, so
the whole run's parameters after each step show R.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.tools.report.output import last_words
from shardwise.tools.verify import verdicts
from shardwise.tools.verify.comparing import Comparison, compare
from shardwise.tools.verify.records import RecordedTraining, Step, WholeTensor
from shardwise.tools.verify.runs import RunFailed
from shardwise.tools.verify.stock.findings import Finding
from shardwise.tools.verify.stock.stock_flow import StockResult, check
from shardwise.tools.verify.stock.stock_runs import StockCommand, StockRecords, StockRuns
from shardwise.tools.verify.verdicts import TrainingVerdict


@dataclass(frozen=True, kw_only=True)
class ResumeResult(StockResult):
    """The result for a script that was stopped and resumed."""

    stopped_at: int
    resumed_from: int | None = None
    """Step after which the resumed run continues, or None if no step has its parameters."""


def verify(runs: StockRuns, stop_at: int, again: StockCommand) -> ResumeResult:
    """Execute the three runs, and compare the steps after the second start.

    Raises:
        LaunchError: If no torch optimizer completes a step, or if a run hangs.
        RunFailed: If the whole run exits with an error.
    """
    whole = runs.ranks("the ranks, not stopped")
    check(whole)
    result = ResumeResult(
        verdict=TrainingVerdict.UNPROVED,
        steps=whole.training.steps,
        ranks=len(whole.ranks),
        rows=(),
        own=Comparison([], {}),
        stopped_at=stop_at,
        losses=(_losses(whole), ()),
    )
    if whole.training.steps <= stop_at:
        steps = whole.training.steps
        return replace(result, why=f"the script ends after {steps} steps, so none is left.")
    view = runs.new_view()
    stopped = runs.stopped_ranks(f"the ranks, stopped after step {stop_at}", stop_at, view)
    if not _same_until(whole, stopped, stop_at):
        return replace(
            result,
            why="two runs of the script differ before it is stopped, so it is not deterministic. "
            "Seed all of its random numbers.",
        )
    try:
        resumed = runs.resumed_ranks("the ranks, resumed", again, view)
    except RunFailed as error:
        words = f"The script does not start again: {last_words(error.output)}"
        finding = Finding("does not resume", words)
        return replace(result, verdict=TrainingVerdict.DIFFERS, findings=[finding])
    if not resumed.training.steps:
        return replace(result, why="the resumed run made no step.")
    start = _start(whole, resumed)
    result = replace(result, resumed_from=start)
    if not start:
        return replace(
            result,
            verdict=TrainingVerdict.DIFFERS,
            losses=(_losses(whole), _losses(resumed)),
            findings=[_other_start(start)],
        )
    if start >= whole.training.steps:
        return replace(result, why="the second start goes on after the last step.")
    compared = _compare_from(whole, resumed, start)
    result = replace(
        result,
        own=compared,
        steps=max((step.number for step in compared.steps), default=0),
        losses=(_losses(whole)[start:], _losses(resumed)),
    )
    found = list(_findings(whole, resumed, compared, start))
    if compared.same_bits and not found:
        return replace(result, verdict=TrainingVerdict.BITS)
    return replace(result, verdict=TrainingVerdict.DIFFERS, findings=found)


def _losses(made: StockRecords) -> list[float]:
    return [step.loss for step in made.training.engines[0][1:]]


def _same_until(whole: StockRecords, stopped: StockRecords, step: int) -> bool:
    return _by_copies(whole.training, stopped.training, step).same_bits


def _by_copies(one: RecordedTraining, two: RecordedTraining, steps: int) -> Comparison:
    """Compare each rank's copies in two runs. Within a run, the ranks' copies may differ."""
    compared = compare(one, two, steps=steps)
    kept = []
    for step in compared.steps:
        theirs, ours = (each.engines[step.engine][step.number].tensors for each in (one, two))
        tensors = [
            each
            for each in step.tensors
            if not _same_copies(
                theirs.get((each.kind, each.name)), ours.get((each.kind, each.name))
            )
        ]
        kept.append(replace(step, tensors=tensors))
    return replace(compared, steps=kept)


def _same_copies(one: WholeTensor | None, two: WholeTensor | None) -> bool:
    """Return whether each rank's copy is bit-identical in both runs.

    Returns False if either tensor is missing.
    """
    return (
        one is not None
        and two is not None
        and one.copies.keys() == two.copies.keys()
        and all(copy.same_bits(two.copies[rank]) for rank, copy in one.copies.items())
    )


def _start(whole: StockRecords, resumed: StockRecords) -> int | None:
    """Return the last step after which the whole run had the resumed run's initial parameters."""
    first = resumed.training.engines[0][0]
    same = [step.number for step in whole.training.engines[0] if _same_parameters(step, first)]
    # Parameters may be equal after several steps, such as with a learning rate of 0 at first.
    return max(same, default=None)


def _same_parameters(one: Step, other: Step) -> bool:
    names = [key for key in other.tensors if key[0] == "model"]
    return all(_same_copies(one.tensors.get(key), other.tensors[key]) for key in names)


def _other_start(start: int | None) -> Finding:
    if start == 0:
        return Finding(
            "does not resume",
            "The second start begins at the first step again. Either the script saves nothing "
            "before it is stopped, or it does not load its checkpoint. If resuming needs another "
            "command, pass it with --resume-with.",
        )
    return Finding(
        "parameters",
        "After the second start, the parameters differ from those after every step of the run that "
        "was not stopped. The script does not restore all parameters.",
    )


def _compare_from(whole: StockRecords, resumed: StockRecords, start: int) -> Comparison:
    """Compare the resumed run with the whole run's steps after step `start`."""
    theirs = _shifted(whole.training, start)
    common = min(theirs.steps, resumed.training.steps)
    return _by_copies(theirs, resumed.training, common)


def _shifted(training: RecordedTraining, start: int) -> RecordedTraining:
    engines: dict[int, list[Step]] = {}
    for number, steps in training.engines.items():
        kept = [replace(step, number=step.number - start) for step in steps[start:]]
        if kept:
            # The first record of a run has no gradients, and no buffers.
            first = {k: v for k, v in kept[0].tensors.items() if k[0] in ("model", "optimizer")}
            kept[0] = replace(kept[0], tensors=first, loss=float("nan"), grad_norm=float("nan"))
        engines[number] = kept
    return replace(training, engines=engines)


def _findings(
    whole: StockRecords, resumed: StockRecords, compared: Comparison, start: int
) -> Iterator[Finding]:
    """Yield the states that the script does not restore, in the order of their use in a step."""
    named = False
    if _inputs(whole, start) != _inputs(resumed, 0):
        named = True
        yield Finding(
            "samples",
            f"After the second start, the steps from step {start} on train on other samples than "
            "in the run that was not stopped. Save the position in the epoch and the sampler's "
            "epoch, and skip the samples that have been used.",
        )
    if lost := _lost_state(whole, resumed, start):
        named = True
        yield Finding(
            "optimizer state",
            f"The optimizer starts without its state ({lost}). Save optimizer.state_dict(), and "
            "load it.",
        )
    theirs, ours = whole.ranks[0]["rates"], resumed.ranks[0]["rates"]
    pairs = zip(theirs[start:], ours, strict=False)
    if wrong := next(((i, a, b) for i, (a, b) in enumerate(pairs) if a != b), None):
        named = True
        yield Finding(
            "learning rate",
            f"In step {start + wrong[0]}, the learning rate is {wrong[2][0]:.6g}, but "
            f"{wrong[1][0]:.6g} in the run that was not stopped. Save scheduler.state_dict(), and "
            "load it.",
        )
    if compared.same_bits:
        return
    if not named and (names := _other_random_states(whole, resumed, start)):
        yield Finding(
            "random state",
            f"After step {start}, the random states ({', '.join(names)}) differ from the run that "
            "was not stopped. Save and load torch.get_rng_state() of each rank, and the states of "
            "random and NumPy if the script uses them.",
        )
    first = compared.first(0.0)
    if first is not None:
        moved = replace(first, number=first.number + start)
        yield Finding(
            "results",
            f"Results differ first {verdicts.name_step(moved)}. "
            f"{verdicts.describe_step(moved, 0.0)}",
        )


def _inputs(made: StockRecords, start: int) -> list[list[int]]:
    """Return hashes of the model inputs, by rank, in the second and third step after `start`.

    The first step after `start` is skipped, because a run records model inputs only from its second
    step.
    """
    return [[row["fed"]["hashes"] for row in rows[start + 1 : start + 3]] for rows in made.steps]


def _other_random_states(whole: StockRecords, resumed: StockRecords, start: int) -> list[str]:
    """Return the libraries whose random state differs after the resumed run's first step."""
    names: dict[str, None] = {}
    for one, two in zip(whole.steps, resumed.steps, strict=True):
        if len(one) > start and two:
            theirs, ours = one[start]["random"], two[0]["random"]
            names |= dict.fromkeys(name for name in theirs if ours.get(name) != theirs[name])
    return list(names)


def _lost_state(whole: StockRecords, resumed: StockRecords, start: int) -> str | None:
    """Return the name of an optimizer state that differs from its value after step `start`."""
    theirs, ours = whole.training.engines[0][start], resumed.training.engines[0][0]
    for key, before in theirs.tensors.items():
        if key[0] == "optimizer" and (
            key not in ours.tensors or not _same_copies(before, ours.tensors[key])
        ):
            return key[1]
    return next((n for n, v in theirs.numbers.items() if ours.numbers.get(n) != v), None)
