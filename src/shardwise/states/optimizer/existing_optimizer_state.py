"""Takes over existing optimizer state: what the user's optimizer has, or what a checkpoint fills.

A bucket's interval is cut into segments where the existing state of neighbours differs (one has
none, or another step count); each segment gets the state of its parameters as one flat tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn, optim

from shardwise.layout.bucket_layout import Piece
from shardwise.states.optimizer.inner_optimizer import InnerOptimizer
from shardwise.states.optimizer.optimizer_kind import OptimizerKind, placed
from shardwise.states.optimizer.optimizer_lr_and_options import ParameterGroup
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.parameters.update_intervals import (
    UpdateInterval,
    UpdateSegment,
    runs,
    without_memory,
)

State = Mapping[str, Any]


@dataclass(frozen=True)
class Blank:
    """Stands for a tensor of optimizer state that is still to be filled."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class ExistingState:
    """The state that parameters have, by the user's optimizer and by parameter.

    Tensors of it may be Blanks, for which room is made with anything in it. Segments start at the
    parameters `borders`.
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
        """The state of parameter `number`; None where there is none."""
        return self._states[group.optimizer].get(self._named[number].parameter) or None

    # -- segments -------------------------------------------------------------------------

    def segments(self, interval: UpdateInterval, group: ParameterGroup) -> list[UpdateSegment]:
        """The segments of an interval: one for each run of parameters whose state is alike."""
        if group.whole:
            return [self._whole_segment(interval, group, p) for p in interval.all_pieces]
        pieces = interval.all_pieces
        before = accumulate((piece.parameter in self._borders for piece in pieces), initial=0)
        count = dict(zip(pieces, list(before)[1:], strict=True))
        return [
            interval.segment(run)
            for pieces in interval.pieces
            for run in runs(pieces, lambda p: (count[p], self._numbers(group, p.parameter)))
        ]

    def _whole_segment(
        self, interval: UpdateInterval, group: ParameterGroup, piece: Piece
    ) -> UpdateSegment:
        named = self._named[piece.parameter]
        tensor = named.view(interval.flat(*interval.own), piece.start - interval.own[0])
        if not group.stays:
            return UpdateSegment(piece.start, piece.end, [piece], tensor)
        master = tensor if interval.has_master else None
        return UpdateSegment(piece.start, piece.end, [piece], named.parameter, master)

    def _numbers(self, group: ParameterGroup, number: int) -> Any:
        """What makes two neighbours unlike: which state they have, and its single values."""
        if (state := self._of(group, number)) is None:
            return None
        return sorted(
            (key, None if has_shape else _comparable(state[key]))
            for key, has_shape in _entries(group.kind, state, self._named[number]).items()
        )

    # -- their state ----------------------------------------------------------------------

    def give(self, inner: InnerOptimizer, interval: UpdateInterval, group: ParameterGroup) -> None:
        """Give the segments of `interval` the state of their parameters."""
        for segment in interval.segments:
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
        if not has_blanks:
            inner.stow(interval)

    def _joined_state(
        self,
        inner: InnerOptimizer,
        interval: UpdateInterval,
        group: ParameterGroup,
        segment: UpdateSegment,
        states: Sequence[State],
    ) -> dict[str, Any]:
        """The state of a segment, out of the `states` of its pieces."""
        options = inner.options_of(group)
        made: dict[str, Any] = {}
        named = self._named[segment.pieces[0].parameter]
        for key, has_shape in _entries(group.kind, states[0], named).items():
            value, flat = states[0][key], has_shape and not group.whole
            if isinstance(value, Blank):
                made[key] = _room(interval, segment, key, value, flat=flat)
            elif flat:
                made[key] = self._joined(segment, key, states)
            else:
                made[key] = placed(key, value, _device_of(segment), options, copy=not group.stays)
        return made

    def _joined(self, segment: UpdateSegment, key: str, states: Sequence[State]) -> Tensor:
        """One flat tensor of a segment's pieces of state `key`."""
        joined = torch.zeros(
            segment.end - segment.first, dtype=states[0][key].dtype, device=segment.tensor.device
        )
        for piece, state in zip(segment.pieces, states, strict=True):
            value = self._named[piece.parameter].flattened(state[key])
            length = piece.end - piece.start
            joined[piece.start - segment.first :][:length] = value[piece.offset :][:length]
        return joined


def _room(
    interval: UpdateInterval, segment: UpdateSegment, key: str, blank: Blank, *, flat: bool
) -> Tensor:
    """A tensor of state that is to be filled; without memory where it rests on a disk."""
    numel = segment.end - segment.first
    if key in interval.moments:
        return without_memory(numel, interval.moments[key].dtype)
    shape = (numel,) if flat else blank.shape
    return torch.zeros(shape, dtype=blank.dtype, device=_device_of(segment))


def _device_of(segment: UpdateSegment) -> torch.device:
    """Where a segment is updated."""
    return (segment.tensor if segment.master is None else segment.master).device


def _comparable(value: Any) -> Any:
    """A number or text by which a value is compared with another."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else repr(value)


def _entries(kind: OptimizerKind, state: State, named: NamedParameter) -> dict[str, bool]:
    """The keys of a parameter's state, and of each whether it has the parameter's shape; without
    what is not there yet, as the momentum of an SGD that had none."""
    return {
        key: kind.has_shape(
            key, value, named.whole_shape if isinstance(value, Blank) else named.shape
        )
        for key, value in state.items()
        if value is not None or key not in kind.tensor_keys
    }
