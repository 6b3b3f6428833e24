"""Copies another rank's sharded states, so that the run can continue if that rank is lost.

With `--survive` and sharded optimizer state, each rank also stores the masters and optimizer state
of another rank, its *owner*, and applies the same updates to them. If parameters are sharded too,
it also stores the owner's intervals of the parameters. On one host, the owner of rank r is rank
r - 1:

    rank       0          1          2
    owns       interval 0 interval 1 interval 2
    copies     interval 2 interval 0 interval 1

On several hosts, the owner is on another host (`copied_places`), because all ranks of a host may be
lost together.

In every step each rank sends the reduced gradient of its interval to its copy's rank in fp32, which
takes 4 bytes for each parameter of the interval. Both ranks run the same code on the same numbers,
so a copy is bit-identical to its original. After a loss, `HeldGather` gathers the states from the
remaining ranks for a new layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm import Collectives, copied_places, holders
from shardwise.layout.bucket_layout import Bucket, Span
from shardwise.states.gradients.bucket import GradientBucket
from shardwise.states.optimizer.interval_gather import IntervalGather
from shardwise.states.optimizer.optimizer_options import ParameterGroup
from shardwise.states.optimizer.optimizer_state import OptimizerState
from shardwise.states.optimizer.update_interval import UpdatedTensor
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.shard_groups import ShardGroups
from shardwise.states.storage.storage import MemoryStorage, Storage
from shardwise.states.storage.storage_factory import StorageFactory


class _CopiedParameters:
    """The owner's intervals of the parameters."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.named = parameters.named
        self.buckets = parameters.buckets
        self.kind = parameters.kind
        self.wide = parameters.wide_copies

    def part(self, index: int, own: Span) -> Storage:
        """Return the elements `own` of bucket `index`."""
        if self.parameters.second_copies:
            return MemoryStorage(self.parameters.second_copies[index])
        # This rank holds replicated parameters in full. It updates the owner's interval of them
        # itself, before the all-gather, which would overwrite the interval with the same values.
        return self.parameters.part(index, own)


@dataclass
class _CopiedGradient:
    """The reduced gradient of the owner's interval (`own`) of a bucket."""

    own: Span
    reduced: Storage


@dataclass(frozen=True)
class Pairing:
    """Which rank holds the second copy of which other rank, in a group that shards buckets.

    Args:
        members: The ranks of the run that shard the buckets.
        places: For each of the members, the index of the member that holds its copy.
        owner: The index of the member whose copies this rank holds.
    """

    members: tuple[int, ...]
    places: list[int]
    owner: int

    @staticmethod
    def of(group: Collectives) -> Pairing:
        """Return the pairing of the present ranks of `group`."""
        places = copied_places(group)
        return Pairing(tuple(group.places), places, places.index(group.rank))

    def holders(self, left: Sequence[int]) -> list[int]:
        """Return the index in `left` of the rank that sends each member's interval.

        Raises CollectiveError if a member and the holder of its copy are both lost.
        """
        return holders(self.members, left, self.places)


