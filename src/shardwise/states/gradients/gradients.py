"""Collects gradients in buckets during the backward pass, and reduces full buckets in parallel.

autograd produces each gradient as a separate tensor. Gradients are copied into their bucket's flat
buffer, except for large ones that the transport sends without a copy. A bucket's collective starts
when its last gradient has arrived. Buckets are launched in the same order on every rank.

`expected_gradients.py` predicts from earlier backward passes which gradients will arrive. A bucket
is launched early once the expected number has arrived. The other buckets are launched when the
backward pass ends.

A gradient may arrive after its bucket has been launched: from a branch that was unused in earlier
passes, or from a segment that reentrant checkpointing ran again. autograd always writes such a
gradient to `param.grad`, never into a buffer in flight. The gradient is set aside as *late*, and
all ranks reduce it together in `step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from weakref import ref

import torch
from torch import Tensor

from shardwise.comm import Sum
from shardwise.layout.bucket_layout import DATA
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
from shardwise.states.shard_groups import ShardGroups
from shardwise.states.storage.storage import MemoryStorage
from shardwise.states.storage.storage_factory import StorageFactory, TensorKind


class Gradients:
    """Collects, reduces and guards the gradients of all buckets throughout a step.

    `stray` creates the exception for a backward pass that the engine did not start. `elsewhere`
    lists the buckets whose squares another rank of the replica counts.
    """

    def __init__(
        self,
        parameters: Parameters,
        placement: Placement,
        groups: ShardGroups,
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
        self._alone = groups.data.size == 1
        self._overlap = overlap
        self._stray = stray
        self._guards = [GradientGuard(param) for param in self._params]
        self._guarded = False
        self.queues, self.buckets = _make_buckets(
            parameters,
            placement,
            groups,
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
        """Bucket index -> gradients that arrived after its launch, each with its parameter's index.
        """
        self.used = [False] * len(self._params)
        """For each parameter, whether it had a gradient in this step."""
        self.paced = False
        """If True, only `start` launches buckets. Gathers run in parallel, so launching a bucket
        from the hook could deadlock: a rank would wait for the others' gradients while they wait
        for it in a gather."""
        self.wide = False
        """True if `widen` was called, so that 16-bit gradients are stored in fp32."""
        self._filling = self.buckets
        """The buckets that the current backward pass may fill."""
        self._in_backward = False
        self._hooked = [param for param in self._params if param.requires_grad]
        self._hooks = [
            param.register_post_accumulate_grad_hook(partial(_arrive, ref(self), index))  # type: ignore[no-untyped-call]
            for index, param in enumerate(self._params)
            if param.requires_grad
        ]

    @property
    def patient(self) -> bool:
        """Whether this rank may wait for a sum during its backward pass (see `ReductionQueue`)."""
        return all(queue.patient for queue in self.queues)

    @patient.setter
    def patient(self, patient: bool) -> None:
        for queue in self.queues:
            queue.patient = patient

    def _drain(self) -> Iterator[int]:
        """Wait for all launches. Yield each bucket's index once its sum is complete."""
        for queue in self.queues:
            queue.advance()
        for queue in self.queues:
            yield from queue.drain()

    @property
    def reached(self) -> bool:
        """True if any gradient arrived in the last backward pass."""
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
        """Begin a backward pass.

        Args:
            last: True if no other backward pass follows in this step, so that replicated gradients
                may be sent.
            weight: Weight of the loss. If it is zero, all gradients (possibly NaN) are discarded.
            factor: Factor for all gradients.
            among: Indices of the buckets that this backward pass may fill; None for all.
            usual: True to learn from this backward pass which gradients will arrive in later ones.
        """
        self._guarded = False
        self._drop()
        self._put_hooks_last()
        self._filling = self.buckets
        if among is not None:
            self._filling = [self.buckets[number] for number in sorted(among)]
        is_first = not any(bucket.was_launched for bucket in self._filling)
        self._backward = Backward(
            # After a step's first reduction, a kept buffer holds sums over all ranks. No gradient
            # of this rank can be added to it, so every later backward pass reduces its own.
            reduces=self._reduces_each or last or not is_first,
            is_first=is_first,
            empty=not isinstance(weight, Tensor) and weight == 0,
            factor=None if isinstance(factor, float) and factor == 1.0 else factor,
            is_zero=weight == 0 if isinstance(weight, Tensor) else None,
        )
        # Experts also get gradients of other ranks' tokens, which count if this rank's loss does
        # not. Its own part is then zero (`parallel/expert/router_losses.py`).
        self._of_experts = self._backward
        if self._backward.empty or self._backward.is_zero is not None:
            self._of_experts = replace(self._backward, empty=False, is_zero=None)
        for bucket in self._filling:
            bucket.begin(self._backward_of(bucket))
        self._cursor = 0
        self._usual = usual
        self._expected.begin()
        self._in_backward = True

    def _backward_of(self, bucket: GradientBucket) -> Backward:
        """Return the settings of the current backward pass for `bucket`."""
        return self._backward if bucket.layout.axis == DATA else self._of_experts

    def _put_hooks_last(self) -> None:
        """Move the engine's hooks behind any hooks that user code has registered since.

        The engine's hook removes `param.grad`, which the user's hooks may need to read.
        """
        with unguarded():
            for param, handle in zip(self._hooked, self._hooks, strict=True):
                hooks = param._post_accumulate_grad_hooks
                if len(hooks) > 1 and next(reversed(hooks)) != handle.id:
                    # move_to_end does not work here: torch reads the order of the underlying plain
                    # dict.
                    hooks[handle.id] = hooks.pop(handle.id)

    def arrived(self, index: int, param: Tensor) -> None:
        """Record that autograd has accumulated a gradient of parameter `index` in `param.grad`."""
        if not self._in_backward:
            param.grad = None
            raise self._stray(self._parameters.named[index].name)
        self._expected.arrivals[index] += 1
        bucket, place = self._slot_of[index]
        if bucket.mark_ready(place) and self._overlap and not self.paced:
            # Launch buckets in order instead of this one at once: ranks may complete buckets in
            # different orders, but must start collectives in the same order.
            while self._cursor < len(self._filling) and self._filling[self._cursor].remaining <= 0:
                self._launch(self._filling[self._cursor])
                self._cursor += 1

    def take_all(self) -> None:
        """Collect gradients that code other than autograd has put into `param.grad`."""
        for index, param in enumerate(self._params):
            if param.grad is not None:
                self.arrived(index, param)

    def start(self, numbers: Sequence[int]) -> None:
        """Launch the reductions of the buckets in `numbers`, which must be the same on every rank.

        Used only if `paced` is true.
        """
        if self._in_backward and self._overlap:
            for number in numbers:
                # Not every bucket takes part in this backward pass.
                if self.buckets[number].state is BucketState.FILLING:
                    self._launch(self.buckets[number])

    def _launch(self, bucket: GradientBucket) -> None:
        small = bucket.collect()
        for index in bucket.used:
            self.used[index] = True
        # Compute norms before the launch, after which other threads need the GIL to send the
        # bucket.
        if not self._alone and (small := [grad for grad in small if grad.numel()]):
            # These norms identify the rank at fault if the sum is not finite. Checking small
            # gradients (biases and normalisation weights) suffices, because a NaN or infinity in
            # the backward pass spreads to earlier layers. Use the maximum norm, because a sum of
            # squares of finite numbers could overflow.
            self._own_norms += torch._foreach_norm(small, math.inf)
        bucket.launch()

    def finish(self) -> None:
        """Finish a backward pass: launch the remaining buckets and set late gradients aside.

        Also updates which gradients are expected in later backward passes.
        """
        for bucket in self._filling:
            if bucket.state is BucketState.FILLING:
                self._launch(bucket)
        self._in_backward = False
        late = [bucket for bucket in self.buckets if bucket.late]
        if late:
            # An unexpected gradient was counted as an expected one. It launched a bucket that still
            # lacked other gradients, which is why those were late.
            self._unforeseen += self._expected.unforeseen()
        for bucket in late:
            entries = bucket.take_late(self._backward_of(bucket))
            for index, _ in entries:
                self.used[index] = True
            self._had_late = self._had_late or bool(entries)
            if entries and self._backward.reduces:
                self.late.setdefault(bucket.index, []).extend(entries)
            elif entries:
                bucket.hold_late(entries)
        # Expect the same gradients in the next backward passes.
        arriving = (index for bucket in self._filling for index in bucket.indices)
        if self._usual and self._expected.learn(arriving):
            for bucket in self._filling:
                bucket.expected = self._expected.count(bucket.indices)

    def abandon(self) -> None:
        """Discard the gradients of a step whose backward pass failed.

        Waits until the collectives in flight have completed.
        """
        self._in_backward = False
        for bucket in self.buckets:
            bucket.abandon()
        # Wait for the collectives in flight, because other ranks may still write into their
        # buffers.
        for _ in self._drain():
            pass
        self.clear()

    def forget_calls(self) -> None:
        """Discard all collectives in flight, because their transport no longer exists.

        Complete sums stay as they are. After this, `abandon` has no collectives to wait for.
        """
        for queue in self.queues:
            queue.forget_calls()
        for bucket in self.buckets:
            bucket.forget_calls()

    def follow_group(self) -> None:
        """Use this rank's new index in a group that has lost ranks."""
        for queue in self.queues:
            queue.rank = queue.group.rank
        for bucket in self.buckets:
            bucket.follow_group()

    # -- between backward and step --------------------------------------------------------

    def guard(self) -> None:
        """Make every use of `param.grad` raise until the next `begin` or `clear`."""
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
        """Complete the sums of this step. Late gradients are not included."""
        for bucket in self.buckets:
            if not bucket.was_launched:
                bucket.launch_held()
        self._wait()

    def reduce_late(self, numbers: Sequence[int]) -> None:
        """Reduce the late gradients of the buckets `numbers`, which are the same on all ranks."""
        for number in numbers:
            self.buckets[number].launch_late(self.late.get(number, []))
        self.late.clear()
        self._wait()

    def _wait(self) -> None:
        """Wait for all sums. Square each sum while others are still in flight."""
        for number in self._drain():
            bucket = self.buckets[number]
            if bucket.counts and bucket.state is BucketState.SUMMED:
                bucket.square()

    def squared(self) -> Tensor:
        """Return the sum of squares over this rank's own intervals.

        It is an fp64 scalar on the gradients' device or, in the exact mode, a row of exact sums.
        """
        parts = [bucket.square() for bucket in self.buckets if bucket.counts]
        if not parts:
            return torch.zeros((), dtype=torch.float64)
        if len(parts) == 1:
            return parts[0]
        return torch.stack([part.to(parts[0].device) for part in parts]).sum(0)

    def squared_in_fp64(self) -> Tensor:
        """Return the sum of squares, computed in fp64 and moved to the CPU.

        This is slower than `squared`, but does not overflow.
        """
        parts = [bucket.square_in_fp64() for bucket in self.buckets if bucket.counts]
        return torch.stack(parts).sum(0) if parts else torch.zeros((), dtype=torch.float64)

    def forget_squares(self, numbers: Iterable[int]) -> None:
        """Invalidate the cached squares of buckets `numbers`, whose sums have changed."""
        for number in numbers:
            self.buckets[number].forget_squares()

    def nonfinite(self) -> list[int]:
        """Return the indices of parameters whose reduced gradient is not finite on this rank."""
        return sorted(set[int]().union(*(bucket.nonfinite() for bucket in self.buckets)))

    def unforeseen_names(self) -> list[str]:
        """Return the names of parameters whose unexpected gradients caused others to be late."""
        named = self._parameters.named
        return [named[index].name for index in sorted(set(self._unforeseen))]

    def suspect(self) -> bool | None:
        """Return whether this rank's own gradients contained a NaN or an infinity in this step.

        Returns None if that is unknown, because only small gradients are checked.
        """
        if not all(bool(torch.isfinite(norm)) for norm in self._own_norms):
            return True
        if self._alone:
            return None  # not checked, because the sum consists of this rank's gradients only
        # `_launch` checks neither large nor late gradients, so one of these may be at fault.
        used = [p for p, used in zip(self._params, self.used, strict=True) if used]
        large = any(p.numel() > bucket_module.SMALL for p in used)
        return None if large or self._had_late else False

    @property
    def state_bytes(self) -> int:
        """Size in bytes of the memory that this rank's gradients occupy between steps."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def widen(self) -> None:
        """Store 16-bit gradients in fp32 from the next step on. Call on all ranks.

        Needed if steps have several micro-batches: a 16-bit sum soon becomes so large that adding
        another gradient rounds most of that gradient away.
        """
        self.wide = True
        for bucket in self.buckets:
            bucket.widen()
        for queue in self.queues:
            queue.forget_views()

    def clear(self) -> None:
        """Discard the gradients of this step, but keep the buffers."""
        for queue in self.queues:
            queue.trim()
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
        """Remove the hooks, so that another layout or plain autograd can use the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._drop()

    def _drop(self) -> None:
        with unguarded():
            for param in self._params:
                param.grad = None


