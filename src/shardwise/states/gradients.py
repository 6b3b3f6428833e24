"""Gradients: collected per bucket as backward makes them, and reduced beside the rest of it.

autograd makes each gradient as a tensor of its own. When a bucket's last one has arrived they
are copied into its flat buffer at once, and the buffer starts its collective: an all-reduce when
the optimizer state is replicated, else a reduce-scatter. Buckets start in one order on every rank.

    arrive ─▶ collect (flat buffer) ─▶ launch ─▶ settle (the sum lands in `reduced`)

- replicated gradients have a buffer for good: micro-batches add up in it, and it is reduced once
  per step, in place;
- sharded gradients borrow a buffer from a pool for the time of one reduction, after every
  micro-batch; only the rank's own interval stays.

Which gradients will arrive is learned, not assumed: a bucket starts early once as many have come
as in earlier backwards, and the rest start when backward ends. A gradient that comes after its
bucket has started (a branch that was asleep, a segment that reentrant checkpointing ran twice)
finds `param.grad` empty, so it never writes into a buffer in flight; it is kept aside as *late*
and all ranks reduce it together in `step`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from shardwise.collectives import Collectives, Handle
from shardwise.errors import ModelError, UsageError
from shardwise.layout import Bucket
from shardwise.placement import Placement
from shardwise.states.guard import GradientGuard
from shardwise.states.parameters import ReplicatedParameters, view_like

IN_FLIGHT = 4
"""Borrowed buffers that may be on their way at once; the oldest is waited for beyond that."""

PATIENCE = 8
"""Backwards without a gradient after which a parameter is no longer waited for."""

UNLEARNED = 1 << 60
"""More arrivals than any backward has: before the first one nothing starts early."""

_NORM_CHUNK = 1 << 17


@dataclass(eq=False)
class _Collector:
    """What one bucket has gathered so far in this backward and in this step."""

    index: int
    bucket: Bucket
    own: tuple[int, int]
    """The elements whose sum this rank needs: its interval, or all of them."""
    kept: Tensor | None
    """The buffer that replicated gradients rest in."""
    reduced: Tensor
    """The sum over all ranks, of the elements `own`."""
    gaps: list[tuple[int, int]]
    expected: int = UNLEARNED
    """Arrivals to wait for in a backward."""
    remaining: int = UNLEARNED
    collected: bool = False
    """Whether this backward's gradients have left `param.grad`."""
    filled: bool = False
    """Whether `kept` holds gradients of this step."""
    settled: bool = False
    """Whether `reduced` holds a sum of this step."""
    views: dict[int, list[Tensor]] = field(default_factory=dict)