class SecondCopies:
    """A copy of another rank's optimizer state, masters and sharded parameters.

    Args:
        parameters: The parameters in buckets.
        groups: The user's parameter group of each bucket.
        gradients: The gradients of each bucket.
        factory: Creates the storage of masters.
        known: See `OptimizerState`.
        shards: The ranks that shard each bucket.
    """

    def __init__(
        self,
        parameters: Parameters,
        groups: Sequence[ParameterGroup],
        gradients: Sequence[GradientBucket],
        factory: StorageFactory,
        known: dict[nn.Parameter, Tensor],
        shards: ShardGroups,
    ) -> None:
        self._buckets = parameters.buckets
        self._shards = shards
        self.pairings = {axis: Pairing.of(group) for axis, group in shards.by_axis.items()}
        self._kept: dict[int, Tensor] = {}
        """The owner's intervals of replicated parameters, while an all-gather may spoil them."""
        self._gradients = []
        for bucket, gradient in zip(parameters.buckets, gradients, strict=True):
            first, end = bucket.interval(self.pairing(bucket).owner)
            zeros = gradient.reduced.loaded().new_zeros(end - first)
            self._gradients.append(_CopiedGradient((first, end), MemoryStorage(zeros)))
        self._parameters = _CopiedParameters(parameters)
        self.frozen = parameters.second_copies[len(parameters.buckets) :]
        """The owner's interval of each bucket of frozen parameters."""
        self.optimizer = OptimizerState(
            self._parameters,
            groups,
            self._gradients,
            factory,
            by_spans=False,
            quantised=False,
            sends=not parameters.second_copies,
            known=known,
            is_copy=True,
        )

    def pairing(self, bucket: Bucket) -> Pairing:
        """Return the pairing of the ranks that shard `bucket`."""
        return self.pairings[bucket.axis]

    @property
    def state_bytes(self) -> int:
        """Size of the copies in bytes, once the optimizer has created all of its state."""
        intervals = self.optimizer.intervals
        states = sum(self.optimizer.expected_bytes(index) for index in range(len(intervals)))
        held = sum(each.nbytes for each in self._parameters.parameters.second_copies)
        return states + held + sum(each.reduced.nbytes for each in self._gradients)

    def receive(self, gradients: Sequence[GradientBucket]) -> None:
        """Receive the owner's reduced gradients, and send this rank's to its copy. Collective.

        Args:
            gradients: The gradients of each bucket, whose sums are complete.
        """
        pairs = []
        for bucket, gradient, copied in zip(self._buckets, gradients, self._gradients, strict=True):
            mine = gradient.reduced.loaded()
            if copied.reduced.dtype != mine.dtype:  # all ranks widen their sums at the same step
                copied.reduced = MemoryStorage(copied.reduced.loaded().to(mine.dtype))
            pairs.append((bucket, mine, copied.reduced.loaded()))
        self._pass_on(pairs)

    def _pass_on(self, pairs: Iterable[tuple[Bucket, Tensor, Tensor]]) -> None:
        """Send intervals to the rank that copies them, and receive the owner's. Collective.

        Each of `pairs` holds a bucket, this rank's interval, and memory for the owner's interval.
        """
        handles = []
        for bucket, mine, copied in pairs:
            group, places = self._shards.of(bucket), self.pairing(bucket).places
            counts = [
                [_length(bucket, rank) if to == places[rank] else 0 for to in range(group.size)]
                for rank in range(group.size)
            ]
            handles.append(group.all_to_all(mine, counts, copied))
        for handle in handles:
            handle.wait()
        # The update multiplies the sums in place, so wait until the copy's rank has read them.
        for handle in handles:
            handle.reusable()

    def update(self, index: int, used: Sequence[bool], factor: float) -> None:
        """Apply the same update as the owner's inner optimizer `index`.

        For the other arguments, see `InnerOptimizer.step`.
        """
        inner = self.optimizer.inners[index]
        inner.step(used, factor)
        for number in inner.buckets:
            interval, bucket = self.optimizer.intervals[number], self._buckets[number]
            is_replicated = not self._parameters.parameters.second_copies
            # The masters, if there are any, are not in memory that the all-gather writes to.
            if is_replicated and not interval.has_master and self._shards.of(bucket).spoils_buffers:
                self._kept[number] = interval.target.loaded().clone()

    def published(self) -> None:
        """Note that all parameters are complete, so `restore` need not change them."""
        self._kept.clear()

    def restore(self) -> None:
        """Restore the owner's parameters after an all-gather was interrupted.

        This rank may hold the only values, because the owner was lost.
        """
        for number, values in self._kept.items():
            self.optimizer.intervals[number].target.loaded().copy_(values)
        self._kept.clear()

    def held_rank(self, index: int) -> int | None:
        """Return the rank whose elements of bucket `index` have the same bits here after an update.

        Return None if an optimizer might compute other bits here: one that is not torch's may draw
        random numbers, and products of matrices depend on the number of threads.
        """
        kind = self.optimizer.groups[index].kind
        certain = kind.known and kind.elementwise
        return self.pairing(self._buckets[index]).owner if certain else None

    def renew(self, optimizer: OptimizerState) -> None:
        """Copy the owner's parameters and masters again, after user code wrote to them. Collective.

        Args:
            optimizer: This rank's optimizer state.
        """
        pairs = []
        for own, copied in zip(optimizer.intervals, self.optimizer.intervals, strict=True):
            pairs.append((own.bucket, own.target.loaded(), copied.target.loaded()))
            if own.has_master:
                pairs.append((own.bucket, own.master.loaded(), copied.master.loaded()))
        for bucket, copy in zip(self._parameters.parameters.frozen, self.frozen, strict=True):
            pairs.append((bucket.layout, bucket.storage.loaded(), copy))
        self._pass_on(pairs)

    def take_in_writes(self, written: set[int]) -> None:
        """Update the copies of replicated parameters that all ranks have changed identically.

        Args:
            written: Indices of these parameters. Their masters are replaced.
        """
        self.optimizer.refresh_masters(written)


