"""BatchNorm synchronised across all ranks, with weighted counts, on CPU and accelerators.

Each rank sends its rows' count, mean and sum of squared deviations. These are combined in fp64 with
the pairwise formula of Chan, Golub and LeVeque (1983). For a stand-in batch, the count is 0.
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
    """Statistics of a batch across all ranks.

    Args:
        mean: fp64 mean per channel, (C,).
        variance: fp64 biased variance per channel, (C,).
        total: Number of rows.
        counts: False if this rank has a stand-in batch, whose rows do not count.
        forward: Number of the forward pass.
    """

    mean: Tensor
    variance: Tensor
    total: Tensor
    counts: bool
    forward: int

    @property
    def backward(self) -> int:
        """Call number of the backward pass's exchange. Later ones are for second derivatives."""
        return 4 * self.forward


class _Normalise(torch.autograd.Function):
    """Normalises with the statistics of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        ranks: StatisticsRows,
        statistics: _Statistics,
    ) -> Tensor:
        wide = _wide(x)
        mean, variance = statistics.mean.to(wide.dtype), statistics.variance.to(wide.dtype)
        ctx.save_for_backward(
            x, weight, mean, (statistics.variance + eps).rsqrt(), statistics.total
        )
        ctx.ranks, ctx.call, ctx.counts = ranks, statistics.backward, statistics.counts
        ctx.dims, ctx.eps = _dims(x), eps
        out = F.batch_norm(
            wide, mean, variance, _like(weight, wide), _like(bias, wide), False, 0.0, eps
        )
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph=True: the gradients must be differentiable
            return _differentiable_backward(ctx, grad)
        x, weight, mean, invstd64, total = ctx.saved_tensors
        dims = ctx.dims
        shape = [1, -1] + [1] * (x.ndim - 2)
        dy = grad.to(mean.dtype)
        centred = x.to(mean.dtype) - mean.view(shape)
        # Exchange fp64, so that the sum across ranks rounds like a single sum over all rows.
        sum_dy = dy.sum(dims).double()
        sum_dy_centred = (dy * centred).sum(dims).double()
        # (2 C,)
        row = torch.cat([sum_dy, sum_dy_centred])
        rows = ctx.ranks.of_backward(row if ctx.counts else torch.zeros_like(row), ctx.call)
        all_dy, all_centred = (rows.sum(0) / total.clamp(min=1.0)).chunk(2)
        invstd = invstd64.to(mean.dtype).view(shape)
        slope = (all_centred * invstd64.square()).to(mean.dtype).view(shape)
        dx = (dy - all_dy.to(mean.dtype).view(shape) - centred * slope) * invstd
        if weight is not None:
            # dL/dx = weight * invstd * (dy - mean(dy) - (x - mean) * invstd^2 * mean(dy * (x -
            # mean)))
            dx = dx * weight.to(mean.dtype).view(shape)
        # Use only this rank's rows, because the engine sums parameter gradients across ranks.
        dweight = None if weight is None else (sum_dy_centred * invstd64).to(weight.dtype)
        dbias = None if weight is None else sum_dy.to(weight.dtype)
        return dx.to(x.dtype), dweight, dbias, None, None, None


class _SumOverRanks(torch.autograd.Function):
    """Sums `row` (one number per channel) over the ranks. The gradient is summed, too."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, ranks: StatisticsRows, call: int) -> Tensor:
        ctx.ranks, ctx.call = ranks, call
        return ranks.of_backward(row, call).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # The negated number distinguishes the exchange of the gradient from the exchange of the
        # sum.
        return _SumOverRanks.apply(grad, ctx.ranks, -ctx.call), None, None  # type: ignore[no-untyped-call]


