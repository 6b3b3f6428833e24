"""Decides which runs a verification needs, and what their results mean.

runs                                        result
-----------------------------------------------------------------------------------------
reference and placement, unchanged          done if they are identical or within 1e-8
both in fp64                                within 1e-8: equal within rounding
both in fp64, recording values              the first elements that differ
the reference again                         differs: the script is not repeatable
smaller placements                          the smallest placement that still differs
smallest placement, without a suspect       agrees: the suspect is the cause
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.errors import LaunchError
from shardwise.launch.flags import ADOPTED
from shardwise.tools.verify import causes, placements, suspects
from shardwise.tools.verify.causes import FoundCauses, Suspect
from shardwise.tools.verify.comparing import Comparison, compare
from shardwise.tools.verify.placements import RunPlacement
from shardwise.tools.verify.records import RecordedTraining
from shardwise.tools.verify.request import VerifyRequest
from shardwise.tools.verify.runs import Run, RunFailed
from shardwise.tools.verify.verdicts import TOLERANCE, Result, TrainingVerdict

WIDE = "fp64"
VALUES = 8
"""Maximum number of tensors whose values are recorded when locating the first difference."""
LOSSES = (
    "Losses are not compared: the original calls backward on something other than the one mean "
    "that engine.step() returns (several losses, a sum, or a penalty that is added elsewhere)."
)

FP32 = 1e-6
"""Maximum relative difference that results from rounding a loss to fp32."""

NARROW_LOSSES = (
    "The losses agree only to the precision of fp32: some loss functions of torch return fp32 for "
    "fp64 scores if their targets are fp32. Gradients and states agree in fp64."
)

Make = Callable[[Run, str], RecordedTraining]
"""Executes a run, described by a few words, and returns its record. Raises RunFailed on error."""


@dataclass
class Verification:
    """Verifies a plan's placements. Executes runs with `make`, and runs the reference only once."""

    plan: VerifyRequest
    make: Make

    def __post_init__(self) -> None:
        self._references: dict[str, RecordedTraining] = {}

    def check(self) -> RecordedTraining:
        """Run the reference, and check that it trains.

        Raises LaunchError if the script completes no step, or trains without an engine or Horovod.
        """
        reference = self._reference()
        if self.plan.against is None:
            _check_driver(reference, self.plan.script.words[0])
        elif not reference.steps:
            raise LaunchError(
                f"{self.plan.against.words[0]} made no step with a torch optimizer, so there is "
                "nothing to compare with."
            )
        return reference

    def judge(self, placement: RunPlacement) -> Result:
        """Compare the run under `placement` with the reference, and explain any difference."""
        reference = self._reference()
        own = self._run(placement, str(placement))
        _check_driver(own, self.plan.script.words[0])
        result = self._result(placement, TrainingVerdict.BITS, reference, own)
        if self._only_losses(result.own):
            result = replace(result, own=result.own.without_losses, note=LOSSES)
        if result.own.same_bits:
            return result
        if result.own.within(TOLERANCE):
            return replace(result, verdict=TrainingVerdict.ROUNDING)
        # In fp64, rounding errors are about 1e-16, so a difference above the tolerance must have a
        # different cause.
        try:
            wide_reference = self._reference(wide=True)
            wide = self._run(_in_fp64(placement), f"{placement} in fp64")
        except RunFailed as error:
            # Without fp64 runs, nothing is proved. Differences of losses and norms up to 1e-3 may
            # be rounding. Larger ones count as differences.
            steps = result.own.steps
            figures = (max(each.loss, each.grad_norm, each.weight, each.skipped) for each in steps)
            is_near = result.own.same_counts and max(figures, default=0.0) <= 1e-3
            verdict = TrainingVerdict.UNPROVED if is_near else TrainingVerdict.DIFFERS
            return replace(result, verdict=verdict, why=str(error))
        compared = compare(wide_reference, wide)
        if self._only_losses(compared):
            compared = compared.without_losses
            result = replace(result, own=result.own.without_losses, note=LOSSES)
        elif compared.rounds_losses(TOLERANCE, FP32):
            compared = compared.without_losses
            result = replace(result, note=NARROW_LOSSES)
        if compared.within(TOLERANCE):
            return replace(result, verdict=TrainingVerdict.ROUNDING, wide=compared)
        result = self._with_values(replace(result, verdict=TrainingVerdict.DIFFERS, wide=compared))
        return self._explain(result, wide_reference, wide) if self.plan.causes else result

    def _only_losses(self, compared: Comparison) -> bool:
        """Return whether everything but the loss agrees with the original script."""
        # Hooks on the original script see the argument of the backward call, which may differ from
        # the loss that the user means.
        if self.plan.against is None or compared.within(TOLERANCE):
            return False
        return compared.without_losses.within(TOLERANCE)

    def _result(
        self,
        placement: RunPlacement,
        verdict: TrainingVerdict,
        reference: RecordedTraining,
        own: RecordedTraining,
    ) -> Result:
        losses = tuple([step.loss for step in each.engines[0][1:]] for each in (reference, own))
        return Result(
            placement=placement,
            verdict=verdict,
            own=compare(reference, own),
            losses=(losses[0], losses[1]),
            steps=min(reference.steps, own.steps),
        )

    def _with_values(self, result: Result) -> Result:
        """Return a copy of `result` with the values of the first tensors that differ."""
        # Runs of large models record only fingerprints, which cannot locate an element. So repeat
        # both runs up to that step, and record the values of the tensors that differ. Use fp64,
        # because the verdict is based on the fp64 runs.
        assert result.wide is not None
        first = result.wide.first(TOLERANCE)
        names = [] if first is None else [t.name for t in first.beyond(TOLERANCE) if not t.exact]
        if first is None or not names:
            return result
        steps, names = max(first.number, 1), names[:VALUES]
        runs = [
            self._run(placement, words, steps, against=against, values=names)
            for placement, words, against in (
                (self._alone(), "values of the reference", True),
                (_in_fp64(result.placement), f"values of {result.placement}", False),
            )
        ]
        by_key = {
            (each.kind, each.name): each
            for step in compare(runs[0], runs[1], steps=steps).steps
            if (step.engine, step.number) == (first.engine, first.number)
            for each in step.tensors
            if each.exact
        }
        exact = replace(first, tensors=[by_key.get((t.kind, t.name), t) for t in first.tensors])
        several = [exact if step is first else step for step in result.wide.steps]
        return replace(result, wide=replace(result.wide, steps=several))

    # -- why --------------------------------------------------------------------------------

    def _explain(
        self, result: Result, reference: RecordedTraining, wide: RecordedTraining
    ) -> Result:
        """Return a copy of `result` with the smallest placement that differs, and the cause."""
        if (found_causes := self._find_noise(reference)) is not None:
            return replace(result, found=found_causes)
        assert result.wide is not None
        first = result.wide.first(TOLERANCE)
        # Run one more step than the first that differs, because a state may differ one step before
        # the loss does.
        steps = min(max(first.number if first is not None else 1, 1) + 1, self.plan.steps)
        # Keep the records of all placements that were tried, so that the smallest one need not run
        # again.
        trainings = {str(result.placement): wide}

        def differs(placement: RunPlacement) -> bool:
            try:
                training = self._run(_in_fp64(placement), f"smaller: {placement}", steps=steps)
            except RunFailed:  # a smaller placement may not run at all, so skip it
                return False
            trainings[str(placement)] = training
            return not compare(reference, training, steps=steps).within(TOLERANCE)

        smallest = placements.find_smallest(result.placement, differs)
        found_causes = self._cause(smallest, reference, trainings[str(smallest)], steps)
        return replace(result, smallest=smallest, found=found_causes)

    def _find_noise(self, reference: RecordedTraining) -> FoundCauses | None:
        """Return why two runs of the reference differ, or None if they agree."""

        def same(
            words: str, before: RecordedTraining | None, **more: Any
        ) -> tuple[bool, RecordedTraining]:
            # Use the other warm process, which has a different hash seed, so that the iteration
            # order of sets differs too.
            server = int(before is not None)
            training = self._run(self._alone(), words, against=True, server=server, **more)
            return before is not None and compare(before, training).within(TOLERANCE), training

        # If two runs of the reference differ, a difference between placements may be noise.
        if same("the reference again", reference)[0]:
            return None
        for suspect, words, more in (
            (causes.UNSEEDED, "with --seed 0", {"settings": {"seed": "0"}}),
            (causes.SETS, "with PYTHONHASHSEED=0", {"environ": {"PYTHONHASHSEED": "0"}}),
        ):
            # The original script of --against may not call sw.init, which sets the seed.
            if suspect is causes.UNSEEDED and self.plan.against is not None:
                continue
            _, one = same(f"the reference {words}", None, **more)
            if same(f"the reference {words}, again", one, **more)[0]:
                return FoundCauses([suspect])
        return FoundCauses([causes.NOT_REPEATABLE])

    def _cause(
        self,
        smallest: RunPlacement,
        reference: RecordedTraining,
        other: RecordedTraining,
        steps: int,
    ) -> FoundCauses:
        """Find the suspects whose removal eliminates the difference on the smallest placement."""
        compared = compare(reference, other, steps=steps)
        size = smallest.size or self.plan.max_size
        tried = suspects.list_suspects(reference, other, compared, TOLERANCE, size)

        def agrees(several: Sequence[Suspect]) -> bool:
            # Merge the alterations, to remove all of these suspects in the same run.
            alter: dict[str, Any] = {}
            settings: dict[str, str] = {}
            for each in several:
                alter |= each.alter
                settings |= each.settings
            both = {k: v for each in several if each.in_reference for k, v in each.alter.items()}
            words = "without " + " and ".join(each.name for each in several)
            try:
                base = reference
                if both:
                    base = self._run(
                        self._alone(), f"the reference {words}", steps, both, against=True
                    )
                spread = _in_fp64(smallest).with_settings(**settings)
                training = self._run(spread, f"{smallest} {words}", steps, alter)
            except RunFailed:
                return False
            # Do not compare weights and step counts, because some alterations change them (for
            # example by giving a worker more rows).
            seen = compare(base, training, steps=steps)
            if self.plan.against is not None:  # the original's recorded losses are not reliable
                seen = seen.without_losses
            return seen.trains_the_same(TOLERANCE)

        # If only the weight differs, each worker trained on the full batch.
        if compared.trains_the_same(TOLERANCE) and compared.same_counts:
            return FoundCauses([causes.UNSHARED])
        hint = clue(compared, other, against=self.plan.against is not None)
        return causes.find(tried, agrees, hint)

    # -- runs -------------------------------------------------------------------------------

    def _alone(self) -> RunPlacement | None:
        reference = self.plan.reference
        return None if reference is None else _in_fp64(reference)

    def _reference(self, *, wide: bool = False) -> RecordedTraining:
        key = WIDE if wide else "own"
        # Run the reference only once, because every comparison needs the same run.
        if key not in self._references:
            placement = self._alone() if wide else self.plan.reference
            words = "the reference in fp64" if wide else "the reference"
            precision = WIDE if wide else self.plan.precision
            self._references[key] = self._run(placement, words, against=True, precision=precision)
        return self._references[key]

    def _run(
        self,
        placement: RunPlacement | None,
        words: str,
        steps: int | None = None,
        alter: Mapping[str, Any] | None = None,
        *,
        against: bool = False,
        values: Sequence[str] | None = None,
        settings: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
        precision: str = WIDE,
        server: int = 0,
    ) -> RecordedTraining:
        script = self.plan.script
        if against and self.plan.against is not None:
            script, placement = self.plan.against, None
        if placement is not None:
            placement = placement.with_settings(**(settings or {}))
            # Under a launcher, the placement's flags set the precision. Otherwise the recorder
            # casts the model to `precision`.
            precision = placement.settings.get("precision", "fp32")
        run = Run(
            script=script,
            placement=placement,
            steps=steps or self.plan.steps,
            alter=alter or {},
            values=values,
            environ=environ or {},
            precision=precision,
            max_size=self.plan.max_size,
            server=server if against else 1,
        )
        return self.make(run, words)