class _Held:
    """This rank's optimizer state and its copy of the owner's, if any, presented as one state."""

    def __init__(self, buckets: Sequence[Bucket], states: Sequence[OptimizerState]) -> None:
        self._buckets = buckets
        self._states, own = states, states[0]
        self.groups, self.intervals = own.groups, own.intervals
        self.is_flat = own.is_flat

    def state_of(self, index: int) -> list[tuple[UpdatedTensor, dict[str, Any]]]:
        """Return the segments of bucket `index` that have state here, each with its state."""
        return [each for state in self._states for each in state.state_of(index)]

    def whole(self, index: int, key: str, dtype: torch.dtype) -> Tensor:
        """Return state entry `key` in a full bucket. Elements not on this rank are zero."""
        return self._joined(index, [state.whole(index, key, dtype) for state in self._states])

    def master(self, index: int) -> Tensor:
        """Return the masters in a full bucket. Elements not on this rank are zero."""
        parts = [state.intervals[index].master.loaded() for state in self._states]
        return self._joined(index, parts)

    def _joined(self, index: int, parts: Sequence[Tensor]) -> Tensor:
        flat = parts[0].new_zeros(self._buckets[index].numel)
        for state, part in zip(self._states, parts, strict=True):
            first, end = state.intervals[index].own
            flat[first:end] = part
        return flat


class HeldGather(IntervalGather):
    """Gathers the states from the remaining ranks after a loss.

    Each interval is sent by its owner or, if the owner was lost, by the rank with the second copy.

    Args:
        parameters: The parameters in buckets.
        optimizer: This rank's optimizer state.
        copies: This rank's copy of its owner's state, or None if this rank holds all states.
        shards: The remaining ranks that share each bucket.

    Raises:
        CollectiveError: If a rank and the rank that stored its copy are both lost.
    """

    def __init__(
        self,
        parameters: Parameters,
        optimizer: OptimizerState,
        copies: SecondCopies | None,
        shards: ShardGroups,
    ) -> None:
        states = [optimizer] if copies is None else [optimizer, copies.optimizer]
        held = _Held(parameters.buckets, states)
        super().__init__(parameters, held, shards, scattered=copies is not None)
        self._held = held
        self._copies = copies
        self._holders: dict[str, list[int]] = {}
        """For each axis of buckets, the rank that sends each former rank's interval."""
        if copies is not None:
            for axis, group in shards.by_axis.items():
                self._holders[axis] = copies.pairings[axis].holders(group.places)

    def masters(self) -> dict[nn.Parameter, Tensor]:
        return self.tensors(self._held.master(i) for i in range(len(self._parameters.buckets)))

    def frozen(self) -> dict[nn.Parameter, Tensor]:
        """Return the full values of sharded parameters that are not trained."""
        values: dict[nn.Parameter, Tensor] = {}
        for number, bucket in enumerate(self._parameters.frozen):
            numel, dtype, device = bucket.kind
            flat = torch.zeros(numel, dtype=dtype, device=device)
            bucket.load(flat)
            if self._copies is not None:
                first, end = bucket.layout.interval(self._copies.pairing(bucket.layout).owner)
                flat[first:end] = self._copies.frozen[number]
            views = bucket.views(self._spread(bucket.layout, flat))
            values |= dict(zip(bucket.parameters, views, strict=True))
        return values

    def _gathered(self, index: int, part: Tensor) -> Tensor:
        return self._spread(self._parameters.buckets[index], part)

    def _spread(self, bucket: Bucket, flat: Tensor) -> Tensor:
        """Broadcast each interval of a full bucket from the rank that holds it. Return `flat`."""
        for former, holder in enumerate(self._holders.get(bucket.axis, ())):
            first, end = bucket.interval(former)
            if first < end:
                self._groups.of(bucket).broadcast(flat[first:end], holder).reusable()
        return flat


def _length(bucket: Bucket, rank: int) -> int:
    first, end = bucket.interval(rank)
    return end - first
