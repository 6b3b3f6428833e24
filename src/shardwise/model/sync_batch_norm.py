"""Synchronises BatchNorm over all ranks, with weighted counts, on CPU and accelerators.

Each rank sends the count, mean and sum of squared deviations of its rows; the pairwise formula of
Chan, Golub and LeVeque (1983) joins them in fp64. A rank that was given a stand-in counts nothing.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.comm import GatherOrder
from shardwise.model.batch_norm_statistics import (
    StatisticsExchange,
    StatisticsExchanges,
    StatisticsRows,
)
from shardwise.model.precision import NARROW
from shardwise.model.recomputation import once
from shardwise.world.current_batch import CurrentBatch


@dataclass(frozen=True)
class _Statistics:
    """Of a batch over all ranks: fp64 mean and biased variance per channel, the number of rows;
    whether this rank's rows count, and the number of the forward."""

    mean: Tensor
    variance: Tensor
    total: Tensor
    counts: bool
    forward: int

    @property
    def backward(self) -> int:
        """The number of the backward's exchange; the next ones are of a second derivative."""
        return 4 * self.forward


class _Normalise(torch.autograd.Function):
    """Normalise with the statistics of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        ranks: StatisticsRows,
        of_all: _Statistics,
    ) -> Tensor:
        wide = _wide(x)
        mean, variance = of_all.mean.to(wide.dtype), of_all.variance.to(wide.dtype)
        ctx.save_for_backward(x, weight, mean, (of_all.variance + eps).rsqrt(), of_all.total)
        ctx.ranks, ctx.call, ctx.counts = ranks, of_all.backward, of_all.counts
        ctx.dims, ctx.eps = _dims(x), eps
        out = F.batch_norm(
            wide, mean, variance, _like(weight, wide), _like(bias, wide), False, 0.0, eps
        )
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph: gradients of these gradients are wanted
            return _to_go_through_again(ctx, grad)
        x, weight, mean, invstd64, total = ctx.saved_tensors
        dims = ctx.dims
        shape = [1, -1] + [1] * (x.ndim - 2)
        dy = grad.to(mean.dtype)
        centred = x.to(mean.dtype) - mean.view(shape)
        sum_dy = dy.sum(dims).double()
        sum_dy_centred = (dy * centred).sum(dims).double()
        row = torch.cat([sum_dy, sum_dy_centred])
        rows = ctx.ranks.of_backward(row if ctx.counts else torch.zeros_like(row), ctx.call)
        all_dy, all_centred = (rows.sum(0) / total.clamp(min=1.0)).chunk(2)
        invstd = invstd64.to(mean.dtype).view(shape)
        slope = (all_centred * invstd64.square()).to(mean.dtype).view(shape)
        dx = (dy - all_dy.to(mean.dtype).view(shape) - centred * slope) * invstd
        if weight is not None:
            dx = dx * weight.to(mean.dtype).view(shape)
        dweight = None if weight is None else (sum_dy_centred * invstd64).to(weight.dtype)
        dbias = None if weight is None else sum_dy.to(weight.dtype)
        return dx.to(x.dtype), dweight, dbias, None, None, None


class _Summed(torch.autograd.Function):
    """`row` (a number for each channel) summed over the ranks in `call`; its gradient is summed in
    the same way."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, ranks: StatisticsRows, call: int) -> Tensor:
        ctx.ranks, ctx.call = ranks, call
        return ranks.of_backward(row, call).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Summed.apply(grad, ctx.ranks, -ctx.call), None, None  # type: ignore[no-untyped-call]


def _to_go_through_again(ctx: Any, grad: Tensor) -> Any:
    """What backward gives, by operations that autograd can differentiate once more.

    Normalising is done anew for that, with statistics that are made of `x` as autograd sees it.
    """
    x, weight, _, _, total = ctx.saved_tensors
    share, total = float(ctx.counts), total.clamp(min=1.0)
    shape = [1, -1] + [1] * (x.ndim - 2)

    def over_all(values: Tensor, call: int) -> Tensor:
        row = values.sum(ctx.dims).double() * share
        return _Summed.apply(row, ctx.ranks, call) / total  # type: ignore[no-any-return, no-untyped-call]

    wide = _wide(x)
    centred = wide - over_all(wide, ctx.call + 1).to(wide.dtype).view(shape)
    invstd = (over_all(centred.square(), ctx.call + 2) + ctx.eps).rsqrt()
    straight = (centred * invstd.to(wide.dtype).view(shape)).to(x.dtype)
    scaled = grad if weight is None else grad * weight.to(grad.dtype).view(shape)
    dx = None
    if ctx.needs_input_grad[0]:
        (dx,) = torch.autograd.grad(straight, x, scaled, create_graph=True)
    dweight = None if weight is None else (grad * straight).sum(ctx.dims).to(weight.dtype)
    dbias = None if weight is None else grad.sum(ctx.dims).to(weight.dtype)
    return dx, dweight, dbias, None, None, None