def _differentiable_backward(ctx: Any, grad: Tensor) -> Any:
    """Compute the result of `_Normalise.backward` so that autograd can differentiate it again.

    The normalisation is repeated, with statistics that autograd can trace back to `x`.
    """
    x, weight, _, _, total = ctx.saved_tensors
    share, total = float(ctx.counts), total.clamp(min=1.0)
    shape = [1, -1] + [1] * (x.ndim - 2)

    def over_all(values: Tensor, call: int) -> Tensor:
        row = values.sum(ctx.dims).double() * share
        return _SumOverRanks.apply(row, ctx.ranks, call) / total  # type: ignore[no-any-return, no-untyped-call]

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
def _gather_statistics(x: Tensor, ranks: StatisticsRows, counts: bool) -> _Statistics:
    """Return the statistics across all ranks. Collective."""
    x, dims = _wide(x), _dims(x)
    # Use mean and squared deviations. With sums of x and x*x, the difference would suffer from
    # cancellation if the mean is large compared with the deviation.
    variance, mean = torch.var_mean(x, dims, correction=0)
    count = float(x.numel() // x.shape[1]) if counts else 0.0
    # (2 C + 1,): means, sums of squared deviations, count.
    row = torch.cat([mean.double(), variance.double() * count, mean.new_full((1,), count).double()])
    rows, forward = ranks.of_forward(row if counts else torch.zeros_like(row))
    return _Statistics(*_combine_rows(rows), counts, forward)


def _combine_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, biased variance and row count across all ranks, given their `rows`."""
    # rows: (ranks, 2 C + 1); means and squares: (ranks, C); numbers: (ranks, 1).
    channels = rows.shape[1] // 2
    means, squares, numbers = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    total = numbers.sum()
    mean_of_all = (means * numbers).sum(0) / total.clamp(min=1.0)
    # Chan et al.: deviations within each rank, plus the deviations of the ranks' means.
    spread = squares.sum(0) + (numbers * (means - mean_of_all).square()).sum(0)
    return mean_of_all, spread / total.clamp(min=1.0), total


def _wide(x: Tensor) -> Tensor:
    # Sums in 16 bits would lose most of the rows.
    return x.float() if x.dtype in NARROW else x


def _dims(x: Tensor) -> list[int]:
    """Return all dims except the channel dim."""
    return [0, *range(2, x.ndim)]


def _like(value: Tensor | None, x: Tensor) -> Tensor | None:
    return None if value is None else value.to(x.dtype)


class _SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Base class of converted BatchNorm modules. They keep their parameters and buffers.

    Copies and pickles of the module have the plain class.
    """

    _plain: type[nn.Module]
    _ranks: StatisticsRows
    _feed: CurrentBatch

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`, shape (N, C, ...). In training, use the statistics of all ranks."""
        # A FakeTensor has no values, and only the output shape is needed.
        if not self.training or isinstance(x, FakeTensor):
            return super().forward(x)
        self._feed.check_even("A forward of synchronised BatchNorm in training mode")
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        batch = self._feed.batch_of_forward(training=torch.is_grad_enabled())
        counts = batch is None or batch.samples > 0
        # A recomputation must not communicate, nor read the current batch, which has advanced
        # since.
        statistics = once(lambda: _gather_statistics(x, self._ranks, counts))
        # Update before the normalisation, as plain BatchNorm does: torch.utils.checkpoint stops a
        # recomputation after the last tensor that autograd saves.
        if self.track_running_stats and self.running_mean is not None:
            self._update_running_statistics(statistics.mean, statistics.variance, statistics.total)
        return _Normalise.apply(  # type: ignore[no-any-return, no-untyped-call]
            x, self.weight, self.bias, self.eps, self._ranks, statistics
        )

    def update_from_others(self, rows: Tensor) -> None:
        """Update the running statistics with `rows`, from a forward pass that this rank skips."""
        if self.track_running_stats and self.running_mean is not None:
            self._update_running_statistics(*_combine_rows(rows.to(self.running_mean.device)))

    def _update_running_statistics(self, mean: Tensor, variance: Tensor, total: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        with torch.no_grad():
            # False if all ranks have stand-ins. Use a tensor, because `if` would wait for the
            # device.
            counted = total > 0
            self.num_batches_tracked.add_(counted)
            # Running variance is unbiased, as in torch, although the normalisation uses the biased
            # variance.
            unbiased = variance * total / (total - 1).clamp(min=1.0)
            for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
                rate: Any = self.momentum
                if rate is None:
                    rate = self.num_batches_tracked.clamp(min=1).to(running.dtype).reciprocal()
                blended = running.lerp(value.to(running.dtype), rate)
                running.copy_(torch.where(counted, blended, running))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # By default, pickle rejects an object whose __class__ is not the class in its state.
        state: dict[str, Any] = self.__getstate__()  # type: ignore[no-untyped-call]
        kept = {key: value for key, value in state.items() if key not in ("_ranks", "_feed")}
        return copyreg._reconstructor, (self._plain, object, None), kept  # type: ignore[attr-defined]


@cache
def _synchronised_class(plain: type[nn.Module]) -> type[_SyncBatchNorm] | None:
    """Return the synchronised counterpart of the BatchNorm class `plain`, or None.

    Returns None if `plain` overrides `forward` in a way that bypasses the synchronised one. A
    subclass keeps its methods, and their `super()` calls reach ours. torch's SyncBatchNorm is
    replaced, because its `forward` supports only CUDA.
    """
    if plain is nn.SyncBatchNorm:
        bases: tuple[type, ...] = (_SyncBatchNorm, plain)
    elif issubclass(plain, nn.modules.batchnorm._LazyNormBase):
        return None
    else:
        # Every `forward` that precedes torch's own must delegate the normalisation to
        # `super().forward`.
        own = plain.__mro__[: plain.__mro__.index(nn.modules.batchnorm._BatchNorm)]
        for forward in (vars(base)["forward"] for base in own if "forward" in vars(base)):
            names = getattr(getattr(forward, "__code__", None), "co_names", ())
            if "super" not in names or "batch_norm" in names:
                return None
        bases = (plain, _SyncBatchNorm)
    return type(f"Sync{plain.__name__}", bases, {"_plain": plain, "__module__": __name__})


def _class_of(module: nn.Module) -> Any:
    """Return the module's class, typed as Any because mypy does not consider it hashable."""
    return type(module)


_eager: Any = None


def _run_eagerly() -> None:
    """Exclude `_SyncBatchNorm.forward` from torch.compile.

    A decorator would import torch's compiler, which takes several seconds.
    """
    global _eager
    if _eager is None:
        _eager = torch.compiler.disable(_SyncBatchNorm.forward, recursive=True)  # type: ignore[no-untyped-call]
        _SyncBatchNorm.forward = _eager  # type: ignore[method-assign]


def convert(models: Sequence[nn.Module], order: GatherOrder, feed: CurrentBatch) -> int:
    """Make every BatchNorm of `models` use the statistics of all ranks. Return how many there are.

    `order` is the ranks' gather order, and `feed` provides the current batch. Subclasses are
    included, except those that normalise in their own `forward` (see `is_out_of_reach`).
    """
    found = _find_batch_norms(models)
    if not found:
        return 0
    _run_eagerly()
    for module in found.values():
        # Keep the object, so that references to it in user code and in the optimizer stay valid.
        module.__class__ = _synchronised_class(_class_of(module))  # type: ignore[assignment]
    exchanges = StatisticsExchanges(order, cast(dict[str, _SyncBatchNorm], found))
    for module, exchange in zip(found.values(), exchanges.each, strict=True):
        module.__dict__.update({"_ranks": exchange, "_feed": feed})
    return len(found)


def _find_batch_norms(models: Sequence[nn.Module]) -> dict[str, nn.modules.batchnorm._BatchNorm]:
    """Return the BatchNorms of `models` that can be converted, by name."""
    found: dict[nn.modules.batchnorm._BatchNorm, str] = {}
    for number, model in enumerate(models):
        for name, module in model.named_modules():
            if isinstance(module, _SyncBatchNorm) or module in found:
                continue
            if not isinstance(module, nn.modules.batchnorm._BatchNorm):
                continue
            if _synchronised_class(_class_of(module)) is not None:
                place = f"models[{number}]" if len(models) > 1 else ""
                found[module] = ".".join(part for part in (place, name) if part) or "the model"
    return {name: module for module, name in found.items()}


def is_out_of_reach(module: nn.Module) -> bool:
    """Return whether `module` is a BatchNorm that `convert` cannot change."""
    if isinstance(module, _SyncBatchNorm):
        return False
    is_one = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return is_one and _synchronised_class(_class_of(module)) is None


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
    """Return the modules that `convert` has changed."""
    return {m for model in models for m in model.modules() if isinstance(m, _SyncBatchNorm)}
