"""Gathers every rank's intervals into full tensors, for a new layout and for state_dict()."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.comm import Collectives
from shardwise.layout.bucket_layout import Bucket, Span
from shardwise.states.optimizer.optimizer_kind import placed
from shardwise.states.optimizer.optimizer_options import ParameterGroup
from shardwise.states.optimizer.update_interval import BucketUpdate, UpdatedTensor
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.shard_groups import ShardGroups
from shardwise.tiers.copy_stream import to_host


def gather_bucket(bucket: Bucket, own: Span, interval: Tensor, group: Collectives | None) -> Tensor:
    """Gather a full bucket of shape (bucket.numel,) from the intervals of the ranks in `group`.

    If `group` is None, `interval` is already the full bucket.
    """
    flat = interval.new_zeros(bucket.numel)
    flat[own[0] : own[1]] = interval
    if group is not None:
        group.all_gather(flat, bucket.cuts).wait()
    return flat


class GatheredState(Protocol):
    """The optimizer state that a rank contributes to a gather. See `OptimizerState`."""

    groups: Sequence[ParameterGroup]
    intervals: list[BucketUpdate]

    def state_of(self, index: int, /) -> list[tuple[UpdatedTensor, dict[str, Any]]]: ...
    def is_flat(self, index: int, segment: UpdatedTensor, key: str, value: Any, /) -> bool: ...
    def whole(self, index: int, key: str, dtype: torch.dtype, /) -> Tensor: ...


class IntervalGather:
    """Gathers masters and optimizer state from the ranks' intervals. All methods are collective."""

    def __init__(
        self,
        parameters: Parameters,
        optimizer: GatheredState,
        groups: ShardGroups,
        *,
        scattered: bool,
        share_split_keys: Callable[[], None] | None = None,
    ) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._groups = groups
        self._scattered = scattered
        self._share_split_keys = share_split_keys

    def tensors(self, parts: Iterable[Tensor]) -> dict[nn.Parameter, Tensor]:
        """Return the full tensor of each parameter, gathered from every rank's `parts`.

        `parts` holds this rank's interval of each bucket.
        """
        return {
            parameter: whole
            for index, part in enumerate(parts)
            for parameter, whole in self._bucket(index, part).items()
        }

    def _bucket(self, index: int, part: Tensor) -> dict[nn.Parameter, Tensor]:
        bucket = self._parameters.buckets[index]
        # Gather on the device that computes, because the transport can send its memory. A master
        # may be on the host or on a disk.
        _, device = self._parameters.kind(index)
        flat = self._gathered(index, part.to(device))
        tensors = {}
        for slot in bucket.slots:
            named = self._parameters.named[slot.parameter]
            view = named.view(flat, slot.start)
            # Copy, because a view would keep the full bucket alive.
            tensors[named.parameter] = view.clone(memory_format=torch.preserve_format)
        return tensors

    def _gathered(self, index: int, part: Tensor) -> Tensor:
        """Return the full bucket, (bucket.numel,), gathered from every rank's `part`."""
        bucket = self._parameters.buckets[index]
        group = self._groups.of(bucket) if self._scattered else None
        return gather_bucket(bucket, self._optimizer.intervals[index].own, part, group)

    def masters(self) -> dict[nn.Parameter, Tensor]:
        """Return each parameter's value in the master dtype."""
        return self.tensors([part.master.loaded() for part in self._optimizer.intervals])

    def wide_masters(self) -> dict[nn.Parameter, Tensor]:
        """Return the masters of the 16-bit parameters."""
        return {
            parameter: master
            for index, part in enumerate(self._optimizer.intervals)
            if part.master.dtype != part.target.dtype
            for parameter, master in self._bucket(index, part.master.loaded()).items()
        }

    def optimizer_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Return each parameter's full state, as the user's optimizer would store it."""
        if self._scattered and self._share_split_keys is not None:
            self._share_split_keys()
        states: dict[nn.Parameter, dict[str, Any]] = {}
        for index, group in enumerate(self._optimizer.groups):
            states |= self._whole_state(index) if group.whole else self._flat_state(index)
        return states

    def _whole_state(self, index: int) -> dict[nn.Parameter, dict[str, Any]]:
        mine = {
            segment.pieces[0].parameter: state for segment, state in self._optimizer.state_of(index)
        }
        if self._scattered:
            # Move to the CPU: a pickled tensor refers to its GPU by index, which another rank may
            # not have.
            mine = {
                number: {k: v.cpu() if isinstance(v, Tensor) else v for k, v in state.items()}
                for number, state in mine.items()
            }
        group = self._groups.of(self._parameters.buckets[index])
        gathered = group.gather_objects(mine) if self._scattered else [mine]
        return {
            self._parameters.named[number].parameter: self._placed(index, state)
            for part in gathered
            for number, state in part.items()
        }

    def _flat_state(self, index: int) -> dict[nn.Parameter, dict[str, Any]]:
        states_here = self._optimizer.state_of(index)
        is_flat = partial(self._optimizer.is_flat, index)
        # Send single values, such as step counts, as objects, because there are only a few per
        # parameter.
        singles = on_host(
            {
                piece.parameter: {k: v for k, v in state.items() if not is_flat(segment, k, v)}
                for segment, state in states_here
                for piece in segment.pieces
            }
        )
        dtypes = {
            k: v.dtype
            for segment, state in states_here
            for k, v in state.items()
            if is_flat(segment, k, v)
        }
        group = self._groups.of(self._parameters.buckets[index])
        mine = singles, dtypes
        parts = group.gather_objects(mine) if self._scattered else [mine]
        all_singles = {number: single for part, _ in parts for number, single in part.items()}
        all_dtypes = {key: dtype for _, part in parts for key, dtype in part.items()}
        states: dict[nn.Parameter, dict[str, Any]] = {
            self._parameters.named[number].parameter: self._placed(index, single)
            for number, single in all_singles.items()
        }
        # Sort, because all ranks must gather the keys in the same order. A rank whose intervals
        # have no state for a key contributes zeros.
        for key in sorted(all_dtypes):
            whole = self._bucket(index, self._optimizer.whole(index, key, all_dtypes[key]))
            for parameter, state in states.items():
                state[key] = whole[parameter]
        return states

    def _placed(self, index: int, state: dict[str, Any]) -> dict[str, Any]:
        """Move `state` to the devices that the user's optimizer expects for bucket `index`."""
        _, device = self._parameters.kind(index)
        options = self._optimizer.groups[index].options
        return {key: placed(key, value, device, options) for key, value in state.items()}


def on_host(states: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Move the tensors in `states` to the CPU. They should be small, such as step counts."""
    places = [
        (state, key)
        for state in states.values()
        for key, value in state.items()
        if isinstance(value, Tensor)
    ]
    moved = to_host([state[key] for state, key in places])
    for (state, key), near in zip(places, moved, strict=True):
        state[key] = near
    return states