@torch.no_grad()
def _joined(x: Tensor, ranks: StatisticsRows, counts: bool) -> _Statistics:
    """The statistics over all ranks; collective."""
    x, dims = _wide(x), _dims(x)
    variance, mean = torch.var_mean(x, dims, correction=0)
    count = float(x.numel() // x.shape[1]) if counts else 0.0
    row = torch.cat([mean.double(), variance.double() * count, mean.new_full((1,), count).double()])
    rows, forward = ranks.of_forward(row if counts else torch.zeros_like(row))
    return _Statistics(*_of_rows(rows), counts, forward)


def _of_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and number over all ranks, of their `rows`."""
    channels = rows.shape[1] // 2
    means, squares, numbers = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    total = numbers.sum()
    joined = (means * numbers).sum(0) / total.clamp(min=1.0)
    spread = squares.sum(0) + (numbers * (means - joined).square()).sum(0)
    return joined, spread / total.clamp(min=1.0), total


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in NARROW else x


def _dims(x: Tensor) -> list[int]:
    """All but the channels'."""
    return [0, *range(2, x.ndim)]


def _like(value: Tensor | None, x: Tensor) -> Tensor | None:
    return None if value is None else value.to(x.dtype)


class _SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """What a BatchNorm module's class becomes; its parameters and buffers stay as they are.

    Copies and pickles of it are of the plain class again.
    """

    _plain: type[nn.Module]
    _ranks: StatisticsRows
    _feed: CurrentBatch

    def forward(self, x: Tensor) -> Tensor:
        """x: (N, C, ...). In eval mode as the plain class; in training over all ranks."""
        if not self.training or isinstance(x, FakeTensor):  # of that only the shape is wanted
            return super().forward(x)
        self._feed.check_even("A forward of synchronised BatchNorm in training mode")
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        batch = self._feed.batch_of_forward(training=torch.is_grad_enabled())
        counts = batch is None or batch.samples > 0
        # A recomputation neither speaks with the other ranks nor asks what the batch is by then.
        of_all = once(lambda: _joined(x, self._ranks, counts))
        # Before normalising: torch.utils.checkpoint ends a recomputation with the last tensor that
        # autograd saves, and plain BatchNorm has updated its statistics by then.
        if self.track_running_stats and self.running_mean is not None:
            self._follow(of_all.mean, of_all.variance, of_all.total)
        return _Normalise.apply(  # type: ignore[no-any-return, no-untyped-call]
            x, self.weight, self.bias, self.eps, self._ranks, of_all
        )

    def follow_others(self, rows: Tensor) -> None:
        """Take the running statistics on by `rows`, those of a forward that this rank skips."""
        if self.track_running_stats and self.running_mean is not None:
            self._follow(*_of_rows(rows.to(self.running_mean.device)))

    def _follow(self, mean: Tensor, variance: Tensor, total: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        with torch.no_grad():
            counted = total > 0  # not where all ranks have stand-ins; looked at on the device
            self.num_batches_tracked.add_(counted)
            unbiased = variance * total / (total - 1).clamp(min=1.0)
            for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
                rate: Any = self.momentum
                if rate is None:
                    rate = self.num_batches_tracked.clamp(min=1).to(running.dtype).reciprocal()
                joined = running.lerp(value.to(running.dtype), rate)
                running.copy_(torch.where(counted, joined, running))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickle refuses to make an object of another class than its own in the usual way.
        state: dict[str, Any] = self.__getstate__()  # type: ignore[no-untyped-call]
        kept = {key: value for key, value in state.items() if key not in ("_ranks", "_feed")}
        return copyreg._reconstructor, (self._plain, object, None), kept  # type: ignore[attr-defined]


@cache
def _synchronised(plain: type[nn.Module]) -> type[_SyncBatchNorm] | None:
    """What the class `plain` becomes; None where its own forward would not come to ours.

    A subclass keeps its methods, and what they call by `super()` is ours. torch's SyncBatchNorm,
    which has a forward for CUDA alone, is replaced.
    """
    if plain is nn.SyncBatchNorm:
        bases: tuple[type, ...] = (_SyncBatchNorm, plain)
    elif issubclass(plain, nn.modules.batchnorm._LazyNormBase):
        return None
    elif all(map(_calls_super, _own_forwards(plain))):
        bases = (plain, _SyncBatchNorm)
    else:
        return None
    return type(f"Sync{plain.__name__}", bases, {"_plain": plain, "__module__": __name__})


def _class_of(module: nn.Module) -> Any:
    """Its class, which mypy does not believe to have a hash."""
    return type(module)


def _own_forwards(plain: type[nn.Module]) -> list[Any]:
    """The forwards of a class and its bases that come before torch's own."""
    classes = plain.__mro__[: plain.__mro__.index(nn.modules.batchnorm._BatchNorm)]
    return [vars(each)["forward"] for each in classes if "forward" in vars(each)]


def _calls_super(forward: Any) -> bool:
    """Whether a forward leaves the normalisation to the class that it is of."""
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return "super" in names and "batch_norm" not in names


_eager: Any = None


def _run_eagerly() -> None:
    """Let torch.compile leave our forward as it is. Not a decorator: this imports torch's compiler,
    seconds that only who needs it should pay."""
    global _eager
    if _eager is None:
        _eager = torch.compiler.disable(_SyncBatchNorm.forward, recursive=True)  # type: ignore[no-untyped-call]
        _SyncBatchNorm.forward = _eager  # type: ignore[method-assign]


def convert(models: Sequence[nn.Module], order: GatherOrder, feed: CurrentBatch) -> int:
    """Let every BatchNorm of `models` use the statistics of all ranks of `order`; returns how many.

    Subclasses too, but for those that normalise in a forward of their own (see `is_out_of_reach`).
    """
    found = _to_convert(models)
    if not found:
        return 0
    _run_eagerly()
    for module in found.values():
        module.__class__ = _synchronised(_class_of(module))  # type: ignore[assignment]
    exchanges = StatisticsExchanges(order, cast(dict[str, _SyncBatchNorm], found))
    for module, exchange in zip(found.values(), exchanges.each, strict=True):
        module.__dict__.update({"_ranks": exchange, "_feed": feed})
    return len(found)


def _to_convert(models: Sequence[nn.Module]) -> dict[str, nn.modules.batchnorm._BatchNorm]:
    """The BatchNorms of `models` that can be converted, by name."""
    found: dict[nn.modules.batchnorm._BatchNorm, str] = {}
    for number, model in enumerate(models):
        for name, module in model.named_modules():
            if isinstance(module, _SyncBatchNorm) or module in found:
                continue
            if not isinstance(module, nn.modules.batchnorm._BatchNorm):
                continue
            if _synchronised(_class_of(module)) is not None:
                place = f"models[{number}]" if len(models) > 1 else ""
                found[module] = ".".join(part for part in (place, name) if part) or "the model"
    return {name: module for module, name in found.items()}


def is_out_of_reach(module: nn.Module) -> bool:
    """Whether `module` is a BatchNorm that `convert` leaves as it is."""
    if isinstance(module, _SyncBatchNorm):
        return False
    is_one = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return is_one and _synchronised(_class_of(module)) is None


def restore(models: Iterable[nn.Module]) -> None:
    """Undo `convert`."""
    modules = converted(models)
    for turns in {m._ranks.turns for m in modules if isinstance(m._ranks, StatisticsExchange)}:
        turns.leave()
    for module in modules:
        module.__class__ = module._plain  # type: ignore[assignment]
        for key in ("_ranks", "_feed"):
            module.__dict__.pop(key, None)


def converted(models: Iterable[nn.Module]) -> set[_SyncBatchNorm]:
    """The modules that `convert` has changed."""
    return {m for model in models for m in model.modules() if isinstance(m, _SyncBatchNorm)}
