"""Shows a step's gradients whole on every rank (`engine.full_gradients`), and takes changes back.

sums (own intervals) ─▶ times a factor, gathered ─▶ param.grad      show
sums (own intervals) ◀─ divided by it, rank 0's  ◀─ param.grad      take
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm import Collectives
from shardwise.errors import UsageError
from shardwise.states.gradients.gradient_accumulator import GradientBucket
from shardwise.states.gradients.gradients import Gradients
from shardwise.states.optimizer.interval_gather import gather_bucket
from shardwise.states.parameters.lost_writes import fingerprint
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.parameters.parameters_at_rest import unguarded


@dataclass(frozen=True)
class _Shown:
    """A parameter's gradient as it was shown; its version and its bits then."""

    grad: Tensor
    version: int
    bits: Tensor

    @classmethod
    def of(cls, grad: Tensor) -> _Shown:
        return cls(grad, grad._version, fingerprint(grad))

    def is_changed(self, now: Tensor | None) -> bool:
        """Whether `now` is another tensor, or has been written to: `.data` and `.numpy()` leave
        no trace but the bits."""
        if now is not self.grad or now._version != self.version:
            return True
        return bool(fingerprint(now) != self.bits)


class WholeGradients:
    """Shows the gradients of one step whole, and takes in what was changed.

    `group` shards them where `scattered`, and `run` are all ranks that have the same ones. `used`
    says by parameter whether any rank had a gradient; the shown ones are sums times `factor`.
    """

    def __init__(
        self,
        parameters: Parameters,
        gradients: Gradients,
        group: Collectives,
        run: Collectives,
        used: Sequence[bool],
        factor: float,
        *,
        scattered: bool,
    ) -> None:
        self._named = parameters.named
        self._gradients = gradients
        self._group = group if scattered else None
        self._run = run
        self._used = used
        self._factor = factor
        self._shown: dict[int, _Shown] = {}
        """Of rank 0, whose gradients count; None was shown where there is none."""

    @torch.no_grad()
    def show(self) -> None:
        """Let every parameter have its gradient, None where there is none. Collective."""
        for bucket_ in self._gradients.reducer.buckets:
            mine = bucket_.reduced.loaded(bucket_.kind[1]) * self._factor
            flat = gather_bucket(bucket_.layout, bucket_.own, mine, self._group)
            for slot in bucket_.layout.slots:
                self._show(slot.parameter, flat, slot.start)

    def _show(self, index: int, flat: Tensor, start: int) -> None:
        named = self._named[index]
        grad = None
        if self._used[index]:
            grad = named.view(flat, start).to(named.dtype)
        with unguarded():
            named.parameter.grad = grad
        if grad is not None and self._run.rank == 0:
            self._shown[index] = _Shown.of(grad)

    @torch.no_grad()
    def take(self) -> list[bool]:
        """Take in what was changed: rank 0's, on all ranks. Returns what is used from now on.

        Collective. Raises UsageError, on all ranks alike, for a gradient of another shape.
        """
        with unguarded():
            grads = [named.parameter.grad for named in self._named]
        self._check(grads)
        changed = [self._is_changed(index, grad) for index, grad in enumerate(grads)]
        used = [grad is not None for grad in grads]
        # Rank 0 decides for all, so that all take part in the same broadcasts below.
        changed, used = self._run.gather_plain([changed, used])[0]
        taken = [
            bucket_
            for bucket_ in self._gradients.reducer.buckets
            if any(changed[slot.parameter] for slot in bucket_.layout.slots)
        ]
        for bucket_ in taken:
            self._take(bucket_, grads, changed)
        self._gradients.norm.renew([bucket_.index for bucket_ in taken])
        return list(used)

    def _check(self, grads: Sequence[Tensor | None]) -> None:
        """Raise where a gradient that has come is not dense; torch itself sees to its shape."""
        odd = [
            named.name
            for named, grad in zip(self._named, grads, strict=True)
            if grad is not None and grad.layout != torch.strided
        ]
        if any(self._run.gather_plain(bool(odd))):
            named = odd[0] if odd else "another rank"
            raise UsageError(
                f"engine.full_gradients(): the gradient of {named} is sparse by now. Write dense "
                "gradients there."
            )

    def _is_changed(self, index: int, grad: Tensor | None) -> bool:
        """Whether a gradient is another than was shown; of rank 0, which is the one asked."""
        shown = self._shown.get(index)
        return grad is not None if shown is None else shown.is_changed(grad)

    def _take(
        self, bucket_: GradientBucket, grads: Sequence[Tensor | None], changed: Sequence[bool]
    ) -> None:
        """Write the changed ones of a bucket into its sums; the others keep all of their bits."""
        dtype, device = bucket_.reduced.dtype, bucket_.kind[1]
        flat = torch.zeros(bucket_.layout.numel, dtype=dtype, device=device)
        for slot in bucket_.layout.slots:
            grad = grads[slot.parameter]
            if changed[slot.parameter] and grad is not None:
                view = self._named[slot.parameter].view(flat, slot.start)
                view.copy_(grad.to(dtype) / self._factor)
        if self._run.size > 1:
            self._run.broadcast(flat).wait()
        sums = bucket_.reduced.loaded()
        for piece in bucket_.layout.pieces(*bucket_.own):
            if changed[piece.parameter]:
                part = sums[piece.start - bucket_.own[0] : piece.end - bucket_.own[0]]
                part.copy_(flat[piece.start : piece.end])
        bucket_.reduced.store(sums)
