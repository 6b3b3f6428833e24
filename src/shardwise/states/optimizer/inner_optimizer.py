"""Updates the intervals of one or more buckets with an inner copy of the user's optimizer.

An update goes span by span: a span is in use while the next one is read ahead and the one before is
written behind (`offload_read_ahead`). In memory there is one span, the whole interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, optim

from shardwise.states.gradients.unused_parameters import cut_by_use
from shardwise.states.optimizer import offload_read_ahead
from shardwise.states.optimizer.offload_read_ahead import SpanInUse
from shardwise.states.optimizer.optimizer_attributes import FollowedAttributes
from shardwise.states.optimizer.optimizer_kind import bare_copy
from shardwise.states.optimizer.optimizer_lr_and_options import FollowedOptions, ParameterGroup
from shardwise.states.optimizer.step_hooks import without_hooks
from shardwise.states.parameters.update_intervals import UpdateInterval
from shardwise.states.storage.storage import Storage


class InnerOptimizer:
    """A copy of the user's optimizer over the segments of `intervals`: those of one bucket, or of
    all for one that looks across.

    Several intervals have one span each.
    """

    is_users_stepping = False
    """Whether a step of the user's optimizer itself is under way, with all that it needs."""

    def __init__(
        self,
        intervals: list[UpdateInterval],
        groups: list[ParameterGroup],
        *,
        fused: bool,
        leads: bool,
    ) -> None:
        """`fused`: torch's fused kernel updates; `leads`: this is the optimizer's first copy."""
        self.intervals = intervals
        self._groups = groups
        self._divides = fused and all(i.master.dtype == torch.float32 for i in intervals)
        self.inner = self._made()
        device = intervals[0].master.device
        self.options = FollowedOptions(groups, self.inner, device, fused=fused)
        changing = frozenset[str]().union(*(group.kind.attributes for group in groups))
        self.attributes = FollowedAttributes(groups[0].optimizer, self.inner, changing, leads=leads)
        self._regroup()

    def _made(self) -> optim.Optimizer:
        return bare_copy(self._groups[0].optimizer)

    def _regroup(self) -> None:
        """An inner parameter group for each of the user's, its segments in registration order."""
        self.inner.param_groups = []
        for number in self.options.numbers:
            segments = [
                segment
                for interval, group in zip(self.intervals, self._groups, strict=True)
                if group.index == number
                for segment in interval.segments
            ]
            segments.sort(key=lambda segment: segment.pieces[0].parameter)
            self.inner.param_groups.append({"params": [segment.tensor for segment in segments]})
        if hasattr(self.inner, "_params"):  # L-BFGS keeps its one group's apart
            self.inner._params = self.inner.param_groups[0]["params"]

    def options_of(self, group: ParameterGroup) -> dict[str, Any]:
        """The options with which the inner optimizer updates what belongs to `group`."""
        return self.options.of(group.options)

    def read_ahead(self, index: int, sums: Sequence[Storage]) -> None:
        """Start to read span `index` of every interval and of its reduced gradient."""
        offload_read_ahead.read_ahead(self.inner, index, self.intervals, sums)

    def stow(self, interval: UpdateInterval) -> None:
        """Put the state of all segments where it rests."""
        offload_read_ahead.stow(self.inner, interval)

    # -- the update -----------------------------------------------------------------------

    def step(
        self,
        sums: Sequence[Storage],
        used: Sequence[bool],
        factor: float,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Update from the reduced `sums` of each interval times `factor`; `used` is by parameter.

        `then` is called when nothing more is to be read ahead here.
        """
        if not all(used):
            cut = [cut_by_use(self.inner, interval, used) for interval in self.intervals]
            if any(cut):
                self._regroup()
        self._set_divisor(factor)
        rounds = max(len(interval.spans) for interval in self.intervals)
        for index in range(rounds):
            spans = self._taken(index, sums)
            # Only now, so that the reads of this span come first in the queue of the threads.
            if index + 1 < rounds:
                self.read_ahead(index + 1, sums)
            elif then is not None:
                then()
            self._update(spans, used, factor)

    def _taken(self, index: int, sums: Sequence[Storage]) -> list[SpanInUse]:
        """Span `index` of every interval, in memory."""
        pairs = zip(self.intervals, sums, strict=True)
        return [SpanInUse(self.inner, interval, index, total) for interval, total in pairs]

    def step_often(self, evaluate: Callable[[], float], sums: Sequence[Storage]) -> None:
        """Make a step of an optimizer that calls `evaluate` as often as it wants, which offers the
        gradients each time; all of it is in memory for good."""
        spans = self._taken(0, sums)
        self._set_divisor(1.0)
        self._follow()
        self._call(evaluate)
        self.options.record_changes()
        self._end(spans, changed=True)

    def _follow(self) -> None:
        """Take what user code has changed about its optimizer."""
        self.options.follow()
        self.attributes.follow()

    def offer_again(self, sums: Sequence[Storage], used: Sequence[bool], factor: float) -> None:
        """Hang the gradients of another evaluation on the tensors."""
        for interval, total in zip(self.intervals, sums, strict=True):
            grad = total.loaded().to(interval.master.device, interval.master.dtype) * factor
            for segment in interval.segments:
                seen = used[segment.pieces[0].parameter]
                a, b = segment.first - interval.own[0], segment.end - interval.own[0]
                segment.tensor.grad = _shaped(grad[a:b], segment.tensor) if seen else None

    def _update(self, spans: Sequence[SpanInUse], used: Sequence[bool], factor: float) -> None:
        for span in spans:
            self._offer(span, used, factor)
        tensors = [segment.tensor for span in spans for segment in span.segments]
        offered = [tensor for tensor in tensors if tensor.grad is not None]
        changed = bool(offered)
        # Without a gradient too where steps are counted: every copy counts the same.
        if changed or self.options.counts or self.attributes.changing:
            self._follow()
            self._call_for(offered)
            self.options.record_changes()
        self._end(spans, changed=changed)

    def _end(self, spans: Sequence[SpanInUse], *, changed: bool) -> None:
        """Take the gradients off again, and let the spans rest."""
        for span in spans:
            for segment in span.segments:
                segment.tensor.grad = None
            span.end(changed=changed)

    def _call(self, *closure: Callable[[], float]) -> None:
        """Make one call of `step`: of the class's own, not of what a scheduler put before it."""
        with without_hooks(self.inner):
            type(self.inner).step(self.inner, *closure)

    def _call_for(self, offered: Sequence[Tensor]) -> None:
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
            self._call()
            for tensor in offered:
                tensor.grad = None
            for tensor, grad in zip(fresh, grads, strict=True):
                tensor.grad = grad
        self._call()

    def _has_begun(self, tensor: Tensor) -> bool:
        """Whether the optimizer has state of `tensor`."""
        state = self.inner.state.get(tensor, {})
        return bool(state) and all(value is not None for value in state.values())

    def _set_divisor(self, factor: float) -> None:
        self.inner.grad_scale = None  # type: ignore[attr-defined]
        if self._divides and factor != 1.0:
            # torch's fused kernels divide the gradient by this on the way, in fp32.
            device = self.intervals[0].master.device
            divisor = torch.full((), 1.0 / factor, dtype=torch.float32, device=device)
            self.inner.grad_scale = divisor  # type: ignore[attr-defined]
            self.inner.found_inf = None  # type: ignore[attr-defined]

    def _offer(self, span: SpanInUse, used: Sequence[bool], factor: float) -> None:
        """Hang the gradient of each segment that had one on its tensor."""
        grad = self._scaled(span, factor)
        for segment in span.segments:
            if used[segment.pieces[0].parameter]:
                a, b = span.place(segment)
                segment.tensor.grad = _shaped(grad[a:b], segment.tensor)

    def _scaled(self, span: SpanInUse, factor: float) -> Tensor:
        total = span.total.to(span.master.device, span.master.dtype)
        return total if self._divides or factor == 1.0 else total.mul_(factor)


def _shaped(grad: Tensor, tensor: Tensor) -> Tensor:
    if tensor.ndim == 1 and tensor.is_contiguous():
        return grad
    return grad.as_strided(tensor.shape, tensor.stride(), grad.storage_offset())
