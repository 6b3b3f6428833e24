"""Compares two recorded runs step by step. Does no I/O."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.tools.verify.records import Key, RecordedTraining, Step, WholeTensor

FLOOR = 1e-3
"""Lower bound of the scale of relative differences, as a fraction of the largest similar value.

A tensor that is zero except for rounding has no meaningful relative difference, so its scale is at
least this fraction of the largest tensor of the same kind. Losses and norms near zero are treated
in the same way, with the largest value over all steps."""

COUNTED = ("model", "optimizer", "buffer", "average", "gradient")
"""The kinds of tensors to compare. Plain attributes of modules are excluded, because they may
contain anything."""


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is not bit-identical in both runs.

    Attributes:
        kind: Kind of tensor, such as "model" or "optimizer".
        name: Name of the tensor.
        relative: Difference relative to the size of the tensor (see FLOOR for the scale).
        strays: Ranks whose copy differs from the first rank's copy.
        exact: True if the values themselves were compared, not only their fingerprints.
        worst: Index of the element with the largest difference, if `exact`.
        theirs: Value of that element in the reference.
        ours: Value of that element in the other run.
    """

    kind: str
    name: str
    relative: float
    strays: tuple[int, ...] = ()
    exact: bool = False
    worst: int = -1
    theirs: float = math.nan
    ours: float = math.nan
    missing: bool = False
    """Whether the tensor exists in only one of the runs."""