def _in_fp64(placement: RunPlacement) -> RunPlacement:
    """Return the placement in fp64, without the settings that only apply to 16-bit training."""
    return placement.without("reduce_dtype").with_settings(precision=WIDE)


def _check_driver(training: RecordedTraining, script: str) -> None:
    """Raise LaunchError if neither an engine nor `shardwise.horovod` trains the script."""
    if training.driver in ("", "plain"):
        raise LaunchError(
            f"{script} creates no sw.Engine and no shardwise.horovod optimizer, so placements "
            f"have no effect on it. --adopt {'|'.join(ADOPTED)} runs a script of that library "
            "unchanged; for other scripts, docs/from_ddp.md shows the lines to change. To "
            f"compare a ported script with this one: shardwise verify --against {script} PORTED.py"
        )
    if not training.steps:
        raise LaunchError(
            f"{script} made no step, so there is nothing to compare. Does it call engine.step()?"
        )


_FIX_ORDER = (
    "fix the order of the data, so that both scripts take the same batches: shuffle=False, or the "
    "same generator and seed in both."
)


def clue(compared: Comparison, other: RecordedTraining, *, against: bool) -> str:
    """Return advice on where to look for a difference that no suspect explains.

    `against` is True if the reference is a different script. If so, only the user can make both
    scripts read the data in the same order.
    """
    first = compared.first(TOLERANCE)
    if first is None:
        return ""
    if not first.fed:
        return (
            f"The models are fed different numbers in step {max(first.number - 1, 0)} "
            f"({first.rows[1]} rows, and {first.rows[0]} in the reference): "
            + (_FIX_ORDER if against else "look at how the script makes its batches.")
        )
    if apart := suspects.list_differing_tensors(other):
        names = ", ".join(name for _, name in apart[: suspects.MANY])
        return f"Workers have different values of {names}: look at how forward changes them."
    if losses := other.facts.get("losses"):
        return (
            f"weight={suspects.quote_lines(other.facts, 'weight')} does not match the graphs of "
            f"the losses: {losses[0]}. Give the number of items that each loss is a mean over."
        )
    if summed := suspects.quote_lines(other.facts, "reduction sum"):
        return (
            'The models are fed the same, but the losses that reduction="sum" adds up differ in '
            f"their sum{summed}. Each must be a sum over items, divided by the same number on "
            "all workers: loss.sum() / world.sum(n), not loss.mean() * n."
        )
    if first.number and first.loss > TOLERANCE:
        return (
            "The models are fed the same and the loss differs: look in the forward and the loss "
            "for code that depends on how the batch is split (pairs of samples, or a compiled loss "
            "that is no mean over rows and needs weight=)."
        )
    return "The losses agree and the updates differ: look at the code that changes gradients."
