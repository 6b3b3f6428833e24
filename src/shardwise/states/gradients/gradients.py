"""Gradients: collects them per bucket as backward makes them, and reduces them beside it.

autograd makes each gradient as a tensor of its own. They are moved into their bucket's flat
buffer, but for large ones where the transport sends them from where they are; when the last one
has arrived the bucket starts its collective. Buckets start in one order on every rank. A gradient
goes through these files:

    gradients             counts arrivals, starts buckets in order, sets late gradients aside
    bucket_fill           moves gradients into a bucket's flat buffer
    bucket_reducer        all-reduces or reduce-scatters the buffer
    gradient_accumulator  adds the sum to those of other micro-batches
    gradient_norm         squares it for the global norm, and clips by that
    unreadable_grad        stands in `param.grad` until the step is made

- replicated gradients have a buffer for good: micro-batches add up in it, and it is reduced once
  per step, in place;
- sharded gradients, and all in the exact mode, borrow a buffer for the time of one reduction,
  after every micro-batch; only what the rank updates stays.

Which gradients will arrive is learned, not assumed (`unused_parameters`): a bucket starts early
once as many have come as in earlier backwards, and the rest start when backward ends. A gradient
that comes after its bucket has started (a branch that was asleep, a segment that reentrant
checkpointing ran again) finds `param.grad` empty, so it never writes into a buffer in flight; it is
kept aside as *late* and all ranks reduce it together in `step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence, Set
from functools import partial
from weakref import ref

import torch
from torch import Tensor

from shardwise.comm import Collectives
from shardwise.layout.placement import Placement
from shardwise.states.gradients.bucket_fill import Backward, BucketFill, refuse_sparse
from shardwise.states.gradients.bucket_reducer import BucketReducer
from shardwise.states.gradients.gradient_accumulator import Summation
from shardwise.states.gradients.gradient_norm import GradientNorm
from shardwise.states.gradients.unreadable_grad import GradientGuard
from shardwise.states.gradients.unused_parameters import ExpectedGradients
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.parameters.parameters_at_rest import unguarded
from shardwise.states.storage.storage import Storage
from shardwise.states.storage.storage_factory import StorageFactory

SMALL = 1 << 14
"""Elements up to which gradients wait for their bucket and move together; a larger one moves as
it arrives, while it is in the processor's cache."""