@dataclass(frozen=True)
class StepDifference:
    """The differences in one step of `engine`. Number 0 is the state before the first step.

    `loss`, `grad_norm` and `weight` are relative differences, or 0 if the values are identical.
    `rows` are the models' input row counts in the reference and in the other run. `tensors` are
    sorted in forward order.
    """

    engine: int
    number: int
    loss: float
    grad_norm: float
    weight: float
    fed: bool
    """Whether the models received the same inputs."""
    rows: tuple[int, int]
    tensors: Sequence[TensorDifference]
    skipped: float = 0.0
    """Infinite if only one of the runs skipped the update, otherwise 0."""
    samples: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Samples on which only the reference trains, and samples on which only the other run trains.
    If both runs use a sample, but one uses it k more times, it is listed k times."""

    @property
    def largest(self) -> float:
        """The largest difference in the loss, norm, weight or any tensor."""
        apart = (each.relative for each in self.tensors)
        return max((self.loss, self.grad_norm, self.weight, self.skipped, *apart), default=0.0)

    def beyond(self, tolerance: float) -> list[TensorDifference]:
        """Return the tensors that differ by more than `tolerance`."""
        # `not <=` instead of `>`, here and below, because NaN must count as a difference.
        return [each for each in self.tensors if not each.relative <= tolerance]

    @property
    def in_training(self) -> float:
        """The largest difference, ignoring `weight`, which is only a number of items."""
        apart = (each.relative for each in self.tensors)
        return max((self.loss, self.grad_norm, self.skipped, *apart), default=0.0)

    @property
    def same_bits(self) -> bool:
        figures = (self.loss, self.grad_norm, self.weight, self.skipped)
        return not self.tensors and not any(figures)


@dataclass(frozen=True)
class Comparison:
    """The comparison of two runs, over the steps that both runs completed.

    `counts` maps each engine to its step counts in the reference and in the other run.
    """

    steps: Sequence[StepDifference]
    counts: Mapping[int, tuple[int, int]]

    @property
    def same_bits(self) -> bool:
        return self.same_counts and all(step.same_bits for step in self.steps)

    @property
    def same_counts(self) -> bool:
        """Whether every engine completed the same number of steps in both runs."""
        return all(one == other for one, other in self.counts.values())

    @property
    def largest(self) -> float:
        """The largest difference in any step."""
        return max((step.largest for step in self.steps), default=0.0)

    def within(self, tolerance: float) -> bool:
        """Return whether the step counts match and no difference exceeds `tolerance`."""
        return self.same_counts and self.largest <= tolerance

    @property
    def without_losses(self) -> Comparison:
        """A copy of this comparison in which losses and weights count as identical."""
        steps = [replace(step, loss=0.0, weight=0.0) for step in self.steps]
        return Comparison(steps, self.counts)

    def rounds_losses(self, tolerance: float, of_losses: float) -> bool:
        """Return whether only losses differ by more than `tolerance`, and by at most `of_losses`.

        If a loss were really wrong by this much, the gradients would differ as well.
        """
        return (
            not self.within(tolerance)
            and self.without_losses.within(tolerance)
            and all(step.weight <= tolerance and step.loss <= of_losses for step in self.steps)
        )

    def trains_the_same(self, tolerance: float) -> bool:
        """Return whether no difference exceeds `tolerance`, ignoring weights and step counts."""
        return all(step.in_training <= tolerance for step in self.steps)

    def first(self, tolerance: float) -> StepDifference | None:
        """Return the first step with a difference above `tolerance`, or None."""
        return next((step for step in self.steps if not step.largest <= tolerance), None)


def compare(
    reference: RecordedTraining, other: RecordedTraining, *, steps: int | None = None
) -> Comparison:
    """Compare `other` with `reference`, over at most `steps` steps (default: all)."""
    differences: list[StepDifference] = []
    counts: dict[int, tuple[int, int]] = {}
    # Hooks on torch's optimizers record less than an engine does. So a value that only one side
    # recorded counts as a difference only if engines recorded both sides.
    is_complete = reference.driver == other.driver == "engine"
    for engine in sorted(reference.engines.keys() | other.engines.keys()):
        theirs = reference.engines.get(engine, [])[: _end(steps)]
        ours = other.engines.get(engine, [])[: _end(steps)]
        counts[engine] = max(len(theirs) - 1, 0), max(len(ours) - 1, 0)
        renamed = _renaming(reference, other, engine)
        order = {name: place for place, name in enumerate(reference.order.get(engine, []))}
        least = _least(theirs)
        for one, two in zip(theirs, ours, strict=False):
            differences.append(
                _step(engine, one, two, order, renamed, least, is_complete=is_complete)
            )
    # Sort by step, because later differences result from the first one.
    differences.sort(key=lambda step: (step.number, step.engine))
    return Comparison(differences, counts)


def _least(steps: Sequence[Step]) -> tuple[float, float]:
    """Return the lower bounds of the loss scale and the norm scale."""
    losses, norms = ([abs(getattr(step, name)) for step in steps] for name in ("loss", "grad_norm"))
    return (
        FLOOR * max(filter(math.isfinite, losses), default=0.0),
        FLOOR * max(filter(math.isfinite, norms), default=0.0),
    )


def _end(steps: int | None) -> int | None:
    return None if steps is None else steps + 1


def _renaming(reference: RecordedTraining, other: RecordedTraining, engine: int) -> dict[str, str]:
    """Map the parameter names of `reference` to those of `other`, by their order in the optimizers.

    The map is empty if the names are the same, or if the number or shapes of the parameters differ.
    """
    one = [p for each in reference.parameters.get(engine, []) for p in each]
    two = [p for each in other.parameters.get(engine, []) for p in each]
    shapes = [tuple(shape) for _, shape in one], [tuple(shape) for _, shape in two]
    # A ported script often renames or wraps modules, but keeps the order of its parameters.
    if {name for name, _ in one} == {name for name, _ in two} or shapes[0] != shapes[1]:
        return {}
    return {theirs: ours for (theirs, _), (ours, _) in zip(one, two, strict=True)}


def _step(
    engine: int,
    theirs: Step,
    ours: Step,
    order: Mapping[str, int],
    renamed: Mapping[str, str],
    least: tuple[float, float],
    *,
    is_complete: bool,
) -> StepDifference:
    """Return the differences in a step.

    `is_complete` is True if engines recorded both runs. `renamed` maps the reference's parameter
    names to the other run's, and `order` maps modules to their positions in forward order. `least`
    contains the lower bounds of the scales for the loss and the norm.
    """
    before = {
        (kind, _renamed(name, renamed)): whole for (kind, name), whole in theirs.tensors.items()
    }
    tensors = sorted(
        _tensors(before, ours.tensors, is_complete=is_complete),
        key=lambda each: (_forward_key(each.name, order), each.kind),
    )
    numbers = {_renamed(name, renamed): value for name, value in theirs.numbers.items()}
    tensors += [
        TensorDifference("optimizer", name, relative, (), True, 0, value, ours.numbers[name])
        for name, value in numbers.items()
        if name in ours.numbers
        and (relative := _relative(value, ours.numbers[name], is_complete=True))
    ]
    # Compare sample indices only if both sides recorded them.
    known_samples = bool(theirs.samples and ours.samples)
    one, two = (Counter(each.samples if known_samples else ()) for each in (theirs, ours))
    return StepDifference(
        engine=engine,
        number=ours.number,
        loss=_relative(theirs.loss, ours.loss, least[0], is_complete=is_complete),
        grad_norm=_relative(theirs.grad_norm, ours.grad_norm, least[1], is_complete=is_complete),
        weight=_relative(theirs.weight, ours.weight, is_complete=is_complete),
        fed=_fed_the_same(theirs, ours),
        rows=(theirs.fed.rows, ours.fed.rows),
        tensors=tensors,
        skipped=math.inf if is_complete and theirs.skipped != ours.skipped else 0.0,
        samples=(tuple((one - two).elements()), tuple((two - one).elements())),
    )


def _renamed(name: str, renamed: Mapping[str, str]) -> str:
    """Return the other run's name of a parameter, or of an optimizer state "PARAMETER.KEY"."""
    if name in renamed:
        return renamed[name]
    head, _, key = name.rpartition(".")
    return f"{renamed[head]}.{key}" if head in renamed else name


def _relative(theirs: float, ours: float, least: float = 0.0, *, is_complete: bool) -> float:
    """Return the difference between two numbers, relative to the larger of `theirs` and `least`.

    If the records are incomplete, NaN in the reference means that the value was not recorded. The
    numbers then count as equal.
    """
    if theirs == ours or (math.isnan(theirs) and (math.isnan(ours) or not is_complete)):
        return 0.0
    return _ratio(abs(theirs - ours), max(abs(theirs), least, 1e-300))


