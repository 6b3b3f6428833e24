"""Compares two recorded trainings step by step. Pure arithmetic."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.tools.verify.records import Key, RecordedTraining, Step, WholeTensor

FLOOR = 1e-3
"""The smallest scale of a relative difference, as a part of the largest tensor of the same kind.

A gradient that is zero except for rounding has no meaningful relative difference. The same holds
for a loss or norm near zero, which is compared with the largest of all steps."""

COUNTED = ("model", "optimizer", "buffer", "average", "gradient")
"""The kinds of tensors that are compared. A plain attribute of a module may hold anything."""


@dataclass(frozen=True)
class TensorDifference:
    """A tensor whose bits differ.

    `relative` is the difference relative to the tensor, or to `FLOOR` if that is larger. `strays`
    are the ranks whose copy differs from the first rank's. If `exact`, the values themselves were
    compared: they differ most at element `worst`, which is `theirs` in the reference and `ours` in
    the other run.
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
    """Whether only one side has the tensor."""


@dataclass(frozen=True)
class StepDifference:
    """The differences in one step of `engine`. Number 0 is the state before the first step.

    The figures are relative differences, 0 if the bits are equal. `tensors` are in the order of the
    forward.
    """

    engine: int
    number: int
    loss: float
    grad_norm: float
    weight: float
    fed: bool
    """Whether the models were fed the same numbers."""
    rows: tuple[int, int]
    tensors: Sequence[TensorDifference]
    skipped: float = 0.0
    """Infinite if one run updated and the other skipped the step, otherwise 0."""
    samples: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Samples that only the reference trains on, and samples that only the other run trains on. A
    sample is listed once for each time that one run uses it more often."""

    @property
    def largest(self) -> float:
        """The largest difference of all figures and tensors."""
        apart = (each.relative for each in self.tensors)
        return max((self.loss, self.grad_norm, self.weight, self.skipped, *apart), default=0.0)

    def beyond(self, tolerance: float) -> list[TensorDifference]:
        """Return the tensors that differ by more than `tolerance`."""
        # `not <=` instead of `>` here and below: NaN must count as a difference.
        return [each for each in self.tensors if not each.relative <= tolerance]

    @property
    def in_training(self) -> float:
        """The largest difference without the weight, which only counts items."""
        apart = (each.relative for each in self.tensors)
        return max((self.loss, self.grad_norm, self.skipped, *apart), default=0.0)

    @property
    def same_bits(self) -> bool:
        """Whether nothing differs at all."""
        figures = (self.loss, self.grad_norm, self.weight, self.skipped)
        return not self.tensors and not any(figures)


@dataclass(frozen=True)
class Comparison:
    """All steps that both runs made. `counts` holds the two numbers of steps of each engine."""

    steps: Sequence[StepDifference]
    counts: Mapping[int, tuple[int, int]]

    @property
    def same_bits(self) -> bool:
        """Whether everything is equal to the last bit."""
        return self.same_counts and all(step.same_bits for step in self.steps)

    @property
    def same_counts(self) -> bool:
        """Whether every engine made the same number of steps in both runs."""
        return all(one == other for one, other in self.counts.values())

    @property
    def largest(self) -> float:
        """The largest difference of all steps."""
        return max((step.largest for step in self.steps), default=0.0)

    def within(self, tolerance: float) -> bool:
        """Return whether the counts are equal and nothing differs by more than `tolerance`."""
        return self.same_counts and self.largest <= tolerance

    @property
    def without_losses(self) -> Comparison:
        """The same comparison without losses and weights."""
        steps = [replace(step, loss=0.0, weight=0.0) for step in self.steps]
        return Comparison(steps, self.counts)

    def trains_the_same(self, tolerance: float) -> bool:
        """Return whether nothing differs by more than `tolerance`, except weights and counts."""
        return all(step.in_training <= tolerance for step in self.steps)

    def first(self, tolerance: float) -> StepDifference | None:
        """Return the first step that differs by more than `tolerance`."""
        return next((step for step in self.steps if not step.largest <= tolerance), None)


def compare(
    reference: RecordedTraining, other: RecordedTraining, *, steps: int | None = None
) -> Comparison:
    """Compare `other` with `reference`, over at most `steps` steps."""
    differences: list[StepDifference] = []
    counts: dict[int, tuple[int, int]] = {}
    # Hooks on torch's optimizers record less than an engine does: what only one side recorded is
    # a difference only between two engines.
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
    # By time: later differences follow from the first one.
    differences.sort(key=lambda step: (step.number, step.engine))
    return Comparison(differences, counts)


def _least(steps: Sequence[Step]) -> tuple[float, float]:
    """Return the smallest scales that losses and norms are compared with."""
    losses, norms = ([abs(getattr(step, name)) for step in steps] for name in ("loss", "grad_norm"))
    return (
        FLOOR * max(filter(math.isfinite, losses), default=0.0),
        FLOOR * max(filter(math.isfinite, norms), default=0.0),
    )


def _end(steps: int | None) -> int | None:
    return None if steps is None else steps + 1


def _renaming(reference: RecordedTraining, other: RecordedTraining, engine: int) -> dict[str, str]:
    """Map parameter names of `reference` to those in `other`, by their order in the optimizers.

    Empty if the names are the same, or if the number or shapes of the parameters differ.
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
    """Return the differences in a step. `is_complete`: engines recorded both sides."""
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
    # Sample numbers are compared only if both sides recorded them.
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
    """Return the name of a parameter, or of a state of it, in the other training."""
    if name in renamed:
        return renamed[name]
    head, _, key = name.rpartition(".")
    return f"{renamed[head]}.{key}" if head in renamed else name


