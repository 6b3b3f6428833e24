"""One inner copy of the user's optimizer, over what this rank updates of one bucket.

    interval      |  a  |  b   |    c     |   d   |      segments: tensors that it updates
    spans         |         0         |     1     |      what is in memory at a time

A state that rests on a disk comes span by span: segments and their state are bound to a span's
memory for the time of its update, and keep their shapes, without memory, for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, optim

from shardwise.errors import TierError
from shardwise.layout import Bucket, Piece
from shardwise.states.optimizer_kind import Kind, bare_copy, settings_of
from shardwise.states.storage import Held, Span


@dataclass(eq=False)
class Segment:
    """Elements [first, end) of an interval (counted in the bucket), updated as one tensor."""

    first: int
    end: int
    pieces: list[Piece]
    tensor: Tensor


@dataclass(eq=False)
class Part:
    """What this rank updates of one bucket."""

    bucket: Bucket
    own: Span
    target: Held
    """The parameters, elements `own` of the bucket."""
    master: Held
    """What the optimizer updates: `target` itself, or its master."""
    moments: dict[str, Held]
    """By key, the optimizer's state where it rests on a disk."""
    spans: Sequence[Span]
    """What of the interval is in memory at a time."""
    segments: list[Segment] = field(default_factory=list)

    def segment(self, pieces: list[Piece]) -> Segment:
        """A segment of neighbours, as one flat tensor, up to a whole grain."""
        first, grain = pieces[0].start, self.bucket.grain
        end = min(-(-pieces[-1].end // grain) * grain, self.own[1])
        return Segment(first, end, pieces, self.flat(first, end))

    def flat(self, first: int, end: int) -> Tensor:
        """Elements of the master, counted in the bucket; without memory while it is on a disk."""
        if (memory := self.master.memory) is not None:
            return memory[first - self.own[0] : end - self.own[0]]
        return without_memory(end - first, self.master.dtype)

    def within(self, span: Span) -> list[Segment]:
        """The segments that lie in a span; none crosses its borders."""
        first, end = self.own[0] + span[0], self.own[0] + span[1]
        return [s for s in self.segments if first <= s.first < end]

    @property
    def pieces(self) -> list[list[Piece]]:
        """What lies in the interval, by span."""
        start = self.own[0]
        return [self.bucket.pieces(start + first, start + end) for first, end in self.spans]


@cache
def _nothing(dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype)


def without_memory(numel: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of `numel` elements that stands in for what is on a disk."""
    return _nothing(dtype).expand(numel)


def has_no_memory(tensor: Tensor) -> bool:
    """Whether `tensor` is such a stand-in."""
    return tensor.data_ptr() == _nothing(tensor.dtype).data_ptr()


@dataclass(frozen=True)
class GroupOf:
    """Which parameter group of which of the user's optimizers a bucket belongs to.

    `whole`: each of its tensors is updated as such, and never cut. `together`: all of the
    optimizer's are, in one call.
    """

    face: optim.Optimizer
    index: int
    kind: Kind
    whole: bool
    together: bool

    @property
    def options(self) -> dict[str, Any]:
        """The group as the user's optimizer has it now."""
        return self.face.param_groups[self.index]


class InnerOptimizer:
    """One inner copy over the segments of `parts`: one bucket, or all for one that looks across.

    Several parts have one span each.
    """

    def __init__(self, parts: list[Part], groups: list[GroupOf], fused: bool) -> None:
        self.parts = parts
        self._groups = groups
        self._fused = fused
        self.inner = bare_copy(groups[0].face)
        self._given: dict[int, dict[str, Any]] = {}
        self._counts = frozenset[str]().union(*(group.kind.group_keys for group in groups))
        self.changes: dict[int, dict[str, Any]] = {}
        """By number of the user's group, the options that the last update has changed."""
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
        if hasattr(self.inner, "_params"):  # L-BFGS keeps its one group's apart
            self.inner._params = self.inner.param_groups[0]["params"]

    def _follow_face(self) -> None:
        """Take the options of the user's groups as they are now: schedulers edit them."""
        for number, inner in zip(self._numbers, self.inner.param_groups, strict=True):
            given = self._options(self._groups[0].face.param_groups[number])
            given |= {key: copied(given[key]) for key in self._counts if key in given}
            inner.update(given)
            self._given[number] = given

    def _note_changes(self) -> None:
        """Remember what the optimizer changed in its own groups: ScheduleFree counts there.

        The user's groups are told when all have been updated, since each update of a step, also
        that of the next span, begins from the same.
        """
        for number, inner in zip(self._numbers, self.inner.param_groups, strict=True):
            given = self._given[number]
            self.changes[number] = {
                key: value
                for key, value in settings_of(inner).items()
                if key in self._counts or key not in given or value is not given[key]
            }

    def options_of(self, group: GroupOf) -> dict[str, Any]:
        """The options with which the inner optimizer updates what belongs to `group`."""
        return self._options(group.options)

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        options = settings_of(given)
        if self._fused:
            options["fused"] = True
        if options.get("capturable") and self.parts[0].master.device.type == "cpu":
            options["capturable"] = False  # a CUDA graph holds nothing that the CPU does
        return options

    # -- the update -----------------------------------------------------------------------

    def ahead(self, index: int, sums: Sequence[Held]) -> None:
        """Span `index` of every part and of its reduced gradient is needed soon."""
        for part, total in zip(self.parts, sums, strict=True):
            if index < len(part.spans):
                for held in {part.target, part.master, total}:
                    held.ahead(index)
                for key, held in part.moments.items():
                    if self._is_stowed(part, part.spans[index], key):
                        held.ahead(index)

    def step(
        self,
        sums: Sequence[Held],
        used: Sequence[bool],
        factor: float,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Update from the reduced `sums` of each part times `factor`; `used` is by parameter.

        `then` is called when nothing more is to be read ahead here.
        """
        if not all(used):
            for part in self.parts:
                self._cut_by_use(part, used)
        self._set_divisor(factor)
        rounds = max(len(part.spans) for part in self.parts)
        for index in range(rounds):
            spans = [
                _InUse(self.inner, part, index, total)
                for part, total in zip(self.parts, sums, strict=True)
            ]
            if index + 1 < rounds:
                self.ahead(index + 1, sums)
            elif then is not None:
                then()
            self._update(spans, used, factor)

    def step_often(self, evaluate: Callable[[], float], sums: Sequence[Held]) -> None:
        """A step of an optimizer that calls `evaluate` as often as it wants, which offers the
        gradients each time; all of it is in memory for good."""
        spans = [
            _InUse(self.inner, part, 0, total) for part, total in zip(self.parts, sums, strict=True)
        ]
        self._set_divisor(1.0)
        self._follow_face()
        self.inner.step(evaluate)
        self._note_changes()
        for span in spans:
            for segment in span.segments:
                segment.tensor.grad = None
            span.end(changed=True)

    def offer_again(self, sums: Sequence[Held], used: Sequence[bool], factor: float) -> None:
        """Hang the gradients of another evaluation on the tensors."""
        for part, total in zip(self.parts, sums, strict=True):
            grad = total.loaded().to(part.master.device, part.master.dtype) * factor
            for segment in part.segments:
                seen = used[segment.pieces[0].parameter]
                a, b = segment.first - part.own[0], segment.end - part.own[0]
                segment.tensor.grad = _shaped(grad[a:b], segment.tensor) if seen else None

    def _update(self, spans: Sequence[_InUse], used: Sequence[bool], factor: float) -> None:
        for span in spans:
            self._offer(span, used, factor)
        tensors = [segment.tensor for span in spans for segment in span.segments]
        offered = [tensor for tensor in tensors if tensor.grad is not None]
        changed = bool(offered)
        if changed or self._counts:
            self._follow_face()
            self._call(offered)
            self._note_changes()
        for span in spans:
            for segment in span.segments:
                segment.tensor.grad = None
            span.end(changed=changed)

    def _call(self, offered: Sequence[Tensor]) -> None:
        """Let the inner optimizer update those that have a gradient.

        torch's fused SGD takes either a momentum of every tensor or of none, so what is updated
        for the first time, while others have been before, has a call of its own.
        """
        fuses = any(group.get("fused") for group in self.inner.param_groups)
        fresh = [t for t in offered if not self._has_begun(t)] if fuses else []
        if 0 < len(fresh) < len(offered):
            grads = [tensor.grad for tensor in fresh]
            for tensor in fresh:
                tensor.grad = None
            self.inner.step()
            for tensor in offered:
                tensor.grad = None
            for tensor, grad in zip(fresh, grads, strict=True):
                tensor.grad = grad
        self.inner.step()

    def _has_begun(self, tensor: Tensor) -> bool:
        """Whether the optimizer has state of `tensor`."""
        state = self.inner.state.get(tensor, {})
        return bool(state) and all(value is not None for value in state.values())

    def _set_divisor(self, factor: float) -> None:
        self.inner.grad_scale = None  # type: ignore[attr-defined]
        if self._divides and factor != 1.0:
            # torch's fused kernels divide the gradient by this on the way, in fp32.
            device = self.parts[0].master.device
            divisor = torch.full((), 1.0 / factor, dtype=torch.float32, device=device)
            self.inner.grad_scale = divisor  # type: ignore[attr-defined]
            self.inner.found_inf = None  # type: ignore[attr-defined]

    def _offer(self, span: _InUse, used: Sequence[bool], factor: float) -> None:
        """Hang the gradient of each segment that had one on its tensor."""
        grad = self._scaled(span, factor)
        for segment in span.segments:
            if used[segment.pieces[0].parameter]:
                a, b = span.place(segment)
                segment.tensor.grad = _shaped(grad[a:b], segment.tensor)

    def _scaled(self, span: _InUse, factor: float) -> Tensor:
        total = span.total.to(span.master.device, span.master.dtype)
        return total if self._divides or factor == 1.0 else total.mul_(factor)

    # -- state ----------------------------------------------------------------------------

    def _is_stowed(self, part: Part, span: Span, key: str) -> bool:
        """Whether any segment of a span has state on the disk."""
        states = (self.inner.state.get(segment.tensor, {}) for segment in part.within(span))
        return any(key in state and has_no_memory(state[key]) for state in states)

    def stow(self, part: Part) -> None:
        """Put the state of all segments where it rests."""
        for index in range(len(part.spans) if part.moments else 0):
            _InUse(self.inner, part, index, None).end(changed=True)

    def _cut_by_use(self, part: Part, used: Sequence[bool]) -> None:
        """Cut every segment whose parameters differ in whether they had a gradient."""
        whole = []
        for segment in part.segments:
            parts = runs(segment.pieces, lambda piece: used[piece.parameter])
            if len(parts) < 2:
                whole.append(segment)
                continue
            whole += self._cut(part, segment, parts)
        if len(whole) != len(part.segments):
            part.segments = whole
            self._regroup()

    def _cut(self, part: Part, segment: Segment, parts: list[list[Piece]]) -> list[Segment]:
        """Cut one segment, its state with it: tensors by slices, the rest by copies."""
        state = self.inner.state.pop(segment.tensor, None)
        made = []
        for pieces in parts:
            child = part.segment(pieces)
            made.append(child)
            if state:
                a, b = child.first - segment.first, child.end - segment.first
                self.inner.state[child.tensor] = {
                    key: value[a:b] if _is_flat_state(value, segment.tensor) else copied(value)
                    for key, value in state.items()
                }
        return made


class _InUse:
    """One span of a part in memory, its segments bound to it until `end`."""

    def __init__(self, inner: optim.Optimizer, part: Part, index: int, total: Held | None) -> None:
        self._inner = inner
        self._part = part
        self._index = index
        self._start = part.own[0] + part.spans[index][0]
        self.segments = part.within(part.spans[index])
        self._helds = [held for held in (part.target, part.master, total) if held is not None]
        self.master = part.master.take(index)
        self.target = self.master if part.master is part.target else part.target.take(index)
        self.total = self.master if total is None else total.take(index)
        self._total = total
        self._moments = {
            key: held.take(index, fresh=not self._has_stowed(key))
            for key, held in part.moments.items()
        }
        self._bind()

    def place(self, segment: Segment) -> Span:
        """Where a segment lies in the span."""
        return segment.first - self._start, segment.end - self._start

    def _states(self, key: str) -> list[tuple[Segment, dict[str, Any]]]:
        found = [
            (s, self._inner.state[s.tensor]) for s in self.segments if s.tensor in self._inner.state
        ]
        return [(segment, state) for segment, state in found if key in state]

    def _has_stowed(self, key: str) -> bool:
        return any(has_no_memory(state[key]) for _, state in self._states(key))

    def _bind(self) -> None:
        if self._part.master.memory is None:
            for segment in self.segments:
                a, b = self.place(segment)
                segment.tensor.data = self.master[a:b]
        for key, moment in self._moments.items():
            for segment, state in self._states(key):
                if has_no_memory(state[key]):
                    a, b = self.place(segment)
                    state[key] = moment[a:b]

    def end(self, *, changed: bool) -> None:
        """Let everything rest again; `changed` is written."""
        part, index = self._part, self._index
        for key, moment in self._moments.items():
            for segment, state in self._states(key):
                self._stow(segment, state, key, moment)
            part.moments[key].put(index, changed=changed)
        if part.master.memory is None:
            for segment in self.segments:
                segment.tensor.data = without_memory(segment.end - segment.first, part.master.dtype)
        if part.master is not part.target:
            part.master.send(self.master, self.target)
            part.target.put(index, changed=changed)
        part.master.put(index, changed=changed)
        if self._total is not None:
            self._total.put(index, changed=False)

    def _stow(self, segment: Segment, state: dict[str, Any], key: str, moment: Tensor) -> None:
        """Leave one segment's state in its span's memory; the first time it comes from outside."""
        a, b = self.place(segment)
        if state[key].dtype != moment.dtype:
            raise TierError(
                f"{type(self._inner).__name__} keeps {key} as {state[key].dtype}, where a disk has "
                f"room for {moment.dtype}. Write --offload-optimizer cpu."
            )
        if state[key].data_ptr() != moment[a:b].data_ptr():
            moment[a:b] = state[key]
        state[key] = without_memory(b - a, moment.dtype)


def _shaped(grad: Tensor, tensor: Tensor) -> Tensor:
    if tensor.ndim == 1 and tensor.is_contiguous():
        return grad
    return grad.as_strided(tensor.shape, tensor.stride(), grad.storage_offset())


def runs(pieces: Sequence[Piece], mark: Callable[[Piece], Any]) -> list[list[Piece]]:
    """Consecutive pieces of equal mark, together."""
    found: list[list[Piece]] = []
    before: Any = object()
    for piece in pieces:
        now = mark(piece)
        if now != before:
            found.append([])
        found[-1].append(piece)
        before = now
    return found


def _is_flat_state(value: Any, tensor: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == tensor.shape


def copied(value: Any) -> Any:
    """`value`, sharing no memory with it."""
    return value.clone() if isinstance(value, Tensor) else value
