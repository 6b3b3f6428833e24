"""Splits the record of a step into the parts of pipeline stages, as the engine splits models."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace

from shardwise.parallel.pipeline import partition
from shardwise.tools.plan.record import StepRecord, TensorLife, UnitUse


def stage_layers(record: StepRecord, stages: int) -> list[range]:
    """Return the layers of each stage, as the engine splits them without `--stages`.

    The split minimizes the parameters of the largest stage.
    """
    starts = partition.balanced_starts([float(each.size) for each in record.layers], stages)
    starts = partition.with_trainable_stages(starts, [each.trains for each in record.layers])
    return partition.ranges_of(starts, len(record.layers))


def part_of(record: StepRecord, layers: range) -> StepRecord:
    """Return the part of `record` that runs in `layers`.

    It has their operations, their parameters, and the tensors that they make or receive from
    another stage.
    """
    if layers not in record.parts:
        record.parts[layers] = _part(record, layers)
    return record.parts[layers]


def _part(record: StepRecord, layers: range) -> StepRecord:
    here = [n for n, each in enumerate(record.operations) if each.layer in layers]
    cut = _Cut(record, layers, here)
    tensors = (cut.life(each) for each in record.tensors)
    uses = (cut.use(each) for each in record.uses)
    return replace(
        record,
        operations=tuple(record.operations[n] for n in here),
        tensors=tuple(each for each in tensors if each is not None),
        uses=tuple(each for each in uses if each is not None),
        parameters=tuple(
            replace(each, arrived=cut.before(each.arrived))
            for each in record.parameters
            if each.layer in layers
        ),
        backward=bisect_left(here, record.backward),
        # The record does not know the layers of buffers. They are small: count them on the first
        # stage.
        buffer_bytes=record.buffer_bytes if 0 in layers else 0,
    )


class _Cut:
    """Maps numbers of operations in a record to numbers in one stage, `here`."""

    def __init__(self, record: StepRecord, layers: range, here: Sequence[int]) -> None:
        self._record, self._layers, self._here = record, layers, here

    def before(self, number: int) -> int:
        """Return the last operation of the stage up to `number`, or -1 before its first."""
        return bisect_right(self._here, number) - 1

    def _runs(self, number: int) -> bool:
        operations = self._record.operations
        return 0 <= number < len(operations) and operations[number].layer in self._layers

    def life(self, each: TensorLife) -> TensorLife | None:
        """Return the tensor as this stage holds it, or None if it never does.

        A tensor from another stage exists from the first operation here after it was made.
        """
        # A stage holds a tensor that it makes (and sends), or that it uses last (after receiving
        # it).
        is_born_here, is_last_used_here = self._runs(each.born), self._runs(each.died)
        if not is_born_here and not is_last_used_here:
            return None
        born = -1 if each.born < 0 else bisect_left(self._here, each.born)
        died = self.before(each.died)
        # It is born and dies between two operations of this stage.
        if died < born:
            return None
        start = bisect_left(self._here, self._record.backward)
        return replace(each, born=born, died=died, saved=born < start <= died)

    def use(self, each: UnitUse) -> UnitUse | None:
        """Return the run of a unit in this stage, or None if it runs elsewhere."""
        if not self._runs(each.first):
            return None
        return replace(each, first=bisect_left(self._here, each.first), end=self.before(each.end))
