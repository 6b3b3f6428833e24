"""Updates the intervals of one or more buckets with an inner copy of the user's optimizer.

If everything is in device memory, an update is a single call for full intervals. If some state is
on a disk, or is in host memory but used on an accelerator, `offloaded_update.py` updates it span by
span.

    reduced gradient ─▶ tensor.grad of each segment ─▶ optimizer.step() ─▶ master ─▶ parameters
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn, optim

from shardwise.states.optimizer.optimizer_kind import FUSED, bare_copy
from shardwise.states.optimizer.optimizer_options import (
    FollowedAttributes,
    FollowedOptions,
    ParameterGroup,
    without_hooks,
)
from shardwise.states.optimizer.update_interval import BucketUpdate, UpdatedTensor, cut_by_use


@dataclass(eq=False)
class UpdatePart:
    """The part of an interval that a single optimizer call updates."""

    start: int
    """First element of the part, counted from the start of the bucket."""
    segments: Sequence[UpdatedTensor]
    gradient: Tensor
    """The reduced gradient of the part: (numel,)."""
    changed: bool = True
    """False if the last call found no gradient for any segment."""


class SplitTensors(Protocol):
    """The parameters that tensor parallelism splits. See `TensorParallelModels`."""

    @property
    def shards(self) -> Container[nn.Parameter]:
        """The split parameters."""

    def whole(self, parameter: nn.Parameter, part: Tensor, /) -> Tensor: ...
    def part_of(self, parameter: nn.Parameter, whole: Tensor, /) -> Tensor: ...
    def whole_state(self, parameter: nn.Parameter, state: dict[str, Any], /) -> dict[str, Any]: ...
    def part_state(self, parameter: nn.Parameter, state: dict[str, Any], /) -> dict[str, Any]: ...
    def is_split(self, parameter: nn.Parameter, key: str, value: Any, /) -> bool: ...
    def record_shapes(
        self, parameter: nn.Parameter, shapes: Mapping[str, tuple[int, ...]], /
    ) -> None: ...


@dataclass(frozen=True)
class DeviceFactor:
    """A factor for gradients that is known on the device only. See `engine/early_update.py`.

    torch's fused kernels read both tensors, which are fp32 scalars on the device.
    """

    divisor: Tensor | None
    """The reciprocal of the factor; None means 1."""
    skips: Tensor
    """1 if the update must leave everything unchanged, otherwise 0."""

    @classmethod
    def of(cls, factor: float | Tensor, *, skips: Tensor) -> DeviceFactor:
        """Return the `factor`, a number or an fp64 scalar on the device of `skips` (bool)."""
        divisor = None
        if isinstance(factor, Tensor):
            divisor = (torch.ones_like(factor) / factor).float()
        elif factor != 1.0:
            divisor = torch.full((), 1.0 / factor, dtype=torch.float32, device=skips.device)
        return cls(divisor, skips.float())


class InnerOptimizer:
    """A copy of the user's optimizer that updates the segments of `intervals`.

    Usually these are the segments of a single bucket, but several buckets may share one call.

    Args:
        buckets: Indices of the buckets.
        intervals: This rank's interval of each bucket.
        groups: The user's parameter group of each interval.
        parts: Yields the parts that are updated, one per optimizer call.
        fused: Whether to update with torch's fused kernel.
        leads: True for the first copy of the user's optimizer.
        split: The split parameters that are joined for the update, or None.
    """

    is_users_stepping = False
    """True while the user's own optimizer runs its step, in which it may call its own methods."""
    following: InnerOptimizer | None = None
    """The inner optimizer that the step updates next."""

    def __init__(
        self,
        buckets: list[int],
        intervals: list[BucketUpdate],
        groups: list[ParameterGroup],
        parts: Callable[[InnerOptimizer], Iterator[list[UpdatePart]]],
        *,
        fused: bool,
        leads: bool,
        split: SplitTensors | None = None,
    ) -> None:
        self._split = split
        self.buckets = buckets
        self.intervals = intervals
        self._groups = groups
        self._parts = parts
        self._is_fused = fused
        self._divides = False
        """True if torch's fused kernel divides the gradients of this step."""
        self.inner = self._make_optimizer()
        device = intervals[0].master.device
        self.options = FollowedOptions(groups, self.inner, device, fused=fused)
        changing = frozenset[str]().union(*(group.kind.attributes for group in groups))
        self.attributes = FollowedAttributes(groups[0].optimizer, self.inner, changing, leads=leads)
        self._regroup()

    def _make_optimizer(self) -> optim.Optimizer:
        return bare_copy(self._groups[0].optimizer)

    def _regroup(self) -> None:
        """Create an inner parameter group for each of the user's groups in `groups`."""
        self.inner.param_groups = []
        for number in self.options.numbers:
            segments = [
                segment
                for interval, group in zip(self.intervals, self._groups, strict=True)
                if group.index == number
                for segment in interval.segments
            ]
            # Sort into registration order, as in the user's group.
            segments.sort(key=lambda segment: segment.pieces[0].parameter)
            self.inner.param_groups.append({"params": [segment.tensor for segment in segments]})
        if hasattr(self.inner, "_params"):  # L-BFGS has a second reference to its parameters
            self.inner._params = self.inner.param_groups[0]["params"]

    def options_of(self, group: ParameterGroup) -> dict[str, Any]:
        """Return the options that the inner optimizer uses for tensors of `group`."""
        return self.options.of(group.options)

    # -- the update -----------------------------------------------------------------------

    @property
    def _may_divide(self) -> bool:
        # The kernel is fused by choice of the user or, if they chose nothing, of this class.
        by_user = type(self.inner) in FUSED and all(g.options.get("fused") for g in self._groups)
        return (self._is_fused or by_user) and all(
            i.master.dtype == torch.float32 for i in self.intervals
        )

    def skips_on(self, device: torch.device) -> bool:
        """Return whether `step` takes a `DeviceFactor` on `device`.

        The first step must not, because it creates the state.
        """
        return (
            self._may_divide
            and all(interval.master.device == device for interval in self.intervals)
            and self._split is None
            and self._parts is in_memory
            and type(self.inner) in (optim.Adam, optim.AdamW)
            and all(s.tensor in self.inner.state for i in self.intervals for s in i.segments)
        )

    def step(self, used: Sequence[bool], factor: float | DeviceFactor) -> None:
        """Update the parameters with the reduced gradients, multiplied by `factor`.

        `used` holds a flag for each parameter: whether it had a gradient on any rank.
        """
        if not all(used):
            cut = [cut_by_use(self.inner, interval, used) for interval in self.intervals]
            if any(cut):
                self._regroup()
        self._divides = self._may_divide
        self._set_divisor(factor)
        for parts in self._parts(self):
            self._update(parts, used, factor)

    def _set_divisor(self, factor: float | DeviceFactor) -> None:
        divisor = skips = None
        if isinstance(factor, DeviceFactor):
            divisor, skips = factor.divisor, factor.skips
        elif self._divides and factor != 1.0:
            device = self.intervals[0].master.device
            divisor = torch.full((), 1.0 / factor, dtype=torch.float32, device=device)
        # torch's fused kernels read these attributes in `step`. They divide the gradient by
        # `grad_scale` as they read it, in fp32, which saves a separate pass over the gradient.
        self.inner.grad_scale = divisor  # type: ignore[attr-defined]
        self.inner.found_inf = skips  # type: ignore[attr-defined]

    def _update(
        self, parts: Sequence[UpdatePart], used: Sequence[bool], factor: float | DeviceFactor
    ) -> None:
        for part in parts:
            self._offer(part, used, factor)
        tensors = [segment.tensor for part in parts for segment in part.segments]
        offered = [tensor for tensor in tensors if tensor.grad is not None]
        # An optimizer that counts steps must be called even without a gradient, because all copies
        # must have the same count.
        if offered or self.options.counts or self.attributes.changing:
            self._follow()
            segments = [segment for part in parts for segment in part.segments]
            with nullcontext() if self._split is None else self._joined(segments, self._split):
                self._call_for(offered)
            self.options.record_changes()
        for tensor in tensors:
            tensor.grad = None
        for part in parts:
            part.changed = bool(offered)

    def _offer(self, part: UpdatePart, used: Sequence[bool], factor: float | DeviceFactor) -> None:
        """Set `grad` on the tensor of each segment whose parameters had a gradient."""
        if not part.segments:
            return
        # Use the dtype of this part's interval, because one call may update intervals of several
        # dtypes.
        tensor = part.segments[0].tensor
        grad = part.gradient.to(tensor.device, tensor.dtype)
        if not self._divides and not isinstance(factor, DeviceFactor) and factor != 1.0:
            # In place, even if `to` returned the sum itself: a step uses its sums only once.
            grad = grad.mul_(factor)
        for segment in part.segments:
            if used[segment.pieces[0].parameter]:
                flat = grad[segment.first - part.start : segment.end - part.start]
                segment.tensor.grad = _view_like(flat, segment.tensor)

    @contextmanager
    def _joined(self, segments: Sequence[UpdatedTensor], split: SplitTensors) -> Iterator[None]:
        """Join the parts of split tensors inside the block. Collective over the replica.

        Inside the block, tensors with a gradient, their gradients and their state are full. On
        exit, this rank's part of each is stored again. All ranks of the replica compute the same
        update, because they have the same full tensors.
        """
        state, joined = self.inner.state, []
        try:
            for segment in segments:
                tensor, parameter, grad = segment.tensor, segment.parameter, segment.tensor.grad
                if grad is None or parameter is None or parameter not in split.shards:
                    continue
                part, whole = tensor.data, split.whole(parameter, tensor.data)
                joined.append((tensor, parameter, part))
                tensor.grad = None  # a gradient must have its tensor's shape
                tensor.data = whole
                tensor.grad = split.whole(parameter, grad)
                if tensor in state:
                    state[tensor] = split.whole_state(parameter, state[tensor])
            yield
        finally:
            for tensor, parameter, part in joined:
                # Copy into the old memory, because flat buckets refer to it.
                part.copy_(split.part_of(parameter, tensor.data))
                tensor.grad = None
                tensor.data = part
                if tensor in state:
                    state[tensor] = split.part_state(parameter, state[tensor])

    def _follow(self) -> None:
        """Apply changes that user code has made to the user's optimizer."""
        self.options.follow()
        self.attributes.follow()

    def _call(self, *closure: Callable[[], float]) -> None:
        """Call the optimizer class's own `step`, bypassing any wrapper that a scheduler has set."""
        with without_hooks(self.inner):
            type(self.inner).step(self.inner, *closure)

    def _call_for(self, offered: Sequence[Tensor]) -> None:
        """Update the tensors `offered`, all of which have a gradient."""
        fresh = []
        if any(group.get("fused") for group in self.inner.param_groups):
            states = ((tensor, self.inner.state.get(tensor)) for tensor in offered)
            fresh = [t for t, s in states if not s or any(v is None for v in s.values())]
        if 0 < len(fresh) < len(offered):
            # torch's fused SGD needs a momentum for every tensor or for none. If some tensors
            # already have a momentum, those updated for the first time therefore need a separate
            # call.
            grads = [tensor.grad for tensor in fresh]
            for tensor in fresh:
                tensor.grad = None  # the first call skips them
            self._call()
            for tensor in offered:
                tensor.grad = None
            for tensor, grad in zip(fresh, grads, strict=True):
                tensor.grad = grad
        self._call()

    # -- optimizers that evaluate the loss themselves -----------------------------------------

    def step_often(self, evaluate: Callable[[], float]) -> None:
        """Run a step of an optimizer that may call `evaluate` several times.

        `evaluate` must call `offer_again` each time. Every interval must consist of a single part.
        """
        for parts in self._parts(self):
            self._divides = False
            self._set_divisor(1.0)
            self._follow()
            self._call(evaluate)
            self.options.record_changes()
            self._clear(parts)

    def _clear(self, parts: Sequence[UpdatePart]) -> None:
        for part in parts:
            for segment in part.segments:
                segment.tensor.grad = None

    def offer_again(self, used: Sequence[bool], factor: float) -> None:
        """Set `grad` on the segments' tensors again, after another evaluation of the loss."""
        for interval in self.intervals:
            master = interval.master
            total = interval.gradient.reduced.loaded()
            grad = total.to(master.device, master.dtype) * factor  # (numel of the interval,)
            for segment in interval.segments:
                seen = used[segment.pieces[0].parameter]
                a, b = segment.first - interval.own[0], segment.end - interval.own[0]
                segment.tensor.grad = _view_like(grad[a:b], segment.tensor) if seen else None


def in_memory(inner: InnerOptimizer) -> Iterator[list[UpdatePart]]:
    """Yield all intervals for a single call. Then copy the masters to the parameters."""
    parts = []
    for interval in inner.intervals:
        gradient = interval.gradient.reduced.memory
        assert gradient is not None
        parts.append(UpdatePart(interval.own[0], interval.segments, gradient))
    yield parts
    for interval in inner.intervals:
        if interval.has_master:
            target, master = interval.target.memory, interval.master.memory
            assert target is not None
            assert master is not None
            target.copy_(master)


def _view_like(grad: Tensor, tensor: Tensor) -> Tensor:
    # Full tensors keep their strides (channels_last), which `view` could not express.
    if tensor.ndim == 1 and tensor.is_contiguous():
        return grad
    return grad.as_strided(tensor.shape, tensor.stride(), grad.storage_offset())
