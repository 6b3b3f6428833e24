"""Gradients: collects them per bucket while backward makes them, and reduces them in parallel.

autograd makes each gradient as a tensor of its own. They are moved into their bucket's flat
buffer, except for large ones that the transport sends from where they are. A bucket starts its
collective when the last gradient has arrived; buckets start in the same order on every rank.

    gradients           counts arrivals, starts buckets in order, sets late gradients aside
    bucket              collects the gradients of one bucket, reduces them, keeps the sum
    reduction_queue     the buckets in a collective, and the buffers that they borrow
    gradient_sum        adds the sums of several micro-batches
    gradient_norm       squares sums for the global norm, and clips by that
    unreadable_grad     stands in for `param.grad` until the step is made

Which gradients will arrive is learned, not assumed (`expected_gradients`): a bucket starts early
once as many have arrived as in earlier backwards, and the rest start when backward ends. A gradient
may arrive after its bucket has started (a branch that was unused before, a segment that reentrant
checkpointing ran again). It finds `param.grad` empty, so it never writes into a buffer in flight.
It is set aside as *late*, and all ranks reduce it together in `step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from functools import partial
from weakref import ref

import torch
from torch import Tensor

from shardwise.comm import Collectives, Sum
from shardwise.layout.placement import Placement
from shardwise.model.precision import NARROW
from shardwise.states.gradients import bucket as bucket_module
from shardwise.states.gradients.bucket import Backward, BucketState, GradientBucket
from shardwise.states.gradients.expected_gradients import ExpectedGradients
from shardwise.states.gradients.gradient_sum import GradientSum, Summation, TreeSum
from shardwise.states.gradients.reduction_queue import ReductionQueue
from shardwise.states.gradients.unreadable_grad import GradientGuard
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.parameters.parameters_at_rest import unguarded
from shardwise.states.storage.storage import MemoryStorage
from shardwise.states.storage.storage_factory import StorageFactory


class Gradients:
    """Collects, reduces and guards the gradients of all buckets through one step.

    `used` says by parameter whether it had a gradient in this step, `late` by bucket which ones
    arrived after its collective. `stray` makes the error for a backward that the engine does not
    know of. Another rank of the replica counts the squares of the buckets `elsewhere`.
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
        self._reduces_each = summation.in_tree or placement.is_sharded("gradients")
        self._alone = group.size == 1
        self._overlap = overlap
        self._stray = stray
        self._guards = [GradientGuard(param) for param in self._params]
        self._guarded = False
        self.queue, self.buckets = _make_buckets(
            parameters,
            placement,
            group,
            factory,
            summation,
            exact_sum=exact_sum,
            elsewhere=elsewhere,
        )
        slot_of = {
            index: (bucket, place)
            for bucket in self.buckets
            for place, index in enumerate(bucket.indices)
        }
        self._slot_of = [slot_of[index] for index in range(len(self._params))]
        self._expected = ExpectedGradients(len(self._params))
        self._unforeseen: list[int] = []
        self._own_norms: list[Tensor] = []
        self._had_late = False
        self.late: dict[int, list[tuple[int, Tensor]]] = {}
        self.used = [False] * len(self._params)
        self.paced = False
        """If True, only `start` launches buckets. Gathers run in parallel, so launching a bucket
        from the hook could deadlock: a rank would wait for the others' gradients while they wait
        for it in a gather."""
        self.wide = False
        """Whether 16-bit gradients are kept in fp32 by now."""
        self._now = self.buckets
        """Those that the backward under way may fill."""
        self._active = False
        self._hooked = [param for param in self._params if param.requires_grad]
        self._hooks = [
            param.register_post_accumulate_grad_hook(partial(_arrive, ref(self), index))  # type: ignore[no-untyped-call]
            for index, param in enumerate(self._params)
            if param.requires_grad
        ]

    @property
    def reached(self) -> bool:
        """Whether the last backward brought any gradient."""
        return any(self._expected.arrivals)

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
        """Get ready for a backward; of the buckets `among` only, if given.

        Nothing is learned from one that is not `usual`. `last`: no other backward follows in this
        step, so replicated gradients may be sent. With a `weight` of zero all gradients (perhaps
        NaN) are thrown away; else they are multiplied by `factor`.
        """
        self._guarded = False
        self._drop()
        self._put_hooks_last()
        self._now = self.buckets
        if among is not None:
            self._now = [self.buckets[number] for number in sorted(among)]
        is_first = not any(bucket.is_awaited for bucket in self._now)
        self._backward = Backward(
            # After the first reduction in a step, sums must not be mixed with parts: reduce each.
            reduces=self._reduces_each or last or not is_first,
            is_first=is_first,
            empty=not isinstance(weight, Tensor) and weight == 0,
            factor=None if isinstance(factor, float) and factor == 1.0 else factor,
            is_zero=weight == 0 if isinstance(weight, Tensor) else None,
        )
        for bucket in self._now:
            bucket.begin(self._backward)
        self._cursor = 0
        self._usual = usual
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
        """Note that autograd has put a gradient into `param.grad`."""
        if not self._active:
            param.grad = None
            raise self._stray(self._parameters.named[index].name)
        self._expected.arrivals[index] += 1
        bucket, place = self._slot_of[index]
        if bucket.mark_ready(place) and self._overlap and not self.paced:
            # Not this bucket at once: ranks complete buckets in different orders, and must start
            # them in the same one.
            while self._cursor < len(self._now) and self._now[self._cursor].remaining <= 0:
                self._launch(self._now[self._cursor])
                self._cursor += 1

    def take_all(self) -> None:
        """Note all gradients that something other than backward has put into `param.grad`."""
        for index, param in enumerate(self._params):
            if param.grad is not None:
                self.arrived(index, param)

    def start(self, numbers: Sequence[int]) -> None:
        """Start the buckets `numbers` now, where `paced`; the same ones on all ranks."""
        if self._active and self._overlap:
            for number in numbers:
                if self.buckets[number].state is BucketState.FILLING:
                    self._launch(self.buckets[number])

    def _launch(self, bucket: GradientBucket) -> None:
        small = bucket.collect()
        for index in bucket.used:
            self.used[index] = True
        # Before the launch: others need the interpreter then, to send the bucket.
        if not self._alone and (small := [grad for grad in small if grad.numel()]):
            # Only biases and norms, in order to name the rank if the sum is not finite: what is not
            # finite in backward reaches those of earlier layers. The largest element, not the sum
            # of squares: a finite one must not overflow here.
            self._own_norms += torch._foreach_norm(small, math.inf)
        bucket.launch()

    def finish(self) -> None:
        """Backward has ended: start the other buckets, set late gradients aside, learn."""
        for bucket in self._now:
            if bucket.state is BucketState.FILLING:
                self._launch(bucket)
        self._active = False
        late = [bucket for bucket in self.buckets if bucket.late]
        if late:
            # A gradient that nobody counted on completes the count of a bucket that lacks others.
            self._unforeseen += self._expected.unforeseen()
        for bucket in late:
            found = bucket.take_late(self._backward)
            for index, _ in found:
                self.used[index] = True
            self._had_late = self._had_late or bool(found)
            if found and self._backward.reduces:
                self.late.setdefault(bucket.index, []).extend(found)
            elif found:
                bucket.hold_late(found)
        # Expect in the next backwards what has arrived in this one.
        arriving = (index for bucket in self._now for index in bucket.indices)
        if self._usual and self._expected.learn(arriving):
            for bucket in self._now:
                bucket.expected = self._expected.count(bucket.indices)

    def abandon(self) -> None:
        """Forget the step, after what is in flight has arrived: backward has failed."""
        self._active = False
        for bucket in self.buckets:
            bucket.abandon()
        for _ in self.queue.drain():  # other ranks write into these buffers until then
            pass
        self.clear()

    # -- between backward and step --------------------------------------------------------

    def guard(self) -> None:
        """Let every use of `param.grad` raise, until the next `begin` or `clear`."""
        with unguarded():
            for param, guard in zip(self._params, self._guards, strict=True):
                param.grad = guard
        self._guarded = True

    def were_cleared(self) -> bool:
        """Return whether user code has cleared gradients since `guard`."""
        if not self._guarded:
            return False
        with unguarded():
            pairs = zip(self._params, self._guards, strict=True)
            return any(param.grad is not guard for param, guard in pairs)

    # -- the end of a step ----------------------------------------------------------------

    def reduce(self) -> None:
        """Wait for the sums of this step, without late gradients."""
        for bucket in self.buckets:
            if not bucket.is_awaited:
                bucket.launch_held()
        self._wait()

    def reduce_late(self, numbers: Sequence[int]) -> None:
        """Reduce the late gradients of the buckets `numbers` (the same ones on all ranks)."""
        for number in numbers:
            self.buckets[number].launch_late(self.late.get(number, []))
        self.late.clear()
        self._wait()

    def _wait(self) -> None:
        """Wait for all sums; square each while others are still in flight."""
        for number in self.queue.drain():
            bucket = self.buckets[number]
            if bucket.counts and bucket.state is BucketState.SUMMED:
                bucket.square()

    def squared(self) -> Tensor:
        """Return the sum of squares of this rank's own intervals: an fp64 scalar on its device, or
        the row of an exact sum."""
        parts = [bucket.square() for bucket in self.buckets if bucket.counts]
        if not parts:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack([part.to(parts[0].device) for part in parts]).sum(0)

    def squared_in_fp64(self) -> Tensor:
        """Return the same where squares of fp32 numbers overflow; slower."""
        parts = [bucket.square_in_fp64() for bucket in self.buckets if bucket.counts]
        return torch.stack(parts).sum(0) if parts else torch.zeros((), dtype=torch.float64)

    def forget_squares(self, numbers: Iterable[int]) -> None:
        """Square the sums of the buckets `numbers` again: other code has changed them."""
        for number in numbers:
            self.buckets[number].forget_squares()

    def nonfinite(self) -> list[int]:
        """Return the parameters whose reduced gradient is not finite on this rank."""
        return sorted(set[int]().union(*(bucket.nonfinite() for bucket in self.buckets)))

    def unforeseen_names(self) -> list[str]:
        """Return the parameters whose gradients made others late on this rank, in order."""
        named = self._parameters.named
        return [named[index].name for index in sorted(set(self._unforeseen))]

    def suspect(self) -> bool | None:
        """Return whether a gradient of this rank alone was not finite in this step; None if that
        is unknown, because only small tensors are checked."""
        if not all(bool(torch.isfinite(norm)) for norm in self._own_norms):
            return True
        if self._alone:
            return None  # not checked: its own gradients are the sum
        used = [p for p, used in zip(self._params, self.used, strict=True) if used]
        large = any(p.numel() > bucket_module.SMALL for p in used)
        return None if large or self._had_late else False

    @property
    def state_bytes(self) -> int:
        """Bytes of gradient that this rank keeps between steps."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def widen(self) -> None:
        """Keep 16-bit gradients in fp32 from the next step on; called on all ranks.

        Done once steps turn out to have several micro-batches: their sum would soon be too large
        for 16 bits to add another one to.
        """
        self.wide = True
        for bucket in self.buckets:
            bucket.widen()
        self.queue.forget_views()

    def clear(self) -> None:
        """Forget this step; the buffers stay."""
        self.queue.trim()
        for bucket in self.buckets:
            bucket.consume()
        self._drop()
        self.late.clear()
        self._own_norms.clear()
        self._had_late = False
        self._unforeseen.clear()
        self._guarded = False
        self.used = [False] * len(self._params)

    def detach(self) -> None:
        """Remove the hooks, so that another layout or plain autograd has the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._drop()

    def _drop(self) -> None:
        """Clear `param.grad` on every parameter."""
        with unguarded():
            for param in self._params:
                param.grad = None


