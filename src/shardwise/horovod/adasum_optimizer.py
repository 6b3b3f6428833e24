"""`hvd.DistributedOptimizer(..., op=hvd.Adasum)`: each rank steps by itself, and what the steps
change is joined by Adasum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import optim

from shardwise.errors import HookOrder
from shardwise.horovod.allreduce import grouped_allreduce_async_
from shardwise.horovod.asking import ReduceOp, wait
from shardwise.horovod.buckets import Way
from shardwise.horovod.context import current
from shardwise.states.tracked import Tracked


class AdasumSteps(optim.Optimizer):
    """What such an optimizer has before the user's own class."""

    _forms: Sequence[Tracked]
    _way: Way
    _name: str
    _opt_called: bool

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on this rank's own gradients; then every parameter is where all ranks' steps have
        led from where it was."""
        self._opt_called = True
        params = [form.parameter for form in self._forms if form.parameter.requires_grad]
        before = [param.detach().clone() for param in params]
        loss = super().step(closure)
        with torch.no_grad():
            changes = [param - old for param, old in zip(params, before, strict=True)]
            packed = [self._way.compression.compress(change) for change in changes]
            sent = [tensor for tensor, _ in packed]
            process_set = self._way.process_set
            wait(
                grouped_allreduce_async_(
                    sent, None, self._name, ReduceOp.Adasum, process_set=process_set
                )
            )
            for param, old, (tensor, context) in zip(params, before, packed, strict=True):
                param.copy_(old + self._way.compression.decompress(tensor, context))
        current().stepped()
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def step_alone(self) -> None:
        """The step of the user's own class, of which other ranks do not hear."""
        super().step()

    def synchronize(self) -> None:
        """Nothing: gradients stay each rank's own."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises HookOrder, as in Horovod."""
        raise HookOrder("optimizer.skip_synchronize() with Adasum: its step is what is joined.")
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Nothing to count: `step` takes what the backwards have added up."""