def _relative(theirs: float, ours: float, least: float = 0.0, *, is_complete: bool) -> float:
    """Return the relative difference of two numbers, with `least` as the smallest scale.

    A NaN in the reference was not recorded, and counts as equal, unless the records are complete.
    """
    if theirs == ours or (math.isnan(theirs) and (math.isnan(ours) or not is_complete)):
        return 0.0
    return _ratio(abs(theirs - ours), max(abs(theirs), least, 1e-300))


def _ratio(apart: float, size: float) -> float:
    """Return `apart` / `size`, infinite if either is NaN."""
    # 0 / inf and 0 / nan must stay 0.
    ratio = apart / size if apart else 0.0
    return math.inf if math.isnan(ratio) else ratio


def _fed_the_same(theirs: Step, ours: Step) -> bool:
    """Return whether the models were fed the same numbers.

    Compares hashes first, then sums.
    """
    one, two = theirs.fed, ours.fed
    if one.elements != two.elements:
        return False
    if one.hashes == two.hashes:
        return True
    # A model may be fed the output of another one (an encoder), which differs by rounding. The sum
    # may cancel to nothing, so it is bounded by Cauchy-Schwarz: sqrt(n * sum of squares).
    scale = max(abs(one.sums[1]), 1e-300)
    return abs(one.sums[1] - two.sums[1]) <= 1e-6 * scale and abs(
        one.sums[0] - two.sums[0]
    ) <= 1e-6 * math.sqrt(scale * max(one.elements, 1))


def _tensors(
    theirs: Mapping[Key, WholeTensor], ours: Mapping[Key, WholeTensor], *, is_complete: bool
) -> Iterator[TensorDifference]:
    """Yield the tensors whose bits differ, or whose copies differ between ranks.

    If the records are complete, also yield tensors that only one side has.
    """
    floors = _floors(theirs)
    for key in theirs.keys() | ours.keys():
        kind, name = key
        # Plain attributes may be anything, such as a cache of the last batch.
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
    # A fingerprint contains a sketch of the values, which estimates the norm of the difference.
    apart = _ratio(max(one.fingerprint.distance(copy) for copy in two.copies.values()), norm)
    if one.values is None or two.values is None or one.values.shape != two.values.shape:
        return TensorDifference(kind, name, apart, strays)
    if not one.values.numel():
        return TensorDifference(kind, name, 0.0, strays)
    # Relative to the largest value, not element by element: elements near zero are only rounding.
    theirs, ours = one.values.double(), two.values.double()
    away = (theirs - ours).abs()
    # NaN in the same place of both runs is equal.
    away[theirs.isnan() & ours.isnan()] = 0.0
    worst = int(away.nan_to_num(nan=math.inf).argmax())
    largest = float(away[worst])
    relative = _ratio(largest, max(one.fingerprint.largest, floor[0], 1e-300))
    if strays:  # only the first copy has values; fingerprints cover the others
        relative = max(relative, apart)
    return TensorDifference(
        kind, name, relative, strays, True, worst, float(theirs[worst]), float(ours[worst])
    )


def _group(key: Key) -> Key:
    """Return the group of tensors of comparable size: for optimizer state, the same state."""
    kind, name = key
    return kind, name.rpartition(".")[2] if kind in ("optimizer", "buffer") else ""


def _floors(tensors: Mapping[Key, WholeTensor]) -> dict[Key, tuple[float, float]]:
    """Return `FLOOR` times the largest magnitude and the largest norm of each group."""
    floors: dict[Key, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for key, whole in tensors.items():
        largest, norm = floors[_group(key)]
        floors[_group(key)] = (
            max(largest, FLOOR * whole.fingerprint.largest),
            max(norm, FLOOR * whole.fingerprint.norm),
        )
    return floors


def _forward_key(name: str, order: Mapping[str, int]) -> tuple[int, list[str]]:
    """Return a sort key: when the module of a tensor first ran. Unused modules are last."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if (place := order.get(".".join(parts[:end]))) is not None:
            return place, natural_key(name)
    here = len(parts) == 1 and "" in order  # a parameter of the model itself
    return order[""] if here else len(order), natural_key(name)


def natural_key(name: str) -> list[str]:
    """Return a sort key that puts layer 10 after layer 9."""
    return [part.zfill(8) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def largest_by_step(comparison: Comparison) -> list[tuple[int, float]]:
    """Return the largest difference of each step, in order of steps."""
    by_step: dict[int, float] = defaultdict(float)
    for step in comparison.steps:
        by_step[step.number] = max(by_step[step.number], step.largest)
    return sorted(by_step.items())
