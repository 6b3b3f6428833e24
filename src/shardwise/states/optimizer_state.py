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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, optim

from shardwise.layout import Bucket, Piece
from shardwise.states.optimizer_trial import Kind, bare_copy, settings_of
from shardwise.states.parameters import ReplicatedParameters, view_like


@dataclass(eq=False)
class Segment:
    """Elements [first, end) of an interval (counted in the bucket), updated as one tensor."""

    first: int
    end: int
    pieces: list[Piece]
    tensor: Tensor


@dataclass(eq=False)
class _Part:
    """What this rank updates of one bucket."""

    bucket: Bucket
    own: tuple[int, int]
    target: Tensor
    """The parameters' own memory, elements `own` of the bucket."""
    master: Tensor
    """What the optimizer updates: `target` itself, or its fp32 master."""
    segments: list[Segment] = field(default_factory=list)


@dataclass(frozen=True)
class GroupOf:
    """Which parameter group of which of the user's optimizers a bucket belongs to."""

    face: optim.Optimizer
    index: int
    kind: Kind

    @property
    def options(self) -> dict[str, Any]:
        """The group as the user's optimizer has it now."""
        return self.face.param_groups[self.index]


class InnerOptimizer:
    """One inner copy over the segments of `parts`: one bucket, or all for one that looks across."""

    def __init__(self, parts: list[_Part], groups: list[GroupOf], fused: bool) -> None:
        self.parts = parts
        self._groups = groups
        self._fused = fused
        self.inner = bare_copy(groups[0].face)
        self._divides = fused and all(part.master.dtype == torch.float32 for part in parts)
        self._regroup()

    def _regroup(self) -> None:
        """An inner parameter group for each of the user's, its segments in registration order."""
        self._numbers = sorted({group.index for group in self._groups})
        self.inner.param_groups = []
        for number in self._numbers:
            held = [
                segment
                for part, group in zip(self.parts, self._groups, strict=True)
                if group.index == number
                for segment in part.segments
            ]
            held.sort(key=lambda segment: segment.pieces[0].parameter)
            self.inner.param_groups.append({"params": [segment.tensor for segment in held]})

    def _follow_face(self) -> None:
        """Take the options of the user's groups as they are now: schedulers edit them."""
        for number, inner in zip(self._numbers, self.inner.param_groups, strict=True):
            inner.update(settings_of(self._groups[0].face.param_groups[number]))
            if self._fused:
                inner["fused"] = True

    def step(self, sums: Sequence[Tensor], used: Sequence[bool], factor: float) -> None:
        """Update from the reduced `sums` of each part times `factor`; `used` is by parameter."""
        for part in self.parts:
            self._cut_by_use(part, used)
        self._follow_face()
        for part, total in zip(self.parts, sums, strict=True):
            self._offer(part, total, used, factor)
        self.inner.grad_scale = None  # type: ignore[attr-defined]
        if self._divides and factor != 1.0:
            # torch's fused kernels divide the gradient by this on the way, in fp32.
            divisor = torch.tensor(1.0 / factor, device=self.parts[0].master.device)
            self.inner.grad_scale = divisor  # type: ignore[attr-defined]
            self.inner.found_inf = None  # type: ignore[attr-defined]
        if any(segment.tensor.grad is not None for part in self.parts for segment in part.segments):
            self.inner.step()
        for part in self.parts:
            for segment in part.segments:
                segment.tensor.grad = None
            if part.master is not part.target:
                part.target.copy_(part.master)

    def _offer(self, part: _Part, total: Tensor, used: Sequence[bool], factor: float) -> None:
        """Hang the gradient of each segment that had one on its tensor."""
        grad = self._scaled(part, total, factor)
        for segment in part.segments:
            if used[segment.pieces[0].parameter]:
                a, b = segment.first - part.own[0], segment.end - part.own[0]
                segment.tensor.grad = _shaped(grad[a:b], segment.tensor)

    def _scaled(self, part: _Part, total: Tensor, factor: float) -> Tensor:
        if total.dtype != part.master.dtype:
            total = total.to(part.master.dtype)
        return total if self._divides or factor == 1.0 else total.mul_(factor)

    def _cut_by_use(self, part: _Part, used: Sequence[bool]) -> None:
        """Cut every segment whose parameters differ in whether they had a gradient."""
        whole = []
        for segment in part.segments:
            runs = _runs(segment.pieces, lambda piece: used[piece.parameter])
            if len(runs) < 2:
                whole.append(segment)
                continue
            whole += self._cut(part, segment, runs)
        if len(whole) != len(part.segments):
            part.segments = whole
            self._regroup()

    def _cut(self, part: _Part, segment: Segment, runs: list[list[Piece]]) -> list[Segment]:
        """Cut one segment, its state with it: tensors by slices, the rest by copies."""
        state = self.inner.state.pop(segment.tensor, None)
        made = []
        for run in runs:
            child = _flat_segment(part, run)
            made.append(child)
            if state:
                a, b = child.first - segment.first, child.end - segment.first
                self.inner.state[child.tensor] = {
                    key: value[a:b] if _is_flat_state(value, segment.tensor) else copied(value)
                    for key, value in state.items()
                }
        return made


