"""Splits a step's record into one part per pipeline stage, as the engine splits models."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace

from shardwise.parallel.pipeline import partition
from shardwise.tools.plan.record import StepRecord, TensorLife, UnitUse


def stage_layers(record: StepRecord, stages: int) -> list[range]:
    """Return the range of layers of each stage, as the engine splits them without `--stages`.

    The split minimises the number of parameters in the largest stage.
    """
    starts = partition.balanced_starts([float(each.size) for each in record.layers], stages)
    starts = partition.with_trainable_stages(starts, [each.trains for each in record.layers])
    return partition.ranges_of(starts, len(record.layers))


def part_of(record: StepRecord, layers: range) -> StepRecord:
    """Return the part of `record` that runs in `layers`.

    It contains the operations and parameters of these layers, and the tensors that they create or
    receive from another stage.
    """
    if layers not in record.parts:
        record.parts[layers] = _part(record, layers)
    return record.parts[layers]


def _part(record: StepRecord, layers: range) -> StepRecord:
    here = [n for n, each in enumerate(record.operations) if each.layer in layers]
    cut = _Cut(record, layers, here)
    tensors = (cut.life(each) for each in record.tensors)
    uses = tuple(use for each in record.uses if (use := cut.use(each)) is not None)
    units = {use.unit for use in uses}
    # Exchanges outside units count on the first stage.
    if 0 in layers:
        units.add(-1)
    return replace(
        record,
        operations=tuple(record.operations[n] for n in here),
        tensors=tuple(each for each in tensors if each is not None),
        uses=uses,
        exchanged=tuple(each for each in record.exchanged if each.unit in units),
        parameters=tuple(
            replace(each, arrived=cut.before(each.arrived))
            for each in record.parameters
            if each.layer in layers
        ),
        backward=bisect_left(here, record.backward),
        # The record does not assign buffers to layers. They are small, so count all of them on the
        # first stage.
        buffer_bytes=record.buffer_bytes if 0 in layers else 0,
    )


class _Cut:
    """Maps operation numbers of the full record to operation numbers of one stage.

    `here` lists the stage's operations by their number in the full record.
    """

    def __init__(self, record: StepRecord, layers: range, here: Sequence[int]) -> None:
        self._record, self._layers, self._here = record, layers, here

    def before(self, number: int) -> int:
        """Return the stage's last operation up to `number`, or -1 if there is none."""
        return bisect_right(self._here, number) - 1

    def _runs(self, number: int) -> bool:
        operations = self._record.operations
        return 0 <= number < len(operations) and operations[number].layer in self._layers

    def life(self, each: TensorLife) -> TensorLife | None:
        """Return the lifetime of a tensor on this stage, or None if the stage never holds it.

        A tensor from another stage exists from this stage's first operation after its creation.
        """
        # A stage holds the tensors that it creates (and may send), and those that it uses last
        # (after receiving them).
        is_born_here, is_last_used_here = self._runs(each.born), self._runs(each.died)
        if not is_born_here and not is_last_used_here:
            return None
        born = -1 if each.born < 0 else bisect_left(self._here, each.born)
        died = self.before(each.died)
        # The tensor is created and freed between two operations of this stage.
        if died < born:
            return None
        start = bisect_left(self._here, self._record.backward)
        return replace(each, born=born, died=died, saved=born < start <= died)

    def use(self, each: UnitUse) -> UnitUse | None:
        """Return a unit's pass on this stage, or None if it runs on another stage."""
        if not self._runs(each.first):
            return None
        return replace(each, first=bisect_left(self._here, each.first), end=self.before(each.end))
