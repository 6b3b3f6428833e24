"""Scales the learning rate with the number of workers, with warm-up.

    multiplier   S ┤         ┌──────────    S = N, linear; or the square root of N
    of the base    │     .·'
    rate         1 ┤ .·'
                   └─────────┬──────────
                   0         W epochs

Linear: Goyal et al., "Accurate, Large Minibatch SGD" (2017, arXiv:1706.02677), with the warm-up of
Horovod's callbacks. Square root: Krizhevsky, "One weird trick" (2014, arXiv:1404.5997).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LRScheduler

from shardwise.errors import ConfigError, ModelError
from shardwise.world.world import current as current_world

SCALINGS = ("linear", "sqrt", "none")


def factor(workers: float, scaling: str = "linear") -> float:
    """Return the learning-rate factor for a global batch that is `workers` times as large.

    Args:
        workers: Ratio of the new batch size to the old one, above 0.
        scaling: "linear", "sqrt" or "none".

    Raises:
        ConfigError: `workers` is not above 0, or `scaling` is unknown.

    Example:
        >>> factor(4, "sqrt")
        2.0
    """
    if not 0 < workers < math.inf:
        raise ConfigError(f"workers must be a number above 0, not {workers!r}.")
    if scaling not in SCALINGS:
        raise ConfigError(f"scaling must be one of {', '.join(SCALINGS)}, not {scaling!r}.")
    return {"linear": float(workers), "sqrt": math.sqrt(workers), "none": 1.0}[scaling]


def warmed(epoch: float, epochs: float, to: float) -> float:
    """Return the multiplier of the base learning rate at a point of a linear warm-up.

    Args:
        epoch: Fractional number of epochs since the start.
        epochs: Length of the warm-up in epochs. If 0, there is no warm-up and the result is `to`.
        to: Multiplier after the warm-up. The multiplier at the start is 1.

    Example:
        >>> warmed(2.5, epochs=5.0, to=8.0)
        4.5
    """
    if epoch >= epochs:
        return to
    return epoch * (to - 1) / epochs + 1


class ScaledLR(LRScheduler):
    """A scheduler that scales the optimizer's learning rates for a larger global batch.

    For scripts whose global batch grows with the number of workers. Pass the optimizer the learning
    rate for a single worker. During the warm-up, the scheduler raises it to this rate times the
    factor. If the global batch stays the same, so does the learning rate, and no scheduler is
    needed. Call `step()` after each training step.

    It multiplies the current learning rates, so it can be combined with other schedulers that do
    the same, such as MultiStepLR or CosineAnnealingLR. If a state is loaded with a different number
    of workers, training continues at the same fractional epoch, with the learning rates for the new
    number.

    Args:
        optimizer: The user's optimizer.
        steps_per_epoch: Training steps per epoch, such as `len(loader)`.
        workers: Ratio of the global batch size to that of a single worker. Default:
            `world.data_size`. With `--islands`, the default is the number of replicas per island,
            because each island steps on its own rows.
        scaling: "linear" (default), "sqrt" or "none".
        warmup_epochs: Length of the warm-up in epochs, possibly fractional; 0 for none. Default: 5.
        momentum_correction: Multiply each step's momentum by the ratio of its learning rate to the
            previous step's. For optimizers whose velocity contains the learning rate (v = m v + lr
            g). torch's optimizers (v = m v + g) need no correction. Default: False.

    Raises:
        ConfigError: An argument is out of range.
        ModelError: `momentum_correction` is set, but a trial step shows that the optimizer does not
            need it.

    Example:
        loader = sw.Loader(dataset, batch_size=32 * world.data_size, shuffle=True)
        scheduler = sw.lr.ScaledLR(optimizer, steps_per_epoch=len(loader), warmup_epochs=5)
        for x, y in loader:
            engine.backward(loss_fn(model(x), y))
            engine.step()
            scheduler.step()
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        *,
        steps_per_epoch: int,
        workers: float | None = None,
        scaling: str = "linear",
        warmup_epochs: float = 5.0,
        momentum_correction: bool = False,
    ) -> None:
        if steps_per_epoch < 1:
            raise ConfigError(
                f"steps_per_epoch must be 1 or more (usually len(loader)), not {steps_per_epoch}."
            )
        if not 0 <= warmup_epochs < math.inf:
            raise ConfigError(f"warmup_epochs must be a number of 0 or more, not {warmup_epochs}.")
        if momentum_correction:
            _check_momentum(optimizer)
        if workers is None:
            # Count the replicas that step together. Islands step separately, unless they exchange
            # gradients (`--behind`), in which case a step covers the whole run.
            world = current_world()
            workers = world.data_size // world.groups_apart
        self._factor = factor(workers, scaling)
        self._epochs, self._steps_per_epoch = warmup_epochs, steps_per_epoch
        self._corrects = momentum_correction
        super().__init__(optimizer)

    @property
    def multiplier(self) -> float:
        """Current multiplier of the base learning rate."""
        return self._multiplier(self.last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Return the next step's learning rates, computed from the optimizer's current ones."""
        # Use a ratio instead of base_lr * multiplier, so that other schedulers' factors are kept.
        before = self._multiplier(self.last_epoch - 1) if self.last_epoch else 1.0
        change = self.multiplier / before
        return [group["lr"] * change for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        """Advance by one training step."""
        # A correction lasts one step: divide by the previous one before applying the next.
        corrected = self._correction()
        super().step(epoch)
        if self._corrects:
            for group in self.optimizer.param_groups:
                group["momentum"] *= self._correction() / corrected

    def state_dict(self) -> dict[str, Any]:
        """Return a dict with "steps", "epoch" (fractional), "multiplier" and "base_lrs".

        With `momentum_correction`, it also contains "correction", the current momentum factor.
        """
        correction = {"correction": self._correction()} if self._corrects else {}
        return correction | {
            "steps": self.last_epoch,
            "epoch": self.last_epoch / self._steps_per_epoch,
            "multiplier": self.multiplier,
            "base_lrs": [float(rate) for rate in self.base_lrs],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the schedule from `state`. Load the optimizer's state first.

        Rescales the optimizer's learning rates to the current number of workers.
        """
        # With a different global batch, an epoch has a different number of steps: keep the epoch.
        same_length = math.isclose(state["steps"] / self._steps_per_epoch, state["epoch"])
        steps = state["steps"] if same_length else round(state["epoch"] * self._steps_per_epoch)
        # torch's own attribute: because of its initial step, it is one more than last_epoch.
        self.last_epoch, self._step_count = steps, steps + 1
        self.base_lrs = list(state["base_lrs"])
        if (change := self.multiplier / state["multiplier"]) != 1:
            for group in self.optimizer.param_groups:
                group["lr"] *= change
        correction = self._correction() if self._corrects else 1.0
        if (change := correction / state.get("correction", 1.0)) != 1:
            for group in self.optimizer.param_groups:
                group["momentum"] *= change
        # A learning rate may be a tensor that later steps change in place.
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self._last_lr = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]

    def _multiplier(self, steps: int) -> float:
        return warmed(steps / self._steps_per_epoch, self._epochs, self._factor)

    def _correction(self) -> float:
        """Return the next step's learning rate, divided by the current step's."""
        if self.last_epoch < 1:
            return 1.0
        return self.multiplier / self._multiplier(self.last_epoch - 1)