class Gradients:
    """Collects, reduces and guards the gradients of all buckets through one step.

    `used` says by parameter whether it had a gradient in this step, `late` by bucket which came
    too late for it. `stray` makes the error for a backward that the engine does not know of. The
    squares of the buckets `elsewhere` are counted by another rank of the replica.
    """

    def __init__(
        self,
        parameters: Parameters,
        placement: Placement,
        group: Collectives,
        factory: StorageFactory,
        summation: Summation,
        *,
        overlap: bool,
        exact_sum: bool,
        stray: Callable[[str], Exception],
        elsewhere: Set[int] = frozenset(),
    ) -> None:
        self._parameters = parameters
        self._params = [named.parameter for named in parameters.named]
        self._each = summation.in_tree or placement.is_sharded("gradients")
        self._alone = group.size == 1
        self._overlap = overlap
        self._stray = stray
        self._guards = [GradientGuard(param) for param in self._params]
        self._guarded = False
        self.reducer = BucketReducer(
            parameters, placement, group, factory, summation, exact_sum=exact_sum
        )
        self.norm = GradientNorm(self.reducer.buckets, summation, group.rank, elsewhere)
        self._fills = [
            BucketFill(bucket, self.reducer, parameters.named) for bucket in self.reducer.buckets
        ]
        place_of = {
            slot.parameter: (fill, position, slot.numel > SMALL)
            for fill in self._fills
            for position, slot in enumerate(fill.bucket.layout.slots)
        }
        self._place_of = [place_of[index] for index in range(len(self._params))]
        self._expected = ExpectedGradients(len(self._params))
        self._overdue: list[int] = []
        self._unforeseen: list[int] = []
        self._own_norms: list[Tensor] = []
        self._had_late = False
        self.late: dict[int, list[tuple[int, Tensor]]] = {}
        self.used = [False] * len(self._params)
        self.paced = False
        """Whether `start` says when buckets start, since gathers go on beside: a rank that waits
        for the others' gradients while they wait for it in a gather would wait for ever."""
        self.wide = False
        """Whether 16-bit gradients rest in fp32 by now."""
        self._reductions = [0] * len(self._fills)
        self._now = self._fills
        """Those that the backward under way may fill."""
        self._active = False
        self._hooks = [
            param.register_post_accumulate_grad_hook(partial(_arrive, ref(self), index))  # type: ignore[no-untyped-call]
            for index, param in enumerate(self._params)
            if param.requires_grad
        ]
        self._hooked = [param for param in self._params if param.requires_grad]

    @property
    def sums(self) -> list[Storage]:
        """By bucket, the reduced gradient of the elements that this rank updates."""
        return [bucket.reduced for bucket in self.reducer.buckets]

    @property
    def reached(self) -> bool:
        """Whether the last backward brought any gradient."""
        return self._expected.any_arrived

    # -- one backward ---------------------------------------------------------------------

    def begin(
        self,
        *,
        last: bool,
        weight: float | Tensor,
        factor: float | Tensor = 1.0,
        among: Collection[int] | None = None,
        usual: bool = True,
    ) -> None:
        """Make ready for a backward, of the buckets `among` only where that is given; of one that
        is not `usual` nothing is learned.

        `last`: nothing more comes in this step, so replicated gradients may start their way.
        With a `weight` of zero whatever arrives (perhaps NaN) is thrown away; else it is
        multiplied by `factor`.
        """
        self._guarded = False
        self._drop()
        self._put_hooks_last()
        self._now = self._fills
        if among is not None:
            self._now = [self._fills[number] for number in sorted(among)]
        reductions = max((self._reductions[each.bucket.index] for each in self._now), default=0)
        self._backward = Backward(
            # After a first reduction in a step, sums must not be mixed with parts: reduce each.
            reduces=self._each or last or reductions > 0,
            is_first=reductions == 0,
            empty=not isinstance(weight, Tensor) and weight == 0,
            factor=None if isinstance(factor, float) and factor == 1.0 else factor,
            is_zero=weight == 0 if isinstance(weight, Tensor) else None,
        )
        for fill in self._now:
            fill.begin(self._backward)
        self._cursor = 0
        self._usual = usual
        self._overdue.clear()
        self._expected.begin()
        self._active = True

    def _put_hooks_last(self) -> None:
        """Let hooks that user code has registered since run before ours, which takes the gradient
        away."""
        with unguarded():
            for param, handle in zip(self._hooked, self._hooks, strict=True):
                hooks = param._post_accumulate_grad_hooks
                if len(hooks) > 1 and next(reversed(hooks)) != handle.id:
                    # Not move_to_end: torch reads the order of the plain dict inside.
                    hooks[handle.id] = hooks.pop(handle.id)

    def arrived(self, index: int, param: Tensor) -> None:
        """autograd has put a gradient into `param.grad`."""
        if not self._active:
            param.grad = None
            raise self._stray(self._parameters.named[index].name)
        self._expected.arrived(index)
        fill, position, is_large = self._place_of[index]
        if fill.closed:
            self._overdue.append(index)
        elif is_large and fill.take(position):
            self.used[index] = True
        fill.remaining -= 1
        if fill.remaining == 0 and self._overlap and not self.paced:
            # Not this bucket at once: ranks complete buckets in different orders, and start them in
            # one.
            self._advance()

    def bring(self) -> None:
        """What has been put into `param.grad` by other means than backward has arrived."""
        for index, param in enumerate(self._params):
            if param.grad is not None:
                self.arrived(index, param)

    def _advance(self) -> None:
        """Start the buckets that are complete, strictly in order."""
        while self._cursor < len(self._now) and self._now[self._cursor].remaining <= 0:
            self._complete(self._now[self._cursor])
            self._cursor += 1

    def start(self, numbers: Sequence[int]) -> None:
        """Start the buckets `numbers` now, where `paced`; alike on all ranks."""
        if self._active and self._overlap:
            for number in numbers:
                if not self._fills[number].closed:
                    self._complete(self._fills[number])

    def finish(self) -> None:
        """Backward has ended: start what has not started, set late gradients aside, learn."""
        for fill in self._now:
            if not fill.closed:
                self._complete(fill)
            self._reductions[fill.bucket.index] += self._backward.reduces
        self._active = False
        self._set_late_aside()
        self._learn()

    def abandon(self) -> None:
        """Backward has failed: forget the step, after what is in flight has landed."""
        self._active = False
        for fill in self._fills:
            fill.abandon()
        for _ in self.reducer.drain():  # other ranks write into these buffers until then
            pass
        self.clear()

    def _complete(self, fill: BucketFill) -> None:
        """Collect what a bucket still lacks and, where this backward reduces, launch it."""
        found, grads = fill.complete()
        for index in found:
            self.used[index] = True
        self._probe(grads)  # before others need the interpreter, to send the bucket
        fill.launch()

    def _probe(self, grads: list[Tensor]) -> None:
        """Look whether this rank's own gradients are finite, to name the rank if the sum is not.

        Only at small tensors (biases, norms): what is not finite in backward reaches those of
        earlier layers.
        """
        grads = [grad for grad in grads if grad.numel()]
        if grads and not self._alone:
            # The largest element, whose square is not made: a finite one must not overflow here.
            self._own_norms += torch._foreach_norm(grads, math.inf)

    def _set_late_aside(self) -> None:
        """Keep what arrived after its bucket had been collected."""
        if self._overdue:
            # A gradient that nobody counted on completes the count of a bucket that lacks others.
            self._unforeseen += self._expected.unforeseen()
        for index in dict.fromkeys(self._overdue):
            param = self._params[index]
            grad, param.grad = param.grad, None
            if grad is None or self._backward.empty:
                continue
            refuse_sparse(self._parameters.named[index], grad)
            self.used[index] = True
            self._had_late = True
            number = self._place_of[index][0].bucket.index
            self.late.setdefault(number, []).append((index, self._backward.weighted(grad)))
        if not self._backward.reduces:
            for number, entries in self.late.items():
                kept = self._fills[number].bucket.kept
                assert kept is not None
                self._fills[number].add(kept, entries)
            self.late.clear()

    def _learn(self) -> None:
        """Expect in the next backwards what has come in this one."""
        arriving = (index for fill in self._now for index in fill.indices)
        if self._usual and self._expected.learn(arriving):
            for fill in self._now:
                fill.expected = self._expected.expected(fill.indices)

    # -- between backward and step --------------------------------------------------------

    def guard(self) -> None:
        """Until the next `begin` or `clear`, let every touch of `param.grad` raise."""
        with unguarded():
            for param, guard in zip(self._params, self._guards, strict=True):
                param.grad = guard
        self._guarded = True

    def were_cleared(self) -> bool:
        """Whether user code has cleared gradients since `guard`."""
        if not self._guarded:
            return False
        with unguarded():
            pairs = zip(self._params, self._guards, strict=True)
            return any(param.grad is not guard for param, guard in pairs)

    # -- the end of a step ----------------------------------------------------------------

    def reduce(self) -> None:
        """Return when the sums of this step have come to rest, late gradients left out."""
        for bucket in self.reducer.buckets:
            if self._reductions[bucket.index] == 0:
                assert bucket.kept is not None
                self.reducer.launch(bucket, bucket.kept)
                self._reductions[bucket.index] = 1
        self.norm.follow(self.reducer.drain())

    def reduce_late(self, numbers: Sequence[int]) -> None:
        """Reduce the late gradients of the buckets `numbers` (alike on all ranks)."""
        for number in numbers:
            fill = self._fills[number]
            buffer = self.reducer.borrow(fill.bucket)
            buffer.zero_()
            fill.add(buffer, self.late.get(number, []))
            self.reducer.launch(fill.bucket, buffer)
        self.late.clear()
        # Not all of them come by `drain`: borrowing many buffers has settled some on the way.
        self.norm.forget(numbers)
        self.norm.follow(self.reducer.drain())

    def unforeseen_names(self) -> list[str]:
        """The parameters whose gradients made others late on this rank, in order."""
        named = self._parameters.named
        return [named[index].name for index in sorted(set(self._unforeseen))]

    def suspect(self) -> bool | None:
        """Whether a gradient of this rank alone was not finite in this step; None where that is not
        known, since only small tensors are looked at."""
        if not all(bool(torch.isfinite(norm)) for norm in self._own_norms):
            return True
        if self._alone:
            return None  # not looked at: what it makes is the sum
        used = [p for p, used in zip(self._params, self.used, strict=True) if used]
        return None if any(p.numel() > SMALL for p in used) or self._had_late else False

    def widen(self) -> None:
        """Let 16-bit gradients rest in fp32 from the next step on; alike on all ranks."""
        self.wide = True
        self.reducer.widen()

    def clear(self) -> None:
        """Forget this step; the buffers stay."""
        for fill in self._fills:
            fill.filled = False
        self.reducer.clear()
        self.norm.clear()
        self._drop()
        self.late.clear()
        self._own_norms.clear()
        self._had_late = False
        self._unforeseen.clear()
        self._guarded = False
        self.used = [False] * len(self._params)
        self._reductions = [0] * len(self._fills)

    def detach(self) -> None:
        """Take the hooks off the parameters, so that another layout or plain autograd has them."""
        for hook in self._hooks:
            hook.remove()
        self._drop()

    def _drop(self) -> None:
        """Let no parameter have a gradient."""
        with unguarded():
            for param in self._params:
                param.grad = None


def _arrive(gradients: ref[Gradients], index: int, param: Tensor) -> None:
    """The hook on a parameter; it does not keep an engine alive that nobody holds any more."""
    alive = gradients()
    if alive is not None:
        alive.arrived(index, param)
