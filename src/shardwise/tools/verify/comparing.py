"""Compares two trainings step by step: pure arithmetic over what was recorded."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.tools.verify.records import Key, RecordedTraining, Step, Whole

FLOOR = 1e-3
"""A tensor smaller than this part of the largest of its kind is compared with that: where a
gradient is zero but for rounding, nothing of it is alike, and nothing depends on it. So is a loss,
or a norm, that training has brought near zero, with the largest of all steps."""

COUNTED = ("model", "optimizer", "buffer", "average", "gradient")
"""The kinds of tensors that are compared; a plain attribute of a module may be anything."""


@dataclass(frozen=True)
class TensorDifference:
    """A tensor whose bits differ: relative to what is said in `FLOOR`; `strays` are ranks whose
    copy is another one than the first rank's; `exact` where the values themselves were compared,
    at element `worst` of which `theirs` and `ours` are the two."""

    kind: str
    name: str
    relative: float
    strays: tuple[int, ...] = ()
    exact: bool = False
    worst: int = -1
    theirs: float = math.nan
    ours: float = math.nan
    missing: bool = False
    """Whether only one side has it."""


@dataclass(frozen=True)
class StepDifference:
    """A step of engine `engine`; number 0 is the state before the first. Figures are relative
    differences, 0 where the bits are equal; `tensors` in the order of the forward."""

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
    """Infinite where one of the two updated and the other did not."""
    samples: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Samples of the dataset that only the reference trains on, and those that only the other one
    does; each as often as it does so more often."""

    @property
    def largest(self) -> float:
        """The largest difference of all."""
        apart = (each.relative for each in self.tensors)
        return max((self.loss, self.grad_norm, self.weight, self.skipped, *apart), default=0.0)

    def beyond(self, tolerance: float) -> list[TensorDifference]:
        """The tensors that differ by more."""
        return [each for each in self.tensors if not each.relative <= tolerance]

    @property
    def in_training(self) -> float:
        """The same without the weight: of what is trained, and not how it is counted."""
        apart = (each.relative for each in self.tensors)
        return max((self.loss, self.grad_norm, self.skipped, *apart), default=0.0)

    @property
    def same_bits(self) -> bool:
        """Whether nothing differs at all."""
        figures = (self.loss, self.grad_norm, self.weight, self.skipped)
        return not self.tensors and not any(figures)


@dataclass(frozen=True)
class Comparison:
    """All steps that both trainings made; `counts` are the numbers of steps of both, by engine."""

    steps: Sequence[StepDifference]
    counts: Mapping[int, tuple[int, int]]

    @property
    def same_bits(self) -> bool:
        """Whether all of it is equal to the last bit."""
        return self.same_counts and all(step.same_bits for step in self.steps)

    @property
    def same_counts(self) -> bool:
        """Whether both made as many steps, by engines as many."""
        return all(one == other for one, other in self.counts.values())

    @property
    def largest(self) -> float:
        """The largest difference of all."""
        return max((step.largest for step in self.steps), default=0.0)

    def within(self, tolerance: float) -> bool:
        """Whether nothing differs by more."""
        return self.same_counts and self.largest <= tolerance

    @property
    def without_losses(self) -> Comparison:
        """The same without losses and weights."""
        steps = [replace(step, loss=0.0, weight=0.0) for step in self.steps]
        return Comparison(steps, self.counts)

    def trains_alike(self, tolerance: float) -> bool:
        """Whether nothing differs by more but for the weight of the steps, and their number."""
        return all(step.in_training <= tolerance for step in self.steps)

    def first(self, tolerance: float) -> StepDifference | None:
        """The first step in which something differs by more."""
        return next((step for step in self.steps if not step.largest <= tolerance), None)


