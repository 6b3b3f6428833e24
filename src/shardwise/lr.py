"""Scales learning rates with the number of workers, and warms them up.

    multiplier   S ┤         ┌──────────    S = N, linear; or the square root of N
    of the base    │     .·'
    rate         1 ┤ .·'
                   └─────────┬──────────
                   0         W epochs

Goyal et al., "Accurate, Large Minibatch SGD" (2017, arXiv:1706.02677), as Horovod's callbacks
have it; square root: Krizhevsky, "One weird trick" (2014, arXiv:1404.5997).
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
    """By how much the rate grows where the total batch is `workers` times as large.

    Raises ConfigError for a number that is not above 0, or a scaling that is none of SCALINGS.
    """
    if not 0 < workers < math.inf:
        raise ConfigError(f"workers is a number above 0, not {workers!r}.")
    if scaling not in SCALINGS:
        raise ConfigError(f"scaling is one of {', '.join(SCALINGS)}, not {scaling!r}.")
    return {"linear": float(workers), "sqrt": math.sqrt(workers), "none": 1.0}[scaling]


def warmed(epoch: float, epochs: float, to: float) -> float:
    """The multiplier of the base rate at the fractional `epoch` of a warm-up of `epochs` epochs.

    It goes from 1 to `to`: with N = `to` the rate is lr/N * (epoch * (N - 1) / epochs + 1), where
    lr = base * N is the scaled one. Without a warm-up (`epochs` 0) it is `to` from the start.
    """
    if epoch >= epochs:
        return to
    return epoch * (to - 1) / epochs + 1


class ScaledLR(LRScheduler):
    """The optimizer's rates as a larger total batch wants them. Call `step()` after each step.

        loader = sw.Loader(dataset, batch_size=32 * world.data_size, shuffle=True)
        scheduler = sw.lr.ScaledLR(optimizer, steps_per_epoch=len(loader), warmup_epochs=5)

    For scripts whose total batch grows with the number of workers: the optimizer's rate is the one
    for a single worker. Where the total batch stays, the rate stays too, and no scheduler is
    needed. `workers` says how many times larger the batch is (default: `world.data_size`, those of
    an island with `--islands`, which makes steps over its own rows);
    `scaling` is "linear", "sqrt" or "none". From base * 1 the rates go to base * factor over
    `warmup_epochs` (fractional ones too, 0 for none). It multiplies what it finds, so it goes
    together with other schedulers that do, such as MultiStepLR or CosineAnnealingLR, in the same
    loop.

    `momentum_correction` multiplies the momentum of a step by the change of the rate before it, for
    optimizers whose velocity has the rate in it (v = m v + lr g). In those of torch (v = m v + g)
    it has not, and they need no correction: for them, ModelError (found by trying).

    A state that is loaded on another number of workers goes on at the same fractional epoch with
    the rates of this one. Raises ConfigError for arguments that cannot be.
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
            raise ConfigError(f"steps_per_epoch is 1 or more, len(loader), not {steps_per_epoch}.")
        if not 0 <= warmup_epochs < math.inf:
            raise ConfigError(f"warmup_epochs is a number of 0 or more, not {warmup_epochs}.")
        if momentum_correction:
            _check_momentum(optimizer)
        if workers is None:
            # The replicas that make a step together. Islands make their own steps, unless they
            # exchange gradients (`behind`): then a step is one of the whole run.
            world = current_world()
            workers = world.data_size // world.groups_apart
        self._factor = factor(workers, scaling)
        self._epochs, self._steps_per_epoch = warmup_epochs, steps_per_epoch
        self._corrects = momentum_correction
        super().__init__(optimizer)

    @property
    def multiplier(self) -> float:
        """What the base rate is multiplied by now."""
        return self._multiplier(self.last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """The rates of the next step, from those of the optimizer."""
        before = self._multiplier(self.last_epoch - 1) if self.last_epoch else 1.0
        change = self.multiplier / before
        return [group["lr"] * change for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        """Go on by a training step."""
        corrected = self._correction()
        super().step(epoch)
        if self._corrects:
            for group in self.optimizer.param_groups:
                group["momentum"] *= self._correction() / corrected

    def state_dict(self) -> dict[str, Any]:
        """How far it has come: {"steps", "epoch" (fractional), "multiplier", "base_lrs"}, and
        "correction", by which the momentum is multiplied, where it is corrected."""
        kept = {"correction": self._correction()} if self._corrects else {}
        return kept | {
            "steps": self.last_epoch,
            "epoch": self.last_epoch / self._steps_per_epoch,
            "multiplier": self.multiplier,
            "base_lrs": [float(rate) for rate in self.base_lrs],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; load the optimizer's before. Its rates become those of this
        number of workers."""
        known = math.isclose(state["steps"] / self._steps_per_epoch, state["epoch"])
        steps = state["steps"] if known else round(state["epoch"] * self._steps_per_epoch)
        self.last_epoch, self._step_count = steps, steps + 1
        self.base_lrs = list(state["base_lrs"])
        if (change := self.multiplier / state["multiplier"]) != 1:
            for group in self.optimizer.param_groups:
                group["lr"] *= change
        correction = self._correction() if self._corrects else 1.0
        if (change := correction / state.get("correction", 1.0)) != 1:
            for group in self.optimizer.param_groups:
                group["momentum"] *= change
        # A rate may be a tensor, which later steps change in place.
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self._last_lr = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]

    def _multiplier(self, steps: int) -> float:
        return warmed(steps / self._steps_per_epoch, self._epochs, self._factor)

    def _correction(self) -> float:
        """Return the ratio by which the rate changes before the next step."""
        if self.last_epoch < 1:
            return 1.0
        return self.multiplier / self._multiplier(self.last_epoch - 1)


def _check_momentum(optimizer: optim.Optimizer) -> None:
    """Raise ModelError if the optimizer needs no correction of the momentum."""
    name = type(optimizer).__name__
    if not all("momentum" in group for group in optimizer.param_groups):
        raise ModelError(f"{name} has no momentum in its groups: leave momentum_correction out.")
    if abs(_moved(optimizer, 0.5) / _moved(optimizer, 1.0) - 1) > 0.1:
        raise ModelError(
            f"The velocity of {name} is free of the learning rate (v = m v + g), so that every "
            "change of the rate holds for it too and nothing is to be corrected: leave "
            "momentum_correction out."
        )


def _moved(optimizer: optim.Optimizer, rate: float) -> float:
    """Return how far momentum alone moves a parameter at `rate`, after a step at rate 1."""
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
