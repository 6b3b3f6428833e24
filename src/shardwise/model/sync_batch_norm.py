"""BatchNorm over the micro-batches of all ranks, with weighted counts, on CPU and CUDA.

Each rank sends the count, mean and sum of squared deviations of its rows; the pairwise formula of
Chan, Golub and LeVeque (1983) joins them in fp64. A rank that was given a stand-in counts nothing.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from shardwise.collectives import Collectives
from shardwise.feed import Feed
from shardwise.model import replay
from shardwise.model.precision import NARROW


@dataclass(frozen=True)
class _Statistics:
    """Of a batch over all ranks: fp64 mean and biased variance per channel, the number of rows;
    and whether this rank's rows count."""

    mean: Tensor
    variance: Tensor
    total: Tensor
    counts: bool


class _Normalise(torch.autograd.Function):
    """Normalise with the statistics of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: Collectives,
        of_all: _Statistics,
    ) -> Tensor:
        wide = _wide(x)
        mean, variance = of_all.mean.to(wide.dtype), of_all.variance.to(wide.dtype)
        ctx.save_for_backward(x, weight, mean, (of_all.variance + eps).rsqrt(), of_all.total)
        ctx.group, ctx.counts, ctx.dims = group, of_all.counts, _dims(x)
        out = F.batch_norm(
            wide, mean, variance, _like(weight, wide), _like(bias, wide), False, 0.0, eps
        )
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, mean, invstd64, total = ctx.saved_tensors
        dims, group = ctx.dims, ctx.group
        shape = [1, -1] + [1] * (x.ndim - 2)
        dy = grad.to(mean.dtype)
        centred = x.to(mean.dtype) - mean.view(shape)
        sum_dy = dy.sum(dims).double()
        sum_dy_centred = (dy * centred).sum(dims).double()
        row = torch.cat([sum_dy, sum_dy_centred])
        rows = group.gather_rows(row if ctx.counts else torch.zeros_like(row))
        all_dy, all_centred = (rows.sum(0) / total.clamp(min=1.0)).chunk(2)
        invstd = invstd64.to(mean.dtype).view(shape)
        slope = (all_centred * invstd64.square()).to(mean.dtype).view(shape)
        dx = (dy - all_dy.to(mean.dtype).view(shape) - centred * slope) * invstd
        if weight is not None:
            dx = dx * weight.to(mean.dtype).view(shape)
        dweight = None if weight is None else (sum_dy_centred * invstd64).to(weight.dtype)
        dbias = None if weight is None else sum_dy.to(weight.dtype)
        return dx.to(x.dtype), dweight, dbias, None, None, None


@torch.no_grad()
def _joined(x: Tensor, group: Collectives, counts: bool) -> _Statistics:
    """The statistics over all ranks; collective."""
    x, dims = _wide(x), _dims(x)
    variance, mean = torch.var_mean(x, dims, correction=0)
    count = float(x.numel() // x.shape[1]) if counts else 0.0
    row = torch.cat([mean.double(), variance.double() * count, mean.new_full((1,), count).double()])
    rows = group.gather_rows(row if counts else torch.zeros_like(row))
    channels = x.shape[1]
    means, squares, numbers = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    total = numbers.sum()
    joined = (means * numbers).sum(0) / total.clamp(min=1.0)
    spread = squares.sum(0) + (numbers * (means - joined).square()).sum(0)
    return _Statistics(joined, spread / total.clamp(min=1.0), total, counts)


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
    _group: Collectives
    _feed: Feed

    def forward(self, x: Tensor) -> Tensor:
        """x: (N, C, ...). In eval mode as the plain class; in training over all ranks."""
        if not self.training or isinstance(x, FakeTensor):  # of that only the shape is wanted
            return super().forward(x)
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        batch = self._feed.current
        counts = batch is None or batch.samples > 0
        # A recomputation neither speaks with the other ranks nor asks what the batch is by then.
        of_all = replay.once(lambda: _joined(x, self._group, counts))
        out = _Normalise.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self.eps, self._group, of_all
        )
        if self.track_running_stats and self.running_mean is not None:
            self._follow(of_all.mean, of_all.variance, of_all.total)
        return out  # type: ignore[no-any-return]

    def _follow(self, mean: Tensor, variance: Tensor, total: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        if not bool(total):
            return  # stand-ins on all ranks
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            rate = self.momentum
            if rate is None:
                rate = 1.0 / float(self.num_batches_tracked)
            unbiased = variance * total / (total - 1).clamp(min=1.0)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = list(super().__reduce_ex__(protocol))
        reduced[:2] = copyreg._reconstructor, (self._plain, object, None)  # type: ignore[attr-defined]
        state = dict(reduced[2])
        for key in ("_group", "_feed"):
            state.pop(key, None)
        reduced[2] = state
        return tuple(reduced)


class SyncBatchNorm1d(_SyncBatchNorm, nn.BatchNorm1d):
    _plain = nn.BatchNorm1d


class SyncBatchNorm2d(_SyncBatchNorm, nn.BatchNorm2d):
    _plain = nn.BatchNorm2d


class SyncBatchNorm3d(_SyncBatchNorm, nn.BatchNorm3d):
    _plain = nn.BatchNorm3d


CLASSES: dict[type[nn.Module], type[_SyncBatchNorm]] = {
    cls._plain: cls for cls in (SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d)
}


def convert(models: Iterable[nn.Module], group: Collectives, feed: Feed) -> int:
    """Let every BatchNorm1d/2d/3d of `models` use the statistics of all ranks; returns how many."""
    # Not a decorator: this imports torch's compiler, seconds that only who needs it should pay.
    run_eagerly = torch.compiler.disable(recursive=True)  # type: ignore[no-untyped-call]
    count = 0
    for module in (module for model in models for module in model.modules()):
        cls = CLASSES.get(type(module))
        if cls is not None:
            module.__class__ = cls
            cls.forward = run_eagerly(_SyncBatchNorm.forward)  # type: ignore[method-assign]
            module.__dict__.update({"_group": group, "_feed": feed})
            count += 1
    return count


def restore(models: Iterable[nn.Module]) -> None:
    """Undo `convert`."""
    for module in converted(models):
        module.__class__ = module._plain  # type: ignore[assignment]
        for key in ("_group", "_feed"):
            module.__dict__.pop(key, None)


def converted(models: Iterable[nn.Module]) -> set[_SyncBatchNorm]:
    """The modules that `convert` has changed."""
    return {m for model in models for m in model.modules() if isinstance(m, _SyncBatchNorm)}