def _ratio(apart: float, size: float) -> float:
    # 0 / inf and 0 / nan must be 0.
    ratio = apart / size if apart else 0.0
    return math.inf if math.isnan(ratio) else ratio


def _fed_the_same(theirs: Step, ours: Step) -> bool:
    """Return whether the models received the same inputs.

    Inputs are the same if their hashes match, or if their sums agree up to rounding.
    """
    one, two = theirs.fed, ours.fed
    if one.elements != two.elements:
        return False
    if one.hashes == two.hashes:
        return True
    # A model may receive the output of another model (an encoder, for example), which differs by
    # rounding. The sum itself may cancel to 0, so use its Cauchy-Schwarz bound as the scale:
    # sqrt(n * sum of squares).
    scale = max(abs(one.sums[1]), 1e-300)
    return abs(one.sums[1] - two.sums[1]) <= 1e-6 * scale and abs(
        one.sums[0] - two.sums[0]
    ) <= 1e-6 * math.sqrt(scale * max(one.elements, 1))


def _tensors(
    theirs: Mapping[Key, WholeTensor], ours: Mapping[Key, WholeTensor], *, is_complete: bool
) -> Iterator[TensorDifference]:
    """Yield the tensors that differ between the runs, or between the ranks of one run.

    If the records are complete, also yield the tensors that exist in only one of the runs.
    """
    floors = _floors(theirs)
    for key in theirs.keys() | ours.keys():
        kind, name = key
        # Plain attributes may contain anything, such as a cache of the last batch.
        if kind not in COUNTED:
            continue
        if key not in theirs or key not in ours:
            if is_complete or kind == "model":
                yield TensorDifference(kind, name, math.inf, missing=True)
            continue
        one, two = theirs[key], ours[key]
        strays = two.strays
        if one.fingerprint.same_bits(two.fingerprint) and not strays:
            continue
        yield _difference(kind, name, one, two, floors[_group(key)])


def _difference(
    kind: str, name: str, one: WholeTensor, two: WholeTensor, floor: tuple[float, float]
) -> TensorDifference:
    strays = tuple(two.strays)
    norm = max(one.fingerprint.norm, floor[1], 1e-300)
    # A fingerprint contains a random sketch of the values, which allows estimating the norm of the
    # difference.
    apart = _ratio(max(one.fingerprint.distance(copy) for copy in two.copies.values()), norm)
    if one.values is None or two.values is None or one.values.shape != two.values.shape:
        return TensorDifference(kind, name, apart, strays)
    if not one.values.numel():
        return TensorDifference(kind, name, 0.0, strays)
    # Compare relative to the largest value, because elements near zero may consist of rounding
    # errors only.
    theirs, ours = one.values.double(), two.values.double()
    away = (theirs - ours).abs()
    # NaN at the same position in both runs counts as equal.
    away[theirs.isnan() & ours.isnan()] = 0.0
    worst = int(away.nan_to_num(nan=math.inf).argmax())
    largest = float(away[worst])
    relative = _ratio(largest, max(one.fingerprint.largest, floor[0], 1e-300))
    if strays:  # only the first copy has values, so use fingerprints for the other copies
        relative = max(relative, apart)
    return TensorDifference(
        kind, name, relative, strays, True, worst, float(theirs[worst]), float(ours[worst])
    )


def _group(key: Key) -> Key:
    """Return the group whose tensors have magnitudes comparable to the tensor `key`.

    Optimizer state and buffers are grouped by the last part of their names.
    """
    kind, name = key
    return kind, name.rpartition(".")[2] if kind in ("optimizer", "buffer") else ""


def _floors(tensors: Mapping[Key, WholeTensor]) -> dict[Key, tuple[float, float]]:
    """Return FLOOR times each group's largest absolute value, and FLOOR times its largest norm."""
    floors: dict[Key, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for key, whole in tensors.items():
        largest, norm = floors[_group(key)]
        floors[_group(key)] = (
            max(largest, FLOOR * whole.fingerprint.largest),
            max(norm, FLOOR * whole.fingerprint.norm),
        )
    return floors


def _forward_key(name: str, order: Mapping[str, int]) -> tuple[int, list[str]]:
    """Return a sort key: modules in the order of their first forward pass, unused modules last."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if (place := order.get(".".join(parts[:end]))) is not None:
            return place, natural_key(name)
    here = len(parts) == 1 and "" in order  # a parameter of the model itself
    return order[""] if here else len(order), natural_key(name)


def natural_key(name: str) -> list[str]:
    """Return a sort key that compares numbers in names by value: layer 9 precedes layer 10."""
    return [part.zfill(8) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def largest_by_step(comparison: Comparison) -> list[tuple[int, float]]:
    """Return (step number, largest difference) for each step, sorted by step."""
    by_step: dict[int, float] = defaultdict(float)
    for step in comparison.steps:
        by_step[step.number] = max(by_step[step.number], step.largest)
    return sorted(by_step.items())
