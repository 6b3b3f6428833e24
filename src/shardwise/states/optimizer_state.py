"""Optimizer state: an inner copy of the user's optimizer over what this rank updates.

The user's optimizer is the face: schedulers and edits of its `param_groups` act on it, and its
options are copied before every step. What it updates is, per bucket, the rank's interval in the
master dtype, as one flat tensor for an element-wise optimizer:

    bucket flat   | ........ | own interval ........ | ........ |
    segments                 |  a  |  b   |    c     |

There is one segment to begin with. It is cut at parameter borders where its parameters come to
differ: one had no gradient on any rank, so that its value, its moments and its step count must
stay (as `grad=None` does in torch). An optimizer that needs whole tensors has one segment per
tensor from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ModelError
from shardwise.layout import Piece
from shardwise.model.precision import NARROW
from shardwise.states.inner_optimizer import (
    GroupOf,
    InnerOptimizer,
    Part,
    Segment,
    runs,
    without_memory,
)
from shardwise.states.on_host import BroughtDown
from shardwise.states.optimizer_kind import Kind, may_fuse, placed, same
from shardwise.states.parameters import Parameters
from shardwise.states.storage import Held, InMemory, Span, spans_of
from shardwise.states.storage_factory import Shelf
from shardwise.states.tracked import Tracked


@dataclass(frozen=True)
class Blank:
    """Stands for a tensor of optimizer state that is still to be filled."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class OptimizerState:
    """The inner optimizers of all buckets, and the masters where parameters are 16-bit or rest
    elsewhere."""

    def __init__(
        self,
        parameters: Parameters,
        groups: Sequence[GroupOf],
        own: Sequence[Span],
        shelf: Shelf,
        *,
        by_spans: bool,
        sends: bool,
        known: Mapping[nn.Parameter, Tensor],
    ) -> None:
        """`groups` and `own` are by bucket. `by_spans`: some state rests on a disk. `sends`: an
        updated bucket is sent to other ranks. `known` are values in the master dtype, better than
        what the parameters themselves say."""
        self._parameters = parameters
        self._one_by_one = sends or by_spans
        self._near: dict[Part, BroughtDown] = {}
        self.groups = groups
        self.parts = self._lay(own, shelf, by_spans)
        for index, part in enumerate(self.parts):
            if part.master is not part.target:
                self._fill(part, parameters.wide.pop(index, None), known)
        self._old = {face: dict(face.state) for face in {group.face for group in groups}}
        self._borders: Set[int] = frozenset()
        self.inners: list[InnerOptimizer] = []
        self._inner_of: list[InnerOptimizer] = []
        self._build()
        del self._old

    def _lay(self, own: Sequence[Span], shelf: Shelf, by_spans: bool) -> list[Part]:
        """Room for what this rank keeps of each bucket."""
        numbers = range(len(own))
        lengths = [end - first for first, end in own]
        spans = [spans_of(n) if by_spans else [(0, n)] for n in lengths]
        targets = [in_spans(self._parameters.part(i, own[i]), spans[i]) for i in numbers]
        kept = [self._kept(i, shelf, targets[i]) for i in numbers]
        rooms = iter(
            shelf.make(
                "optimizer state",
                [lengths[i] for i in numbers for _ in kept[i]],
                [kind for i in numbers for kind in kept[i].values()],
                width=max([1, *map(len, kept)]),
            )
        )
        made = [{name: in_spans(next(rooms), spans[i]) for name in kept[i]} for i in numbers]
        return [
            Part(
                self._parameters.buckets[i],
                own[i],
                targets[i],
                made[i].pop(_MASTER, targets[i]),
                made[i],
                spans[i],
            )
            for i in numbers
        ]

    def _kept(
        self, index: int, shelf: Shelf, target: Held
    ) -> dict[str, tuple[torch.dtype, torch.device]]:
        """What needs room of its own: a separate master; on a disk, the optimizer's state too."""
        dtype, device = self._parameters.kind(index)
        kind = (torch.float32 if dtype in NARROW else dtype, device)
        separate = dtype in NARROW or shelf.is_apart(device) != (target.beside is not None)
        keys = sorted(self.groups[index].kind.tensor_keys) if shelf.on_disk else []
        return dict.fromkeys([_MASTER] * separate + keys, kind)

    def _fill(self, part: Part, wide: Tensor | None, known: Mapping[nn.Parameter, Tensor]) -> None:
        """Let a separate master have its parameters' values."""
        value = (part.target.loaded() if wide is None else wide).to(part.master.dtype)
        for piece in part.bucket.pieces(*part.own):
            tracked = self._parameters.tracked[piece.parameter]
            if tracked.parameter in known:
                flat = tracked.flattened(known[tracked.parameter])[piece.offset :]
                length = piece.end - piece.start
                value[piece.start - part.own[0] :][:length] = flat[:length]
        part.master.store(value)

    def _build(self) -> None:
        """Cut every bucket into segments, give each an inner optimizer, take over old state."""
        for part, group in zip(self.parts, self.groups, strict=True):
            part.segments = self._segments(part, group)
        keys = [self._together(index) for index in range(len(self.parts))]
        members: dict[Hashable, list[int]] = {}
        for index, key in enumerate(keys):
            members.setdefault(key, []).append(index)
        made = {key: self._inner_over(indices) for key, indices in members.items()}
        self.inners = list(made.values())
        self._inner_of = [made[key] for key in keys]
        for index in range(len(self.parts)):
            self._adopt(index)
        taken = {tracked.parameter for tracked in self._parameters.tracked}
        for face in self._old:
            for parameter in [p for p in face.state if p in taken]:
                del face.state[parameter]

    def _together(self, index: int) -> Hashable:
        """Buckets of equal keys are updated in one call: all of an optimizer that looks across;
        else those that lose nothing by it, since nothing of them is sent, fetched or copied
        beside the update of the one before."""
        part, group = self.parts[index], self.groups[index]
        if group.together:
            return group.face
        is_apart = part.master is not part.target or part.master.beside is not None
        stays = part.master.memory is not None and not part.moments
        fuses = _fuses(group, part)
        in_place = fuses or bool(group.options.get("fused"))  # others make temporaries of its size
        if self._one_by_one or is_apart or not stays or not in_place:
            return index
        return group.face, part.master.dtype, part.master.device, fuses

    def _inner_over(self, indices: Sequence[int]) -> InnerOptimizer:
        parts, groups = [self.parts[i] for i in indices], [self.groups[i] for i in indices]
        fused = not groups[0].together and _fuses(groups[0], parts[0])
        return InnerOptimizer(parts, groups, fused)

    def restart(self, states: Mapping[nn.Parameter, Mapping[str, Any]], borders: Set[int]) -> None:
        """Forget all state, and have that of `states` by parameter: tensors of it are Blanks, for
        which there is room with anything in it. Segments start at the parameters `borders`."""
        old: dict[Any, Any] = dict(states)
        self._old = {group.face: old for group in self.groups}
        self._borders = borders
        self.inners, self._inner_of = [], []
        self._build()
        self._borders = frozenset()
        del self._old

    def _segments(self, part: Part, group: GroupOf) -> list[Segment]:
        if group.whole:
            return [self._whole_segment(part, p) for pieces in part.pieces for p in pieces]
        old = self._old[group.face]
        before = list(accumulate((p.parameter in self._borders for p in _all(part)), initial=0))[1:]
        count = dict(zip(_all(part), before, strict=True))
        return [
            part.segment(run)
            for pieces in part.pieces
            for run in runs(pieces, lambda p: (count[p], self._scalars(old, p, group.kind)))
        ]

    def _whole_segment(self, part: Part, piece: Piece) -> Segment:
        tracked = self._parameters.tracked[piece.parameter]
        tensor = tracked.view(part.flat(*part.own), piece.start - part.own[0])
        return Segment(piece.start, piece.end, [piece], tensor)

    def _scalars(self, old: dict[Any, Any], piece: Piece, kind: Kind) -> Any:
        """What makes two neighbours unlike: which state they have, and its single values."""
        tracked = self._parameters.tracked[piece.parameter]
        if not (state := old.get(tracked.parameter)):
            return None
        return sorted(
            (key, None if has_shape else _told(state[key]))
            for key, has_shape in _entries(kind, state, tracked).items()
        )

    def _adopt(self, index: int) -> None:
        """Take over the state that the user's optimizer already has."""
        part, group = self.parts[index], self.groups[index]
        inner = self._inner_of[index].inner
        old = self._old[group.face]
        for segment in part.segments:
            states = [
                old.get(self._parameters.tracked[p.parameter].parameter) for p in segment.pieces
            ]
            known = [state for state in states if state]
            if not known:
                continue
            options = self._inner_of[index].options_of(group)
            tracked = self._parameters.tracked[segment.pieces[0].parameter]
            inner.state[segment.tensor] = {
                key: self._room(index, segment, key, value, flat=has_shape and not group.whole)
                if isinstance(value := known[0][key], Blank)
                else self._joined(segment, key, known)
                if has_shape and not group.whole
                else placed(key, value, segment.tensor.device, options)
                for key, has_shape in _entries(group.kind, known[0], tracked).items()
            }
        if not any(isinstance(v, Blank) for state in old.values() for v in state.values()):
            self._inner_of[index].stow(part)

    def _room(self, index: int, segment: Segment, key: str, blank: Blank, *, flat: bool) -> Tensor:
        """A tensor of state that is to be filled; without memory where it rests on a disk."""
        numel, moments = segment.end - segment.first, self.parts[index].moments
        if key in moments:
            return without_memory(numel, moments[key].dtype)
        shape = (numel,) if flat else blank.shape
        return torch.zeros(shape, dtype=blank.dtype, device=segment.tensor.device)

    def _joined(self, segment: Segment, key: str, states: Sequence[dict[str, Any]]) -> Tensor:
        """One flat tensor of a segment's pieces of state `key`."""
        joined = torch.zeros(
            segment.end - segment.first, dtype=states[0][key].dtype, device=segment.tensor.device
        )
        for piece, state in zip(segment.pieces, states, strict=True):
            value = self._parameters.tracked[piece.parameter].flattened(state[key])
            length = piece.end - piece.start
            joined[piece.start - segment.first :][:length] = value[piece.offset :][:length]
        return joined

    # -- use ------------------------------------------------------------------------------

    def step(
        self, inner: InnerOptimizer, sums: Sequence[Held], used: Sequence[bool], factor: float
    ) -> None:
        """Update one inner optimizer's parts; `sums` are by bucket."""
        following = self.inners[self.inners.index(inner) + 1 :][:1]
        then = [(each, self._sums_of(each, sums)) for each in following]
        ahead: Callable[[], None] | None = None
        if then:
            ahead = lambda: then[0][0].ahead(0, then[0][1])  # noqa: E731
        inner.step(self._sums_of(inner, sums), used, factor, ahead)

    def tell_faces(self) -> None:
        """Write what the optimizers changed in their parameter groups to the user's; after all
        updates of a step. Raises ModelError where two updates left different values."""
        told: dict[tuple[int, int, str], Any] = {}
        for inner in self.inners:
            face = self.groups[self.buckets_of(inner)[0]].face
            for number, changes in inner.changes.items():
                for key, value in changes.items():
                    first = told.setdefault((id(face), number, key), value)
                    if not same(first, value):
                        raise ModelError(
                            f"{type(face).__name__} keeps {key} in its parameter group, and two "
                            f"parts of group {number} left it at {first!r} and {value!r}. Choose "
                            "an optimizer that keeps it by parameter."
                        )
                    face.param_groups[number][key] = value
            inner.changes.clear()

    def _sums_of(self, inner: InnerOptimizer, sums: Sequence[Held]) -> list[Held]:
        return [self._sum_of(self.parts[i], sums[i]) for i in self.buckets_of(inner)]

    def _sum_of(self, part: Part, total: Held) -> Held:
        """The reduced gradient as the update of `part` uses it: near the master, in its spans."""
        beside = part.master.beside
        if beside is None or total.beside is not None:
            return in_spans(total, part.spans)
        assert isinstance(total, InMemory)
        near = self._near.get(part)
        if near is None or near.source is not total.tensor:
            near = self._near[part] = BroughtDown(total.tensor, beside, part.spans)
        return near

    def buckets_of(self, inner: InnerOptimizer) -> list[int]:
        """The buckets that `inner` updates."""
        return [i for i, each in enumerate(self._inner_of) if each is inner]

    @property
    def has_masters(self) -> bool:
        """Whether any parameter has a master in another dtype."""
        return any(part.master is not part.target for part in self.parts)

    def refresh_masters(self, written: set[int]) -> None:
        """Take the masters of the parameters `written` by user code from those again."""
        for part in self.parts:
            if part.master is part.target:
                continue
            for index, ((first, _), pieces) in enumerate(zip(part.spans, part.pieces, strict=True)):
                start = part.own[0] + first
                master, target = part.master.take(index), part.target.take(index)
                for piece in pieces:
                    if piece.parameter in written:
                        a, b = piece.start - start, piece.end - start
                        master[a:b].copy_(target[a:b])
                part.master.put(index, changed=True)
                part.target.put(index, changed=False)

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state and separate masters that this rank keeps now."""
        total = sum(part.master.nbytes for part in self.parts if part.master is not part.target)
        for inner in self.inners:
            for state in inner.inner.state.values():
                total += sum(_bytes(v) for v in state.values() if isinstance(v, Tensor) and v.ndim)
        return total

    def expected_bytes(self, index: int) -> int:
        """The same of bucket `index`, once the optimizer has made all of its state."""
        part = self.parts[index]
        moments = len(self.groups[index].kind.tensor_keys)
        return part.master.nbytes * (moments + (part.master is not part.target))

    def whole(self, index: int, key: str, dtype: torch.dtype) -> Tensor:
        """State `key` of all segments of bucket `index`, flat over this rank's interval; zeros
        where there is none."""
        part = self.parts[index]
        joined = torch.zeros(part.master.numel, dtype=dtype, device=part.master.device)
        stored = part.moments[key].loaded() if key in part.moments else None
        for segment, state in self.state_of(index):
            if key in state:
                place = slice(segment.first - part.own[0], segment.end - part.own[0])
                joined[place] = state[key] if stored is None else stored[place]
        return joined

    def is_flat(self, index: int, segment: Segment, key: str, value: Any) -> bool:
        """Whether state `key` of a segment of bucket `index` is flat as that, and cut with it."""
        group = self.groups[index]
        return not group.whole and group.kind.has_shape(key, value, segment.tensor.shape)

    def is_tensor(self, index: int, segment: Segment, key: str, value: Any) -> bool:
        """Whether `value` is a tensor of its parameter's, rather than a number beside it."""
        return self.groups[index].kind.is_tensor(key, value, segment.tensor.shape)

    def state_of(self, index: int) -> list[tuple[Segment, dict[str, Any]]]:
        """The segments of bucket `index` with their state, those without any left out."""
        inner = self._inner_of[index].inner
        return [
            (segment, inner.state[segment.tensor])
            for segment in self.parts[index].segments
            if inner.state.get(segment.tensor)
        ]


_MASTER = "master"


def _all(part: Part) -> list[Piece]:
    """What lies in the interval of `part`."""
    return [piece for pieces in part.pieces for piece in pieces]


def in_spans(held: Held, spans: Sequence[Span]) -> Held:
    """`held`, used in `spans`."""
    return held if list(held.spans) == list(spans) else held.cut(spans)


def _told(value: Any) -> Any:
    """What tells a value from another."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else repr(value)


def _entries(kind: Kind, state: Mapping[str, Any], tracked: Tracked) -> dict[str, bool]:
    """The keys of a parameter's state, and of each whether it has the parameter's shape; without
    what is not there yet, as the momentum of an SGD that had none."""
    return {
        key: kind.has_shape(
            key, value, tracked.whole_shape if isinstance(value, Blank) else tracked.shape
        )
        for key, value in state.items()
        if value is not None or key not in kind.tensor_keys
    }


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _fuses(group: GroupOf, part: Part) -> bool:
    return may_fuse(group.face, group.options, part.master.dtype, part.master.device)
