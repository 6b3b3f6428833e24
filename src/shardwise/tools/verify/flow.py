"""A verification: which runs are made, one after the other, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.errors import LaunchError
from shardwise.launch.flags import ADOPTED
from shardwise.tools.verify import causes, placements, suspects
from shardwise.tools.verify.causes import Found, Suspect
from shardwise.tools.verify.comparing import Comparison, compare
from shardwise.tools.verify.placements import Placement
from shardwise.tools.verify.plan import Plan
from shardwise.tools.verify.records import Training
from shardwise.tools.verify.runs import Run, RunFailed
from shardwise.tools.verify.verdicts import TOLERANCE, Result, Verdict

WIDE = "fp64"
VALUES = 8
"""Of how many tensors the values are recorded where not all are."""
LOSSES = (
    "Losses are not compared: what backward is called on in the original is not the one mean that "
    "engine.step() returns (several losses, a sum, a penalty that is added elsewhere)."
)

Make = Callable[[Run, str], Training]
"""Makes a run that is called so in words. Raises RunFailed."""


@dataclass
class Verification:
    """The runs of a plan, made by `make`; those that are needed twice are made once."""

    plan: Plan
    make: Make

    def __post_init__(self) -> None:
        self._references: dict[str, Training] = {}
        self._why = ""

    def check(self) -> Training:
        """Make the reference, and look whether there is anything to compare.

        Raises LaunchError for a script that trains without an engine.
        """
        reference = self._reference()
        if self.plan.against is None:
            _check_driver(reference, self.plan.script.words[0])
        elif not reference.steps:
            raise LaunchError(
                f"{self.plan.against.words[0]} made no step of an optimizer of torch's, so there "
                "is nothing to compare with."
            )
        return reference

    def judge(self, placement: Placement) -> Result:
        """What one placement trains, beside the reference."""
        reference = self._reference()
        own = self._run(placement, str(placement))
        _check_driver(own, self.plan.script.words[0])
        result = self._result(placement, Verdict.BITS, reference, own)
        if self._only_losses(result.own):
            result = replace(result, own=result.own.without_losses, note=LOSSES)
        if result.own.same_bits:
            return result
        if result.own.within(TOLERANCE):
            return replace(result, verdict=Verdict.ROUNDING)
        try:
            wide_reference = self._reference(wide=True)
            wide = self._run(_wide(placement), f"{placement} in fp64")
        except RunFailed as error:
            why = str(error)
            # Losses and norms are as near as rounding may leave them.
            steps = result.own.steps
            apart = (max(each.loss, each.grad_norm, each.weight, each.skipped) for each in steps)
            if result.own.same_counts and max(apart, default=0.0) <= 1e-3:
                return replace(result, verdict=Verdict.UNPROVED, why=why)
            return replace(result, verdict=Verdict.DIFFERS, why=why)
        compared = compare(wide_reference, wide)
        if self._only_losses(compared):
            compared = compared.without_losses
            result = replace(result, own=result.own.without_losses, note=LOSSES)
        if compared.within(TOLERANCE):
            return replace(result, verdict=Verdict.ROUNDING, wide=compared)
        result = self._with_values(replace(result, verdict=Verdict.DIFFERS, wide=compared))
        return self._explained(result, wide_reference, wide) if self.plan.causes else result

    def _only_losses(self, compared: Comparison) -> bool:
        """Whether all but the loss agrees with an original, of which only hooks know it."""
        if self.plan.against is None or compared.within(TOLERANCE):
            return False
        return compared.without_losses.within(TOLERANCE)

    def _result(
        self, placement: Placement, verdict: Verdict, reference: Training, own: Training
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
        """The same with the values of the first tensors that differ, where a model is too large to
        have had all of its values recorded: both runs are made again, up to that step."""
        assert result.wide is not None
        first = result.wide.first(TOLERANCE)
        names = [] if first is None else [t.name for t in first.beyond(TOLERANCE) if not t.exact]
        if first is None or not names:
            return result
        steps, wanted = max(first.number, 1), names[:VALUES]
        runs = [
            self._run(placement, words, steps, against=against, values=wanted)
            for placement, words, against in (
                (self._alone(), "values of the reference", True),
                (_wide(result.placement), f"values of {result.placement}", False),
            )
        ]
        found = {
            (each.kind, each.name): each
            for step in compare(runs[0], runs[1], steps=steps).steps
            if (step.engine, step.number) == (first.engine, first.number)
            for each in step.tensors
            if each.exact
        }
        exact = replace(first, tensors=[found.get((t.kind, t.name), t) for t in first.tensors])
        several = [exact if step is first else step for step in result.wide.steps]
        return replace(result, wide=replace(result.wide, steps=several))

    # -- why --------------------------------------------------------------------------------

    def _explained(self, result: Result, reference: Training, wide: Training) -> Result:
        """The same with the smallest placement that differs, and why."""
        if (found := self._unrepeatable(reference)) is not None:
            return replace(result, found=found)
        assert result.wide is not None
        first = result.wide.first(TOLERANCE)
        steps = min(max(first.number if first is not None else 1, 1) + 1, self.plan.steps)
        trainings = {str(result.placement): wide}

        def differs(placement: Placement) -> bool:
            try:
                made = self._run(_wide(placement), f"smaller: {placement}", steps=steps)
            except RunFailed:
                return False
            trainings[str(placement)] = made
            return not compare(reference, made, steps=steps).within(TOLERANCE)

        smallest = placements.smallest(result.placement, differs)
        found = self._cause(smallest, reference, trainings[str(smallest)], steps)
        return replace(result, smallest=smallest, found=found)

    def _unrepeatable(self, reference: Training) -> Found | None:
        """Why a second run of the reference differs from the first; None where it does not."""

        def same(words: str, before: Training | None, **more: Any) -> tuple[bool, Training]:
            seat = int(before is not None)
            made = self._run(self._alone(), words, against=True, seat=seat, **more)
            return before is not None and compare(before, made).within(TOLERANCE), made

        if same("the reference again", reference)[0]:
            return None
        for suspect, words, more in (
            (causes.UNSEEDED, "with --seed 0", {"settings": {"seed": "0"}}),
            (causes.SETS, "with PYTHONHASHSEED=0", {"environ": {"PYTHONHASHSEED": "0"}}),
        ):
            if suspect is causes.UNSEEDED and self.plan.against is not None:
                continue
            _, one = same(f"the reference {words}", None, **more)
            if same(f"the reference {words}, again", one, **more)[0]:
                return Found([suspect])
        return Found([causes.NOT_REPEATABLE])

    def _cause(
        self, smallest: Placement, reference: Training, other: Training, steps: int
    ) -> Found:
        """What takes the difference away, tried on the smallest placement that has it."""
        compared = compare(reference, other, steps=steps)
        size = smallest.size or self.plan.most
        tried = suspects.worth_a_trial(reference, other, compared, TOLERANCE, size)

        def agrees(several: Sequence[Suspect]) -> bool:
            alter: dict[str, Any] = {}
            settings: dict[str, str] = {}
            for each in several:
                alter |= each.alter
                settings |= each.settings
            both = {k: v for each in several if each.both for k, v in each.alter.items()}
            words = "without " + " and ".join(each.name for each in several)
            try:
                base = reference
                if both:
                    base = self._run(
                        self._alone(), f"the reference {words}", steps, both, against=True
                    )
                spread = _wide(smallest).having(**settings)
                made = self._run(spread, f"{smallest} {words}", steps, alter)
            except RunFailed:
                return False
            seen = compare(base, made, steps=steps)
            if self.plan.against is not None:  # of whose losses hooks know too little
                seen = seen.without_losses
            return seen.trains_alike(TOLERANCE)

        if compared.trains_alike(TOLERANCE) and compared.same_counts:
            return Found([causes.UNSHARED])
        hint = clue(compared, other, against=self.plan.against is not None)
        return causes.find(tried, agrees, hint)

    # -- runs -------------------------------------------------------------------------------

    def _alone(self) -> Placement | None:
        reference = self.plan.reference
        return None if reference is None else _wide(reference)

    def _reference(self, *, wide: bool = False) -> Training:
        key = WIDE if wide else "own"
        if key not in self._references:
            placement = self._alone() if wide else self.plan.reference
            words = "the reference in fp64" if wide else "the reference"
            precision = WIDE if wide else self.plan.precision
            self._references[key] = self._run(placement, words, against=True, precision=precision)
        return self._references[key]

    def _run(
        self,
        placement: Placement | None,
        words: str,
        steps: int | None = None,
        alter: Mapping[str, Any] | None = None,
        *,
        against: bool = False,
        values: Sequence[str] | None = None,
        settings: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
        precision: str = WIDE,
        seat: int = 0,
    ) -> Training:
        script = self.plan.script
        if against and self.plan.against is not None:
            script, placement = self.plan.against, None
        if placement is not None:
            placement = placement.having(**(settings or {}))
            precision = placement.settings.get("precision", "fp32")
        run = Run(
            script=script,
            placement=placement,
            steps=steps or self.plan.steps,
            alter=alter or {},
            values=values,
            environ=environ or {},
            precision=precision,
            most=self.plan.most,
            seat=seat if against else 1,
        )
        return self.make(run, words)


def _wide(placement: Placement) -> Placement:
    """The same in fp64, without what is of 16 bits alone."""
    return placement.without("reduce_dtype").having(precision=WIDE)


def _check_driver(training: Training, script: str) -> None:
    """Raise LaunchError for a script that nothing of ours trains."""
    if training.driver in ("", "plain"):
        raise LaunchError(
            f"{script} makes no sw.Engine and trains with no shardwise.horovod optimizer, so no "
            f"placement changes anything about it. --adopt {'|'.join(ADOPTED)} runs a script of "
            "that library's as it is; else docs/from_ddp.md has the lines to write. To compare "
            f"a ported script with this one: shardwise verify --against {script} PORTED.py"
        )
    if not training.steps:
        raise LaunchError(
            f"{script} made no step, so there is nothing to compare: does it call engine.step()?"
        )


_FIX_ORDER = (
    "fix the order of the data, so that both scripts take the same batches: shuffle=False, or the "
    "same generator and seed in both."
)


def clue(compared: Comparison, other: Training, *, against: bool) -> str:
    """What to look at where no trial has taken the difference away; `against` an original, whose
    order of the data nobody but the user can fix."""
    first = compared.first(TOLERANCE)
    if first is None:
        return ""
    if not first.fed:
        return (
            f"The models are fed other numbers in step {max(first.number - 1, 0)} "
            f"({first.rows[1]} rows, and {first.rows[0]} in the reference): "
            + (_FIX_ORDER if against else "look at where the batches come from.")
        )
    if apart := suspects.astray(other):
        names = ", ".join(name for _, name in apart[: suspects.MANY])
        return f"Workers have other values of {names}: look at what forward writes there."
    if told := other.facts.get("losses"):
        return (
            f"weight={suspects.lines(other.facts, 'weight')} does not fit what the graphs of the "
            f"losses show: {told[0]}. Give the number of items that each loss is a mean over."
        )
    if summed := suspects.lines(other.facts, "reduction sum"):
        return (
            'The models are fed the same, and the losses that reduction="sum" adds up differ in '
            f"their sum{summed}. Each has to be a sum over items, divided by the same number on "
            "all workers: loss.sum() / world.sum(n), not loss.mean() * n."
        )
    if first.number and first.loss > TOLERANCE:
        return (
            "The models are fed the same and the loss differs: look at the forward and the loss "
            "for what depends on how the batch is cut (pairs of samples, a compiled loss that is "
            "no mean over rows: weight=)."
        )
    return "The losses agree and the update differs: look at what happens to the gradients."
