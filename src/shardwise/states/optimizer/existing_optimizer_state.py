"""Adopts optimizer state that already exists in the user's optimizer or in a checkpoint.

A bucket's interval is split into segments, with a boundary wherever the states of two neighbouring
parameters cannot be joined, for example because their step counts differ. Each segment receives its
parameters' state, joined into flat tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn, optim

from shardwise.layout.bucket_layout import Slot
from shardwise.states.optimizer.inner_optimizer import InnerOptimizer
from shardwise.states.optimizer.offloaded_update import store_state
from shardwise.states.optimizer.optimizer_kind import OptimizerKind, placed
from shardwise.states.optimizer.optimizer_options import ParameterGroup
from shardwise.states.optimizer.update_interval import (
    BucketUpdate,
    UpdatedTensor,
    group_consecutive,
    without_memory,
)
from shardwise.states.parameters.named_parameters import NamedParameter

State = Mapping[str, Any]


@dataclass(frozen=True)
class Blank:
    """Placeholder for a tensor of optimizer state that a checkpoint will fill."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class ExistingState:
    """The existing state of each parameter, for each of the user's optimizers.

    A `Blank` is replaced by an allocated tensor. Each of the parameters `borders` starts a new
    segment, even if its state could be joined with its neighbour's.
    """

    def __init__(
        self,
        named: Sequence[NamedParameter],
        states: Mapping[optim.Optimizer, Mapping[nn.Parameter, State]],
        borders: Set[int] = frozenset(),
    ) -> None:
        self._named = named
        self._states = states
        self._borders = borders

    def _of(self, group: ParameterGroup, number: int) -> State | None:
        return self._states[group.optimizer].get(self._named[number].parameter) or None

    # -- segments -------------------------------------------------------------------------

    def segments(self, interval: BucketUpdate, group: ParameterGroup) -> list[UpdatedTensor]:
        """Return an interval's segments: one for each run of parameters whose states can be joined.

        If the optimizer needs full tensors, every parameter has its own segment.
        """
        pieces = interval.all_pieces
        if group.whole:
            segments = []
            for piece in pieces:
                named = self._named[piece.parameter]
                tensor = named.view(interval.flat(*interval.own), piece.start - interval.own[0])
                master = None
                if group.stays:
                    # The user's optimizer updates the user's own parameter, not a view of it.
                    master = tensor if interval.has_master else None
                    tensor = named.parameter
                segments.append(
                    UpdatedTensor(piece.start, piece.end, [piece], tensor, master, named.parameter)
                )
            return segments
        # Count the borders up to each piece. The count changes at a border, so that runs end there.
        borders = accumulate(piece.parameter in self._borders for piece in pieces)
        count = dict(zip(pieces, borders, strict=True))

        def mark(piece: Slot) -> Any:
            return count[piece], self._signature(group, piece.parameter)

        return [
            interval.segment(run)
            for pieces in interval.pieces
            for run in group_consecutive(pieces, mark)
        ]

    def _signature(self, group: ParameterGroup, number: int) -> Any:
        """Return the names of a parameter's state entries, and the entries with a single value.

        Only neighbours with equal signatures can share a segment.
        """
        if (state := self._of(group, number)) is None:
            return None
        entries: list[tuple[str, Any]] = []
        for key, has_shape in _entries(group.kind, state, self._named[number]).items():
            value = state[key]
            if has_shape:
                entries.append((key, None))
            elif isinstance(value, Tensor) and value.numel() == 1:
                entries.append((key, value.item()))
            else:
                entries.append((key, repr(value)))
        return sorted(entries)

    # -- state of segments ----------------------------------------------------------------

    def give(self, inner: InnerOptimizer, interval: BucketUpdate, group: ParameterGroup) -> None:
        """Assign the existing state to the segments of `interval`."""
        for segment in interval.segments:
            # All pieces of a segment have the same signature, so either all have state or none has.
            states = [self._of(group, piece.parameter) for piece in segment.pieces]
            if known := [state for state in states if state is not None]:
                inner.inner.state[segment.tensor] = self._joined_state(
                    inner, interval, group, segment, known
                )
        has_blanks = any(
            isinstance(value, Blank)
            for state in self._states[group.optimizer].values()
            for value in state.values()
        )
        # With blanks there is nothing to store yet: loading the checkpoint writes to the disk.
        if not has_blanks:
            store_state(inner, interval)

    def _joined_state(
        self,
        inner: InnerOptimizer,
        interval: BucketUpdate,
        group: ParameterGroup,
        segment: UpdatedTensor,
        states: Sequence[State],
    ) -> dict[str, Any]:
        """Return the state of a segment, joined from the `states` of its pieces."""
        options = inner.options_of(group)
        joined: dict[str, Any] = {}
        named = self._named[segment.pieces[0].parameter]
        for key, has_shape in _entries(group.kind, states[0], named).items():
            value, flat = states[0][key], has_shape and not group.whole
            if isinstance(value, Blank):
                shape = (segment.end - segment.first,) if flat else named.part_shape(value.shape)
                joined[key] = _allocate(interval, segment, key, value.dtype, shape)
            elif flat:
                joined[key] = self._joined(segment, key, states)
            else:
                # The value is the same for all pieces, because their signatures are equal.
                copy = not group.stays
                joined[key] = placed(key, value, _device_of(segment), options, copy=copy)
        return joined

    def _joined(self, segment: UpdatedTensor, key: str, states: Sequence[State]) -> Tensor:
        """Join the state entry `key` of a segment's pieces into a flat tensor."""
        joined = torch.zeros(
            segment.end - segment.first, dtype=states[0][key].dtype, device=segment.tensor.device
        )
        for piece, state in zip(segment.pieces, states, strict=True):
            value = self._named[piece.parameter].flattened(state[key])
            length = piece.end - piece.start
            # An interval may contain only part of a parameter, starting at its element `offset`.
            joined[piece.start - segment.first :][:length] = value[piece.offset :][:length]
        return joined


def _allocate(
    interval: BucketUpdate,
    segment: UpdatedTensor,
    key: str,
    dtype: torch.dtype,
    shape: Sequence[int],
) -> Tensor:
    """Allocate the tensor that replaces a blank. It has no storage if the state is on a disk."""
    if key in interval.moments:
        return without_memory(segment.end - segment.first, interval.moments[key].dtype)
    return torch.zeros(tuple(shape), dtype=dtype, device=_device_of(segment))


def _device_of(segment: UpdatedTensor) -> torch.device:
    return (segment.tensor if segment.master is None else segment.master).device


def _entries(kind: OptimizerKind, state: State, named: NamedParameter) -> dict[str, bool]:
    """Return, for each entry of a parameter's state, whether it has the parameter's shape.

    Leaves out entries that do not exist yet, such as the momentum of SGD without momentum.
    """
    return {
        key: kind.has_shape(
            key, value, named.whole_shape if isinstance(value, Blank) else named.shape
        )
        for key, value in state.items()
        if value is not None or key not in kind.tensor_keys
    }