def compare(
    reference: RecordedTraining, other: RecordedTraining, *, steps: int | None = None
) -> Comparison:
    """Compare `other` with `reference`, up to `steps` steps."""
    found: list[StepDifference] = []
    counts: dict[int, tuple[int, int]] = {}
    known = reference.driver == other.driver == "engine"
    for engine in sorted(reference.engines.keys() | other.engines.keys()):
        theirs = reference.engines.get(engine, [])[: _end(steps)]
        ours = other.engines.get(engine, [])[: _end(steps)]
        counts[engine] = max(len(theirs) - 1, 0), max(len(ours) - 1, 0)
        renamed = _renaming(reference, other, engine)
        order = {name: place for place, name in enumerate(reference.order.get(engine, []))}
        least = _least(theirs)
        for one, two in zip(theirs, ours, strict=False):
            found.append(_step(engine, one, two, order, renamed, least, known=known))
    # In order of time: the first difference is nearest to the cause, later ones follow from it.
    found.sort(key=lambda step: (step.number, step.engine))
    return Comparison(found, counts)


def _least(steps: Sequence[Step]) -> tuple[float, float]:
    """What smaller losses, and smaller norms, are compared with."""
    losses, norms = ([abs(getattr(step, name)) for step in steps] for name in ("loss", "grad_norm"))
    return (
        FLOOR * max(filter(math.isfinite, losses), default=0.0),
        FLOOR * max(filter(math.isfinite, norms), default=0.0),
    )


def _end(steps: int | None) -> int | None:
    return None if steps is None else steps + 1


def _renaming(reference: RecordedTraining, other: RecordedTraining, engine: int) -> dict[str, str]:
    """What parameters of `reference` are called in `other`, by their order in the optimizers,
    where not all are called alike and there are as many, of the same shapes."""
    one = [p for each in reference.parameters.get(engine, []) for p in each]
    two = [p for each in other.parameters.get(engine, []) for p in each]
    shapes = [tuple(shape) for _, shape in one], [tuple(shape) for _, shape in two]
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
    known: bool,
) -> StepDifference:
    """The difference of a step; `known` where both sides have recorded all that an engine has."""
    before = {
        (kind, _renamed(name, renamed)): whole for (kind, name), whole in theirs.tensors.items()
    }
    tensors = sorted(
        _tensors(before, ours.tensors, known=known),
        key=lambda each: (_place(each.name, order), each.kind),
    )
    numbers = {_renamed(name, renamed): value for name, value in theirs.numbers.items()}
    tensors += [
        TensorDifference("optimizer", name, relative, (), True, 0, value, ours.numbers[name])
        for name, value in numbers.items()
        if name in ours.numbers and (relative := _relative(value, ours.numbers[name], known=True))
    ]
    # Only if both tell which samples they use.
    known_samples = bool(theirs.samples and ours.samples)
    one, two = (Counter(each.samples if known_samples else ()) for each in (theirs, ours))
    return StepDifference(
        engine=engine,
        number=ours.number,
        loss=_relative(theirs.loss, ours.loss, least[0], known=known),
        grad_norm=_relative(theirs.grad_norm, ours.grad_norm, least[1], known=known),
        weight=_relative(theirs.weight, ours.weight, known=known),
        fed=_fed_alike(theirs, ours),
        rows=(theirs.fed.rows, ours.fed.rows),
        tensors=tensors,
        skipped=math.inf if known and theirs.skipped != ours.skipped else 0.0,
        samples=(tuple((one - two).elements()), tuple((two - one).elements())),
    )


def _renamed(name: str, renamed: Mapping[str, str]) -> str:
    """The name of a parameter, or of a state of it, in the other training."""
    if name in renamed:
        return renamed[name]
    head, _, key = name.rpartition(".")
    return f"{renamed[head]}.{key}" if head in renamed else name


def _relative(theirs: float, ours: float, least: float = 0.0, *, known: bool) -> float:
    """0 for equal numbers, and where NaN of the reference says that it is not `known`; numbers
    smaller than `least` are compared with that."""
    if theirs == ours or (math.isnan(theirs) and (math.isnan(ours) or not known)):
        return 0.0
    return _ratio(abs(theirs - ours), max(abs(theirs), least, 1e-300))


def _ratio(apart: float, size: float) -> float:
    """`apart` as a part of `size`; infinite where one of them is NaN, which compares with none."""
    found = apart / size if apart else 0.0
    return math.inf if math.isnan(found) else found