class Gradients:
    """The gradients of all buckets through one step; see the module's docstring."""

    def __init__(
        self,
        parameters: ReplicatedParameters,
        placement: Placement,
        group: Collectives,
        *,
        overlap: bool,
        exact_sum: bool,
        stray: Callable[[str], Exception],
    ) -> None:
        self._parameters = parameters
        self._params = [tracked.parameter for tracked in parameters.tracked]
        self._sharded = placement.is_sharded("gradients")
        self._scatter = placement.is_sharded("optimizer")
        self._group = group
        self._overlap = overlap
        self._exact_sum = exact_sum
        self._stray = stray
        self._guards = [GradientGuard(param) for param in self._params]
        self._pool: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self.collectors = [self._collector(i, b) for i, b in enumerate(parameters.buckets)]
        self._collector_of = {
            slot.parameter: collector
            for collector in self.collectors
            for slot in collector.bucket.slots
        }
        self._arrivals = [0] * len(self._params)
        self._learned = [0] * len(self._params)
        self._absent = [0] * len(self._params)
        self._active = False
        self._reducing = False
        self._empty = False
        self._unknown_weight: Tensor | None = None
        self._cursor = 0
        self._flight: deque[tuple[_Collector, Tensor, Handle]] = deque()
        self.late: dict[int, list[tuple[int, Tensor]]] = {}
        self.used = [False] * len(self._params)
        self._own_norms: list[Tensor] = []
        self._guarded = False
        self._reductions = 0
        self._hooks = [
            param.register_post_accumulate_grad_hook(partial(self._arrived, index))
            for index, param in enumerate(self._params)
        ]

    def _collector(self, index: int, bucket: Bucket) -> _Collector:
        own = bucket.interval(self._group.rank) if self._scatter else (0, bucket.numel)
        flat = self._parameters.flats[index]
        length = own[1] - own[0] if self._sharded else bucket.numel
        memory = self._group.allocate(length, flat.dtype, flat.device)
        kept = None if self._sharded else memory
        reduced = memory if self._sharded else memory[own[0] : own[1]]
        ends = [0, *(slot.end for slot in bucket.slots)]
        starts = [*(slot.start for slot in bucket.slots), bucket.numel]
        gaps = [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
        return _Collector(index, bucket, own, kept, reduced, gaps)

    @property
    def state_bytes(self) -> int:
        """Bytes of gradient that this rank keeps between steps."""
        return sum(
            memory.numel() * memory.element_size()
            for memory in (c.kept if c.kept is not None else c.reduced for c in self.collectors)
        )

    # -- one backward ---------------------------------------------------------------------

    def begin(self, *, last: bool, weight: float | Tensor) -> None:
        """Make ready for a backward.

        `last`: nothing more comes in this step, so replicated gradients may start their way.
        With a `weight` of zero whatever arrives (perhaps NaN) is thrown away.
        """
        self.check_guards()
        for param in self._params:
            param.grad = None
        self._guarded = False
        for collector in self.collectors:
            collector.remaining = collector.expected
            collector.collected = False
        # After a first reduction in a step, sums must not be mixed with parts: reduce each.
        self._reducing = self._sharded or last or self._reductions > 0
        self._empty = not isinstance(weight, Tensor) and weight == 0
        self._unknown_weight = weight if isinstance(weight, Tensor) else None
        self._cursor = 0
        self._arrivals = [0] * len(self._params)
        self._active = True

    def _arrived(self, index: int, param: Tensor) -> None:
        """autograd has added a gradient to `param.grad`."""
        if not self._active:
            param.grad = None
            raise self._stray(self._parameters.tracked[index].alias)
        self._arrivals[index] += 1
        collector = self._collector_of[index]
        collector.remaining -= 1
        if collector.remaining == 0 and self._overlap:
            self._advance()

    def _advance(self) -> None:
        """Start the buckets that are complete, strictly in order."""
        while (
            self._cursor < len(self.collectors) and self.collectors[self._cursor].remaining <= 0
        ):
            self._complete(self.collectors[self._cursor])
            self._cursor += 1

    def finish(self) -> None:
        """Backward has ended: start what has not started, set late gradients aside, learn."""
        for collector in self.collectors[self._cursor :]:
            self._complete(collector)
        self._active = False
        self._set_late_aside()
        self._learn()
        self._reductions += self._reducing

    def abandon(self) -> None:
        """Backward has failed: forget the step, after what is in flight has landed."""
        self._active = False
        self._drain()
        self.clear()

    def guard(self) -> None:
        """Until `clear`, let every touch of `param.grad` raise."""
        for param, guard in zip(self._params, self._guards, strict=True):
            param.grad = guard
        self._guarded = True

    def check_guards(self) -> None:
        """Raise UsageError if user code cleared gradients that have not been used yet."""
        if self._guarded and any(
            param.grad is not guard
            for param, guard in zip(self._params, self._guards, strict=True)
        ):
            raise UsageError(
                "Gradients were cleared between engine.backward and engine.step, by zero_grad() or "
                "param.grad = None, which would not clear what is already on its way. "
                "engine.step() clears by itself: leave zero_grad out, or call it before backward."
            )

    def _complete(self, collector: _Collector) -> None:
        """Collect a bucket's gradients and, where this backward reduces, launch it."""
        collector.collected = True
        if collector.kept is not None and self._reductions == 0:
            self._collect(collector, collector.kept, fresh=not collector.filled)
            collector.filled = True
            buffer = collector.kept
        else:
            buffer = self._borrow(collector)
            self._collect(collector, buffer, fresh=True)
        if self._reducing:
            self._launch(collector, buffer)

    def _collect(self, collector: _Collector, buffer: Tensor, *, fresh: bool) -> None:
        """Move what has arrived out of `param.grad` into `buffer`, in one call per bucket."""
        views = self._views(collector, buffer)
        targets, grads, rest = [], [], []
        for slot, view in zip(collector.bucket.slots, views, strict=True):
            param = self._params[slot.parameter]
            grad, param.grad = param.grad, None
            if grad is None or self._empty:
                rest.append(view)
                continue
            if collector.expected == UNLEARNED:
                self._refuse_sparse(slot.parameter, grad)
            self.used[slot.parameter] = True
            targets.append(view)
            grads.append(self._cleaned(grad))
        self._check_own(grads)
        if fresh:
            rest += [buffer[first:end] for first, end in collector.gaps]
            if targets:
                torch._foreach_copy_(targets, grads)
            if rest:
                torch._foreach_zero_(rest)
        elif targets:
            torch._foreach_add_(targets, grads)

    def _cleaned(self, grad: Tensor) -> Tensor:
        """`grad`, or zeros where the weight, known to the device alone, is zero."""
        if self._unknown_weight is None:
            return grad
        return torch.where(self._unknown_weight == 0, torch.zeros_like(grad), grad)

    def _check_own(self, grads: list[Tensor]) -> None:
        """Keep a number that is not finite if this rank's part is not, to name the rank later."""
        if grads and self._group.size > 1:
            self._own_norms += torch._foreach_norm(grads)

    def _refuse_sparse(self, index: int, grad: Tensor) -> None:
        if grad.layout != torch.strided:
            raise ModelError(
                f"The gradient of {self._parameters.tracked[index].alias} is sparse, which flat "
                "buckets cannot hold. Build its embedding with sparse=False."
            )

    def _views(self, collector: _Collector, buffer: Tensor) -> list[Tensor]:
        """Views of `buffer`, one per slot; buffers live as long as this object, so they are kept."""
        views = collector.views.get(buffer.data_ptr())
        if views is None:
            views = collector.views[buffer.data_ptr()] = [
                view_like(buffer, slot.start, self._params[slot.parameter])
                for slot in collector.bucket.slots
            ]
        return views

    def _set_late_aside(self) -> None:
        for index, (count, param) in enumerate(zip(self._arrivals, self._params, strict=True)):
            if not count or param.grad is None:
                continue
            grad, param.grad = param.grad, None
            if self._empty:
                continue
            self._refuse_sparse(index, grad)
            self.used[index] = True
            self.late.setdefault(self._collector_of[index].index, []).append((index, grad))
        if not self._reducing:
            for number, entries in self.late.items():
                self._add_late(self.collectors[number], entries)
            self.late.clear()

    def _add_late(self, collector: _Collector, entries: list[tuple[int, Tensor]]) -> None:
        assert collector.kept is not None
        views = self._views(collector, collector.kept)
        place = {slot.parameter: view for slot, view in zip(collector.bucket.slots, views, strict=True)}
        for index, grad in entries:
            place[index].add_(grad)

    def _learn(self) -> None:
        """Remember how often each gradient came, and forget those that stay away."""
        for index, count in enumerate(self._arrivals):
            if count:
                self._absent[index] = 0
                self._learned[index] = max(self._learned[index], count)
            elif self._learned[index]:
                self._absent[index] += 1
                if self._absent[index] >= PATIENCE:
                    self._learned[index] = 0
        for collector in self.collectors:
            collector.expected = sum(self._learned[s.parameter] for s in collector.bucket.slots)

    # -- on the way -----------------------------------------------------------------------

    def _launch(self, collector: _Collector, buffer: Tensor) -> None:
        if self._scatter:
            handle = self._group.reduce_scatter(
                buffer, collector.bucket.cuts, exact_sum=self._exact_sum
            )
        else:
            handle = self._group.all_reduce(buffer, exact_sum=self._exact_sum)
        self._flight.append((collector, buffer, handle))

    def _settle_oldest(self) -> None:
        """Wait for the collective that started first and add its sum to `reduced`."""
        collector, buffer, handle = self._flight.popleft()
        handle.wait()
        if buffer is not collector.kept:
            part = buffer[collector.own[0] : collector.own[1]]
            if collector.settled:
                collector.reduced.add_(part)
            else:
                collector.reduced.copy_(part)
            self._give_back(buffer)
        collector.settled = True

    def _drain(self) -> None:
        while self._flight:
            self._settle_oldest()

    def _borrow(self, collector: _Collector) -> Tensor:
        while sum(buffer is not c.kept for c, buffer, _ in self._flight) >= IN_FLIGHT:
            self._settle_oldest()
        like = self._parameters.flats[collector.index]
        spare = self._pool.setdefault((like.dtype, like.device), [])
        if spare:
            return spare.pop()[: collector.bucket.numel]
        largest = max(
            c.bucket.numel
            for c, flat in zip(self.collectors, self._parameters.flats, strict=True)
            if (flat.dtype, flat.device) == (like.dtype, like.device)
        )
        whole = self._group.allocate(largest, like.dtype, like.device)
        return whole[: collector.bucket.numel]

    def _give_back(self, buffer: Tensor) -> None:
        whole = buffer if buffer._base is None else buffer._base
        self._pool[(buffer.dtype, buffer.device)].append(whole)

    # -- the end of a step ----------------------------------------------------------------

    def reduce(self) -> None:
        """Return when `reduced` holds the sums of this step, late gradients left out."""
        if self._reductions == 0:
            for collector in self.collectors:
                assert collector.kept is not None
                self._launch(collector, collector.kept)
            self._reductions = 1
        self._drain()

    def reduce_late(self, numbers: Sequence[int]) -> None:
        """Reduce the late gradients of the buckets `numbers` (alike on all ranks)."""
        for number in numbers:
            collector = self.collectors[number]
            buffer = self._borrow(collector)
            buffer.zero_()
            views = self._views(collector, buffer)
            place = dict(zip((s.parameter for s in collector.bucket.slots), views, strict=True))
            for index, grad in self.late.get(number, []):
                place[index].add_(grad)
            self._launch(collector, buffer)
        self.late.clear()
        self._drain()

    def squared_norm(self) -> Tensor:
        """The sum of squares of this rank's own intervals, as an fp64 scalar on its device."""
        parts = []
        for collector in self.collectors:
            first, end = collector.bucket.interval(self._group.rank)
            offset = collector.own[0]
            parts.append(_squares(collector.reduced[first - offset : end - offset]))
        return torch.stack([part.to(parts[0].device) for part in parts]).sum()

    def nonfinite(self) -> list[int]:
        """The parameters whose reduced gradient is not finite in what this rank holds."""
        bad = set()
        for collector in self.collectors:
            for piece in collector.bucket.pieces(*collector.own):
                a, b = piece.start - collector.own[0], piece.end - collector.own[0]
                if not bool(torch.isfinite(collector.reduced[a:b]).all()):
                    bad.add(piece.parameter)
        return sorted(bad)

    def suspect(self) -> bool:
        """Whether a gradient of this rank alone was not finite in this step."""
        return not all(bool(torch.isfinite(norm)) for norm in self._own_norms)

    def clear(self) -> None:
        """Forget this step; the buffers stay."""
        for collector in self.collectors:
            collector.filled = collector.settled = False
        for param in self._params:
            param.grad = None
        self.late.clear()
        self._own_norms.clear()
        self._guarded = False
        self.used = [False] * len(self._params)
        self._reductions = 0

    def detach(self) -> None:
        """Take the hooks off the parameters, so that another layout can watch them."""
        for hook in self._hooks:
            hook.remove()
        for param in self._params:
            param.grad = None


def _squares(values: Tensor) -> Tensor:
    """The sum of squares in fp64, by chunks: short fp32 sums, so that none drifts."""
    if values.is_complex():
        values = torch.view_as_real(values).view(-1)
    if values.dtype in (torch.bfloat16, torch.float16):
        values = values.float()
    if not values.numel():
        return torch.zeros((), dtype=torch.float64, device=values.device)
    norms = torch._foreach_norm(values.split(_NORM_CHUNK))
    return torch.stack(norms).double().square().sum()