class OptimizerState:
    """The inner optimizers of all buckets, and the fp32 masters where parameters are 16-bit."""

    def __init__(
        self,
        parameters: ReplicatedParameters,
        groups: Sequence[GroupOf],
        own: Sequence[tuple[int, int]],
        masters: Sequence[Tensor | None],
    ) -> None:
        """`groups`, `own` and `masters` are by bucket; a master is given where it is separate."""
        self._parameters = parameters
        self.groups = groups
        self.parts = [
            self._part(bucket, flat, interval, master)
            for bucket, flat, interval, master in zip(
                parameters.buckets, parameters.flats, own, masters, strict=True
            )
        ]
        self._old = {face: dict(face.state) for face in {group.face for group in groups}}
        self.inners: list[InnerOptimizer] = []
        self._inner_of: list[InnerOptimizer] = []
        self._build()
        del self._old

    def _part(
        self, bucket: Bucket, flat: Tensor, own: tuple[int, int], master: Tensor | None
    ) -> _Part:
        target = flat[own[0] : own[1]]
        return _Part(bucket, own, target, target if master is None else master)

    def _build(self) -> None:
        """Cut every bucket into segments, give each an inner optimizer, take over old state."""
        for part, group in zip(self.parts, self.groups, strict=True):
            part.segments = self._segments(part, group)
        together: dict[optim.Optimizer, InnerOptimizer] = {}
        for part, group in zip(self.parts, self.groups, strict=True):
            if group.kind.separable:
                inner = InnerOptimizer([part], [group], _may_fuse(group, part))
            elif group.face in together:
                inner = together[group.face]
            else:
                members = [i for i, other in enumerate(self.groups) if other.face is group.face]
                inner = together[group.face] = InnerOptimizer(
                    [self.parts[i] for i in members], [self.groups[i] for i in members], False
                )
            if inner not in self.inners:
                self.inners.append(inner)
            self._inner_of.append(inner)
        for index in range(len(self.parts)):
            self._adopt(index)
        taken = {tracked.parameter for tracked in self._parameters.tracked}
        for face in self._old:
            for parameter in [p for p in face.state if p in taken]:
                del face.state[parameter]

    def _segments(self, part: _Part, group: GroupOf) -> list[Segment]:
        pieces = part.bucket.pieces(*part.own)
        if not group.kind.elementwise:
            return [self._whole_segment(part, piece) for piece in pieces]
        old = self._old[group.face]
        runs = _runs(pieces, lambda piece: self._scalars(old, piece, group.kind))
        return [_flat_segment(part, run) for run in runs]

    def _whole_segment(self, part: _Part, piece: Piece) -> Segment:
        like = self._parameters.tracked[piece.parameter].parameter
        tensor = view_like(part.master, piece.start - part.own[0], like)
        return Segment(piece.start, piece.end, [piece], tensor)

    def _scalars(self, old: dict[Any, Any], piece: Piece, kind: Kind) -> Any:
        """What makes two neighbours unlike: whether they have state, and its single values."""
        state = old.get(self._parameters.tracked[piece.parameter].parameter)
        if not state:
            return None
        return sorted(
            (key, value.item() if isinstance(value, Tensor) and value.numel() == 1 else repr(value))
            for key, value in state.items()
            if key not in kind.tensor_keys
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
            inner.state[segment.tensor] = {
                key: self._joined(segment, key, known)
                if group.kind.elementwise and key in group.kind.tensor_keys
                else copied(value)
                for key, value in known[0].items()
            }

    def _joined(self, segment: Segment, key: str, states: Sequence[dict[str, Any]]) -> Tensor:
        """One flat tensor of a segment's pieces of state `key`."""
        joined = torch.zeros_like(segment.tensor, dtype=states[0][key].dtype)
        for piece, state in zip(segment.pieces, states, strict=True):
            value = in_memory_order(state[key], self._parameters.tracked[piece.parameter].parameter)
            length = piece.end - piece.start
            joined[piece.start - segment.first :][:length] = value[piece.offset :][:length]
        return joined

    # -- use ------------------------------------------------------------------------------

    def step(
        self, inner: InnerOptimizer, sums: Sequence[Tensor], used: Sequence[bool], factor: float
    ) -> None:
        """Update one inner optimizer's parts; `sums` are by bucket."""
        numbers = [i for i, each in enumerate(self._inner_of) if each is inner]
        inner.step([sums[i] for i in numbers], used, factor)

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
            for piece in part.bucket.pieces(*part.own):
                if piece.parameter in written:
                    a, b = piece.start - part.own[0], piece.end - part.own[0]
                    part.master[a:b].copy_(part.target[a:b])

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state and separate masters that this rank keeps now."""
        total = sum(_bytes(part.master) for part in self.parts if part.master is not part.target)
        for inner in self.inners:
            for state in inner.inner.state.values():
                total += sum(_bytes(v) for v in state.values() if isinstance(v, Tensor) and v.ndim)
        return total

    def state_of(self, index: int) -> list[tuple[Segment, dict[str, Any]]]:
        """The segments of bucket `index` with their state, those without any left out."""
        inner = self._inner_of[index].inner
        return [
            (segment, inner.state[segment.tensor])
            for segment in self.parts[index].segments
            if inner.state.get(segment.tensor)
        ]


def in_memory_order(value: Tensor, like: Tensor) -> Tensor:
    """`value`, of the shape of `like`, flattened in the order in which `like` lies in memory."""
    flat = value.new_empty(like.numel())
    view_like(flat, 0, like).copy_(value)
    return flat


def _flat_segment(part: _Part, pieces: list[Piece]) -> Segment:
    first, end = pieces[0].start, pieces[-1].end
    return Segment(first, end, pieces, part.master[first - part.own[0] : end - part.own[0]])


def _shaped(grad: Tensor, tensor: Tensor) -> Tensor:
    return grad if tensor.ndim == 1 and tensor.is_contiguous() else view_like(grad, 0, tensor)


def _runs(pieces: Sequence[Piece], mark: Any) -> list[list[Piece]]:
    """Consecutive pieces of equal mark, together."""
    runs: list[list[Piece]] = []
    before: Any = object()
    for piece in pieces:
        now = mark(piece)
        if now != before:
            runs.append([])
        runs[-1].append(piece)
        before = now
    return runs


def _is_flat_state(value: Any, tensor: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == tensor.shape


def copied(value: Any) -> Any:
    """`value`, sharing no memory with it."""
    return value.clone() if isinstance(value, Tensor) else value


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _may_fuse(group: GroupOf, part: _Part) -> bool:
    """Whether torch's fused kernel may do the update, where the user has not chosen another.

    It reads and writes each number once where the default loop makes a pass per operation, with
    the same arithmetic.
    """
    options = group.options
    unchosen = options.get("fused", False) is None and not options.get("foreach")
    plain = not options.get("differentiable") and not options.get("capturable")
    device = part.master.device.type
    known = {"cpu": (*_FUSED, optim.Adagrad), "cuda": _FUSED}.get(device, ())
    real = part.master.dtype in (torch.float32, torch.float64)
    return unchosen and plain and real and type(group.face) in known


_FUSED = (optim.Adam, optim.AdamW, optim.SGD)
