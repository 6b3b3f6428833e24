"""Lets user code read and change the full gradients of a step (`engine.full_gradients`).

show   sums (own intervals) ─▶ times `factor`     ─▶ gathered from all ranks ─▶ param.grad
take   sums (own intervals) ◀─ divided by `factor` ◀─ rank 0's broadcast      ◀─ param.grad
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm import Collectives
from shardwise.errors import UsageError
from shardwise.states.gradients.bucket import GradientBucket
from shardwise.states.gradients.gradients import Gradients
from shardwise.states.optimizer.interval_gather import gather_bucket
from shardwise.states.parameters.lost_writes import fingerprint
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.parameters.parameters_at_rest import unguarded


@dataclass(frozen=True)
class _Shown:
    """A gradient that user code could read, with its version and bits at that time."""

    grad: Tensor
    version: int
    bits: Tensor

    @classmethod
    def of(cls, grad: Tensor) -> _Shown:
        return cls(grad, grad._version, fingerprint(grad))

    def is_changed(self, now: Tensor | None) -> bool:
        """Return whether `now` is a different tensor, or the shown tensor has been written to."""
        if now is not self.grad or now._version != self.version:
            return True
        # A write through `.data` or `.numpy()` does not increment the version.
        return bool(fingerprint(now) != self.bits)


class WholeGradients:
    """Shows the full gradients of a step to user code, and adopts any changes.

    Args:
        parameters: The parameters of the engine.
        gradients: Holds the gradient sums.
        group: The ranks across which the sums are sharded, if `scattered` is true.
        run: All ranks that have the same gradients.
        used: For each parameter, whether any rank had a gradient.
        factor: The factor from the sums to the gradients that user code sees.
        scattered: Whether each rank holds only its own intervals of the sums.
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
        """Parameter index -> gradient shown to user code, on rank 0; empty on other ranks. An
        unused parameter has no entry: its `grad` is None."""

    @torch.no_grad()
    def show(self) -> None:
        """Set every `param.grad` to the full gradient, or None if no rank had one. Collective."""
        for bucket_ in self._gradients.buckets:
            # (numel of the interval,). The product is a copy, so the sums themselves do not change.
            mine = bucket_.reduced.loaded(bucket_.kind[1]) * self._factor
            flat = gather_bucket(bucket_.layout, bucket_.own, mine, self._group)
            for slot in bucket_.layout.slots:
                self._show(slot.parameter, flat, slot.start)

    def _show(self, index: int, flat: Tensor, start: int) -> None:
        named = self._named[index]
        grad = None
        if self._used[index]:
            grad = named.view(flat, start).to(named.dtype)
        # A sharded parameter has no values while it is not gathered, but may have a gradient.
        with unguarded():
            named.parameter.grad = grad
        if grad is not None and self._run.rank == 0:
            self._shown[index] = _Shown.of(grad)

    @torch.no_grad()
    def take(self) -> list[bool]:
        """Adopt rank 0's values of the gradients that user code has changed. Collective.

        Returns, for each parameter, whether it now has a gradient. Raises UsageError on all ranks
        if a gradient is sparse on any rank.
        """
        with unguarded():
            grads = [named.parameter.grad for named in self._named]
        self._check(grads)
        changed = [self._is_changed(index, grad) for index, grad in enumerate(grads)]
        used = [grad is not None for grad in grads]
        # Rank 0 decides for all ranks, so that all of them join the same broadcasts below.
        changed, used = self._run.gather_plain([changed, used])[0]
        taken = [
            bucket_
            for bucket_ in self._gradients.buckets
            if any(changed[slot.parameter] for slot in bucket_.layout.slots)
        ]
        for bucket_ in taken:
            self._take(bucket_, grads, changed)
        self._gradients.forget_squares([bucket_.index for bucket_ in taken])
        return list(used)

    def _check(self, grads: Sequence[Tensor | None]) -> None:
        """Raise UsageError on all ranks if a gradient is sparse on any rank.

        Shapes need no check, because torch rejects a gradient with a different shape.
        """
        sparse = [
            named.name
            for named, grad in zip(self._named, grads, strict=True)
            if grad is not None and grad.layout != torch.strided
        ]
        if any(self._run.gather_plain(bool(sparse))):
            name = sparse[0] if sparse else "a parameter on another rank"
            raise UsageError(
                f"engine.full_gradients(): the gradient of {name} was set to a sparse tensor. "
                "Assign dense gradients."
            )

    def _is_changed(self, index: int, grad: Tensor | None) -> bool:
        """Return whether `grad` differs from the shown gradient. Valid on rank 0 only."""
        shown = self._shown.get(index)
        return grad is not None if shown is None else shown.is_changed(grad)

    def _take(
        self, bucket_: GradientBucket, grads: Sequence[Tensor | None], changed: Sequence[bool]
    ) -> None:
        """Replace the gradient sums of the changed parameters in `bucket_` with new values."""
        dtype, device = bucket_.reduced.dtype, bucket_.kind[1]
        flat = torch.zeros(bucket_.layout.numel, dtype=dtype, device=device)
        for slot in bucket_.layout.slots:
            grad = grads[slot.parameter]
            if changed[slot.parameter] and grad is not None:
                view = self._named[slot.parameter].view(flat, slot.start)
                view.copy_(grad.to(dtype) / self._factor)
        # Broadcast the full bucket, so that one collective suffices. Only rank 0's values are used.
        if self._run.size > 1:
            self._run.broadcast(flat).wait()
        sums = bucket_.reduced.loaded()
        # Update only changed parameters: multiplying by the factor and dividing by it again would
        # round the sums of the others.
        for piece in bucket_.layout.pieces(*bucket_.own):
            if changed[piece.parameter]:
                part = sums[piece.start - bucket_.own[0] : piece.end - bucket_.own[0]]
                part.copy_(flat[piece.start : piece.end])
        bucket_.reduced.store(sums)
