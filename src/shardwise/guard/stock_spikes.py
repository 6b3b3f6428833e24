"""Finds spikes and non-finite values in training loops with DDP or FSDP2, before the update.

guard.follow(loader)   remembers which samples this rank has
guard.backward         keeps the loss and the squared norm of this rank's gradients
optimizer.step         exchanges both in a small collective; then the update is made or skipped
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from shardwise.errors import GuardError
from shardwise.guard.checks import SmallGroup
from shardwise.guard.spikes import Spikes, largest_loss

SPIKE_ACTIONS = ("warn", "skip", "stop", "off")


class StockSpikes:
    """Compares each step's loss and gradient norm with those of recent steps.

    Args:
        group: Ranks that step together.
        model: The model, without DistributedDataParallel.
        optimizer: Its optimizer.
        action: "warn", "skip" or "stop".
        scaler: The loop's GradScaler, or None.
        say: Prints a line on the main rank only.
    """

    def __init__(
        self,
        group: SmallGroup,
        model: nn.Module,
        optimizer: optim.Optimizer,
        action: str,
        scaler: Any,
        say: Callable[[str], None],
    ) -> None:
        self._group, self._model, self._optimizer = group, model, optimizer
        self._action, self._scaler, self._say = action, scaler, say
        self._spikes = Spikes()
        self._losses: list[Tensor] = []
        self._squares: list[Tensor] = []
        self._scale = 1.0
        self._samples: list[int] = []
        self._backwards = 0

    def follow(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield a loader's batches, and remember the indices of their samples."""
        sampler: Any = loader.batch_sampler
        if sampler is None or isinstance(loader.dataset, torch.utils.data.IterableDataset):
            yield from loader
            return
        if not isinstance(sampler, _Remembered):
            # DataLoader forbids assignments to this attribute.
            sampler = vars(loader)["batch_sampler"] = _Remembered(sampler)
        if (iterator := getattr(loader, "_iterator", None)) is not None:
            # Persistent workers that were started before read from the first sampler.
            iterator._index_sampler = sampler
        sampler.drawn.clear()
        before, backwards = list(self._samples), self._backwards
        try:
            for batch in loader:
                # Workers read ahead, but yield batches in the order of the sampler.
                self._samples += sampler.drawn.popleft()
                yield batch
        finally:
            if self._backwards == backwards:  # an evaluation, which is no part of a step
                self._samples = before

    def after_backward(self, loss: Tensor) -> None:
        """Record a loss, and the gradients that its backward pass has added to."""
        self._backwards += 1
        if loss.numel() == 1:
            value: Any = loss.detach()
            if hasattr(value, "full_tensor"):  # a DTensor, as in `loss_parallel`
                value = value.full_tensor()
            self._losses.append(value.reshape(()).double())
        self._squares = [torch.stack(list(_weighted_squares(self._model, self._group.size))).sum()]
        if self._scales:
            self._scale = float(self._scaler.get_scale())

    @property
    def _scales(self) -> bool:
        return self._scaler is not None and bool(self._scaler.is_enabled())

    def forget(self) -> None:
        """Forget the losses and samples of the completed or skipped step."""
        self._losses, self._squares, self._samples = [], [], []

    def before_step(self, step: int) -> None:
        """Look at the step that is about to be made. Collective.

        Raises:
            GuardError: It is a spike, and the action is "stop". All ranks raise it.
        """
        group = self._group
        device = group.small_device
        loss = torch.stack(self._losses).sum() if self._losses else torch.tensor(0.0).double()
        square = self._squares[0] if self._squares else torch.tensor(0.0).double()
        count = torch.tensor(float(len(self._losses))).double()
        row = torch.stack([each.to(device) for each in (loss, square, count)])
        rows = group.read(group.gather_rows(row))
        if not rows[:, 2].any():
            return  # a closure computes the losses inside of the step
        losses = [float(each) / self._scale for each in rows[:, 0]]
        mean, norm = math.fsum(losses) / group.size, math.sqrt(rows[:, 1].sum()) / self._scale
        if self._scales and math.isfinite(mean) and not math.isfinite(norm):
            # The scale was too large. GradScaler skips the step, but calls `optimizer.step` of
            # fused optimizers, which do so themselves.
            return
        if not (math.isfinite(mean) and math.isfinite(norm)):
            found = f"the loss is {mean:.4g}, and the gradient norm is {norm:.4g}"
        elif not (found := self._spikes.look_at(mean, norm)):
            return
        samples = group.gather_plain(self._samples)
        origin = largest_loss(list(zip(losses, samples, strict=True)))
        words = f"step {step}: {found}. {origin}"
        if not any(samples):
            words += " To see samples, iterate over guard.follow(loader)."
        if self._action == "stop":
            raise GuardError(
                f"The guard found a spike in {words} Nothing was updated. Check these samples, or "
                'skip such steps with sw.Guard(spikes="skip").'
            )
        self._say(f"shardwise: guard: {words}{' The step is skipped.' * (self._action == 'skip')}")
        if self._action == "skip":
            # torch's optimizers leave parameters without a gradient unchanged.
            for options in self._optimizer.param_groups:
                for parameter in options["params"]:
                    parameter.grad = None


class _Remembered:
    """A batch sampler that keeps the indices that it yields."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.drawn: deque[list[int]] = deque()

    def __iter__(self) -> Iterator[Any]:
        for indices in self._sampler:
            self.drawn.append([int(each) for each in indices if hasattr(each, "__index__")])
            yield indices

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler":
            raise AttributeError(name)  # a copy that is being made has no attributes yet
        return getattr(self._sampler, name)


def _weighted_squares(model: nn.Module, size: int) -> Iterator[Tensor]:
    """Yield squared norms of this rank's gradients, such that the sum over ranks is the total.

    With `size` ranks and a gradient in c shards, size / c ranks hold each shard.
    """
    device = next(model.parameters()).device
    yield torch.zeros((), dtype=torch.float64, device=device)
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        gradient: Any = parameter.grad
        shards = 1
        for axis, placement in enumerate(getattr(gradient, "placements", ())):
            shards *= gradient.device_mesh.size(axis) if placement.is_shard() else 1
        local = getattr(gradient, "_local_tensor", gradient)
        if local.is_sparse:
            local = local.coalesce().values()
        # In fp16 the norm could overflow.
        wide = torch.promote_types(local.dtype, torch.float32)
        norm = torch.linalg.vector_norm(local, dtype=wide)
        yield norm.to(device, torch.float64).square() * (shards / size)