def _arrive(gradients: ref[Gradients], index: int, param: Tensor) -> None:
    """Run as the hook on a parameter; a weak reference, so that hooks keep no engine alive."""
    alive = gradients()
    if alive is not None:
        alive.arrived(index, param)


def _make_buckets(
    parameters: Parameters,
    placement: Placement,
    group: Collectives,
    factory: StorageFactory,
    summation: Summation,
    *,
    exact_sum: bool,
    elsewhere: Set[int],
) -> tuple[ReductionQueue, list[GradientBucket]]:
    """Allocate what every bucket keeps: the sum of what this rank updates, or the whole buffer."""
    layouts, scatters = parameters.buckets, placement.is_sharded("optimizer")
    borrows = summation.in_tree or placement.is_sharded("gradients")
    owns = [b.interval(group.rank) if scatters else (0, b.numel) for b in layouts]
    kinds = [parameters.kind(index) for index in range(len(layouts))]
    wide = [(torch.float32 if d in NARROW else d, where) for d, where in kinds]
    if summation.in_tree and exact_sum:
        kinds = wide  # rounded to 16 bits in between, sums would depend on where that is
    kept: list[Tensor | None] = [None] * len(layouts)
    totals: list[GradientSum]
    if borrows:
        # A disk keeps 16-bit sums as wide as they will be needed. Not those of the tree: they are
        # rounded in the same way wherever they are made.
        widened = factory.on_disk and not summation.in_tree
        depth = max(len(summation.fan_ins), 1)
        lengths = [end - first for first, end in owns for _ in range(depth)]
        each = [kind for kind in (wide if widened else kinds) for _ in range(depth)]
        levels = iter(factory.make("gradients", lengths, each, width=min(depth, 2)))
        totals = [
            TreeSum([next(levels) for _ in range(depth)], summation.fan_ins, device)
            if summation.in_tree
            else GradientSum(next(levels))
            for _, device in kinds
        ]
    else:
        buffers = [group.allocate(b.numel, *kind) for b, kind in zip(layouts, kinds, strict=True)]
        kept = [*buffers]
        totals = [
            GradientSum(MemoryStorage(buffer[first:end]))
            for buffer, (first, end) in zip(buffers, owns, strict=True)
        ]
    longest: dict[tuple[torch.dtype, torch.device], int] = {}
    for layout, kind in zip(layouts, kinds, strict=True):
        longest[kind] = max(longest.get(kind, 0), layout.numel)
    how = Sum(exact_sum, summation.in_tree)
    queue = ReductionQueue(group, how, longest, scatters=scatters)
    buckets = [
        GradientBucket(
            index,
            layout,
            [parameters.named[slot.parameter] for slot in layout.slots],
            owns[index],
            kinds[index],
            kept[index],
            totals[index],
            summation.square,
            queue,
            counts=index not in elsewhere,
        )
        for index, layout in enumerate(layouts)
    ]
    return queue, buckets