def _check_momentum(optimizer: optim.Optimizer) -> None:
    """Raise ModelError if the optimizer's momentum does not need a correction."""
    name = type(optimizer).__name__
    if not all("momentum" in group for group in optimizer.param_groups):
        raise ModelError(f"{name} has no momentum in its groups: remove momentum_correction.")
    # If momentum alone moves a parameter less at half the learning rate, the rate is applied to the
    # velocity (v = m v + g). Otherwise the velocity already contains the rate of its own step.
    if abs(_moved(optimizer, 0.5) / _moved(optimizer, 1.0) - 1) > 0.1:
        raise ModelError(
            f"The velocity of {name} does not contain the learning rate (v = m v + g), so it "
            "needs no correction when the learning rate changes: remove momentum_correction."
        )


def _moved(optimizer: optim.Optimizer, rate: float) -> float:
    """Return how far momentum alone moves a parameter at `rate`, after a step at rate 1."""
    # Disable weight decay, which would move the parameter too.
    options = {**optimizer.defaults, "lr": 1.0, "momentum": 0.5, "weight_decay": 0.0}
    options = {name: value for name, value in options.items() if name in optimizer.defaults}
    parameter = nn.Parameter(torch.ones(2, 2))
    copy = type(optimizer)([parameter], **options)
    parameter.grad = torch.full((2, 2), 0.1)
    copy.step()
    before = parameter.detach().clone()
    copy.param_groups[0]["lr"] = rate
    parameter.grad = torch.zeros(2, 2)
    copy.step()
    return float((before - parameter.detach()).norm())