def _arrive(gradients: ref[Gradients], index: int, param: Tensor) -> None:
    """Parameter hook that passes a new gradient to `gradients`, if that still exists."""
    # Use a weak reference, because parameter hooks must not keep a dropped engine alive.
    alive = gradients()
    if alive is not None:
        alive.arrived(index, param)


def _make_buckets(
    parameters: Parameters,
    placement: Placement,
    groups: ShardGroups,
    factory: StorageFactory,
    summation: Summation,
    *,
    exact_sum: bool,
    elsewhere: Set[int],
) -> tuple[list[ReductionQueue], list[GradientBucket]]:
    """Create the buckets, and allocate the memory that each of them occupies between steps.

    A bucket occupies either a full flat buffer, or just memory for the elements that this rank
    updates.
    """
    layouts, scatters = parameters.buckets, placement.is_sharded("optimizer")
    borrows = summation.in_tree or placement.is_sharded("gradients")
    owns = [b.interval(groups.of(b).rank) if scatters else (0, b.numel) for b in layouts]
    kinds = [parameters.kind(index) for index in range(len(layouts))]
    wide = [(torch.float32 if d in NARROW else d, where) for d, where in kinds]
    if summation.in_tree and exact_sum:
        # Rounding of 16-bit intermediate sums would depend on the world size.
        kinds = wide
    kept: list[Tensor | None] = [None] * len(layouts)
    totals: list[GradientSum]
    if borrows:
        # On a disk, store 16-bit sums in fp32 from the start, because the storage cannot be widened
        # later. Sums of the tree stay in their dtype, so that they are rounded as they would be in
        # memory.
        widened = factory.on_disk and not summation.in_tree
        depth = max(len(summation.fan_ins), 1)
        lengths = [end - first for first, end in owns for _ in range(depth)]
        each = [kind for kind in (wide if widened else kinds) for _ in range(depth)]
        # Adding a level of the tree to the next one uses two storages at once.
        levels = iter(factory.make("gradients", lengths, each, width=min(depth, 2)))
        totals = [
            TreeSum([next(levels) for _ in range(depth)], summation.fan_ins, device)
            if summation.in_tree
            else GradientSum(next(levels))
            for _, device in kinds
        ]
    else:
        pairs = zip(layouts, kinds, strict=True)
        buffers = [groups.of(b).allocate(b.numel, *kind) for b, kind in pairs]
        kept = [*buffers]
        totals = [
            GradientSum(MemoryStorage(buffer[first:end]))
            for buffer, (first, end) in zip(buffers, owns, strict=True)
        ]
    # Buckets of the same kind borrow the same buffers, which must fit the longest bucket.
    longest: dict[str, dict[TensorKind, int]] = {}
    for layout, kind in zip(layouts, kinds, strict=True):
        lengths_of = longest.setdefault(layout.axis, {})
        lengths_of[kind] = max(lengths_of.get(kind, 0), layout.numel)
    how = Sum(exact_sum, summation.in_tree)
    # A queue per group of ranks. Each group launches its buckets in one order.
    group_of = {layout.axis: groups.of(layout) for layout in layouts}
    copies = any(total.first.copy_stream is not None for total in totals)
    queues = {
        axis: ReductionQueue(group_of[axis], how, lengths_of, scatters=scatters, copies=copies)
        for axis, lengths_of in longest.items()
    }
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
            queues[layout.axis],
            counts=index not in elsewhere,
        )
        for index, layout in enumerate(layouts)
    ]
    return list(queues.values()), buckets