def _fed_alike(theirs: Step, ours: Step) -> bool:
    """Whether the same numbers went into the models: by their hashes or, where a model is fed what
    was computed before, by their sums."""
    one, two = theirs.fed, ours.fed
    if one.elements != two.elements:
        return False
    if one.hashes == two.hashes:
        return True
    # A model may be fed the output of another one (an encoder), which differs by rounding. The
    # second bound is that of Cauchy and Schwarz: a sum may cancel to nothing.
    scale = max(abs(one.sums[1]), 1e-300)
    return abs(one.sums[1] - two.sums[1]) <= 1e-6 * scale and abs(
        one.sums[0] - two.sums[0]
    ) <= 1e-6 * math.sqrt(scale * max(one.elements, 1))


def _tensors(
    theirs: Mapping[Key, Whole], ours: Mapping[Key, Whole], *, known: bool
) -> Iterator[TensorDifference]:
    """Those whose bits differ, or of which the ranks have copies that differ; where all is `known`
    also those that only one side has."""
    floors = _floors(theirs)
    for key in theirs.keys() | ours.keys():
        kind, name = key
        if kind not in COUNTED:
            continue
        if key not in theirs or key not in ours:
            if known or kind == "model":
                yield TensorDifference(kind, name, math.inf, missing=True)
            continue
        one, two = theirs[key], ours[key]
        strays = two.strays
        if one.print.same_bits(two.print) and not strays:
            continue
        yield _difference(kind, name, one, two, floors[_group(key)])


def _difference(
    kind: str, name: str, one: Whole, two: Whole, floor: tuple[float, float]
) -> TensorDifference:
    strays = tuple(two.strays)
    norm = max(one.print.norm, floor[1], 1e-300)
    apart = _ratio(max(one.print.distance(copy) for copy in two.copies.values()), norm)
    if one.values is None or two.values is None or one.values.shape != two.values.shape:
        return TensorDifference(kind, name, apart, strays)
    if not one.values.numel():
        return TensorDifference(kind, name, 0.0, strays)
    # Of the largest value, not element by element: elements near zero are nothing but rounding.
    theirs, ours = one.values.double(), two.values.double()
    away = (theirs - ours).abs()
    away[theirs.isnan() & ours.isnan()] = 0.0
    worst = int(away.nan_to_num(nan=math.inf).argmax())
    largest = float(away[worst])
    relative = _ratio(largest, max(one.print.largest, floor[0], 1e-300))
    if strays:  # the values are those of the first copy
        relative = max(relative, apart)
    return TensorDifference(
        kind, name, relative, strays, True, worst, float(theirs[worst]), float(ours[worst])
    )


def _group(key: Key) -> Key:
    """The tensors that one is compared with in size: of the optimizer, those of the same state."""
    kind, name = key
    return kind, name.rpartition(".")[2] if kind in ("optimizer", "buffer") else ""


def _floors(tensors: Mapping[Key, Whole]) -> dict[Key, tuple[float, float]]:
    """By group, `FLOOR` of the largest magnitude and of the largest norm."""
    found: dict[Key, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for key, whole in tensors.items():
        largest, norm = found[_group(key)]
        found[_group(key)] = (
            max(largest, FLOOR * whole.print.largest),
            max(norm, FLOOR * whole.print.norm),
        )
    return found


def _place(name: str, order: Mapping[str, int]) -> tuple[int, list[str]]:
    """When the module that has a tensor first ran; those that never did come last."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if (place := order.get(".".join(parts[:end]))) is not None:
            return place, natural(name)
    here = len(parts) == 1 and "" in order  # a parameter of the model itself
    return order[""] if here else len(order), natural(name)


def natural(name: str) -> list[str]:
    """What names sort by, so that layer 10 comes after layer 9."""
    return [part.zfill(8) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def growth(comparison: Comparison) -> list[tuple[int, float]]:
    """The largest difference of each step, from the first on."""
    by_step: dict[int, float] = defaultdict(float)
    for step in comparison.steps:
        by_step[step.number] = max(by_step[step.number], step.largest)
    return sorted(by_step.items())
