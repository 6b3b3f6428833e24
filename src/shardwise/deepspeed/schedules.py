"""Implements DeepSpeed's five learning-rate schedules, as functions of the number of steps.

The range test, and the cycles of learning rate and momentum, are from Smith (2018), "A disciplined
approach to neural network hyper-parameters: Part 1". The values are the same as in DeepSpeed
0.19.8.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor, optim

from shardwise.errors import BadSchedule

Values = float | Sequence[float]
"""One number for all parameter groups, or one for each."""


class Schedule:
    """Sets the learning rate of each parameter group. Call `step` after each update.

    The constructor sets the learning rates for the first update.

    Args:
        optimizer: The optimizer whose parameter groups it sets.
        last_batch_iteration: Number of the last step, or -1 before the first.
    """

    def __init__(self, optimizer: optim.Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr = [float(group["lr"]) for group in optimizer.param_groups]

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group at the current step."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """Return the learning rates that were last set."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one step, or to `last_batch_iteration`, and set the learning rates."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = (
            following if last_batch_iteration is None else last_batch_iteration
        )
        self._set(self.get_lr())

    def state_dict(self) -> dict[str, int]:
        """Return the number of the last step."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from the step in `state`."""
        self.last_batch_iteration = state["last_batch_iteration"]

    def _set(self, rates: Sequence[float]) -> None:
        self._last_lr = list(rates)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _each(self, value: Values, name: str) -> list[float]:
        """Return `value` as a list with one entry per parameter group.

        Raises BadSchedule if it is a list of the wrong length.
        """
        count = len(self.optimizer.param_groups)
        if not isinstance(value, list | tuple):
            return [value] * count  # type: ignore[list-item]
        if len(value) != count:
            raise BadSchedule(
                f"{name} has {len(value)} values, but the optimizer has {count} groups: pass one "
                "number, or one per group."
            )
        return list(value)


class WarmupLR(Schedule):
    """A warmup, followed by a constant learning rate.

    Args:
        optimizer: The optimizer whose parameter groups it sets.
        warmup_min_lr: Initial learning rate.
        warmup_max_lr: Learning rate after the warmup (default: the optimizer's).
        warmup_num_steps: Number of warmup steps.
        warmup_type: "log" or "linear".
        last_batch_iteration: Number of the last step, or -1 before the first.

    Example:
        ```python
        schedule = WarmupLR(optimizer, warmup_max_lr=0.001, warmup_num_steps=100)
        ```
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        warmup_min_lr: Values = 0.0,
        warmup_max_lr: Values | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_type = _warmup_type(warmup_type)
        self.min_lrs = self._each(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = (
            list(self._last_lr)
            if warmup_max_lr is None
            else self._each(warmup_max_lr, "warmup_max_lr")
        )
        if last_batch_iteration == -1:
            self._set(self.get_lr())

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group at the current step."""
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        done, steps = self.last_batch_iteration, self.warmup_num_steps
        is_warm = done >= steps
        share = self._after_warmup() if is_warm else _warmed_up(done, steps, self.warmup_type)
        return [
            low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]

    def _after_warmup(self) -> float:
        """Return the learning rate's position between its minimum (0) and its maximum (1)."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """A warmup as in WarmupLR, followed by a linear decay to 0 at step `total_num_steps`."""

    def __init__(
        self,
        optimizer: optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Values = 0.0,
        warmup_max_lr: Values = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )

    def _after_warmup(self) -> float:
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(Schedule):
    """A warmup, followed by a half-cosine decay. It scales each group's own learning rate.

    Args:
        optimizer: The optimizer whose parameter groups it sets.
        total_num_steps: The step at which the decay ends.
        warmup_min_ratio: Initial factor.
        warmup_num_steps: Number of steps until the factor is 1.
        cos_min_ratio: Final factor.
        warmup_type: "log" or "linear".
        last_batch_iteration: Number of the last step, or -1 before the first.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_type = _warmup_type(warmup_type)
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.org_lrs = list(self._last_lr)
        if last_batch_iteration == -1:
            self._set(self.get_lr())

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group at the current step."""
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """Return the factor for each group's own learning rate at the current step."""
        done = self.last_batch_iteration
        if done < 0:
            return 0.0
        if done < self.warmup_num_steps:
            share = _warmed_up(done, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + share * (1.0 - self.warmup_min_ratio)
        length = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (done - self.warmup_num_steps + 1) / length)
        share = (1.0 + math.cos(math.pi * progress)) / 2.0
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * share)


class LRRangeTest(Schedule):
    """Increases learning rates without limit, to find the largest one that still trains a model.

    Args:
        optimizer: The optimizer whose parameter groups it sets.
        lr_range_test_min_lr: Initial learning rate.
        lr_range_test_step_size: Number of steps per interval.
        lr_range_test_step_rate: Growth per interval, in multiples of the initial learning rate.
        lr_range_test_staircase: Hold the learning rate constant within an interval.
        last_batch_iteration: Number of the last step, or -1 before the first.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        lr_range_test_min_lr: Values = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if not isinstance(lr_range_test_step_size, int) or lr_range_test_step_size <= 0:
            raise BadSchedule(
                "lr_range_test_step_size must be an integer of 1 or more, not "
                f"{lr_range_test_step_size!r}."
            )
        self.min_lr = self._each(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._set(self.min_lr)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group at the current step."""
        intervals = (self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            intervals = math.floor(intervals)
        return [rate * (1 + self.step_rate * intervals) for rate in self.min_lr]


class OneCycle(Schedule):
    """One cycle of learning rates, which rise and then fall, followed by a decay.

    If `cycle_momentum` is true and the optimizer has betas, the first beta cycles in the opposite
    direction.

    Args:
        optimizer: The optimizer whose parameter groups it sets.
        cycle_min_lr, cycle_max_lr: Learning rates at the ends and at the peak of the cycle.
        decay_lr_rate: Decay of the learning rate after the cycle, per `decay_step_size` steps.
        cycle_first_step_size, cycle_second_step_size: Number of steps in the first and second half
            of the cycle (default of the second: the same as the first).
        cycle_first_stair_count, cycle_second_stair_count: Number of stairs with a constant learning
            rate, or 0 for a continuous slope.
        decay_step_size: Number of steps per decay interval, or 0 for no decay.
        cycle_momentum: Whether to cycle the first beta.
        cycle_min_mom, cycle_max_mom: First beta at the peak and at the ends of the cycle.
        decay_mom_rate: Growth of the first beta after the cycle, per `decay_step_size` steps.
        last_batch_iteration: Number of the last step, or -1 before the first.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        cycle_min_lr: Values,
        cycle_max_lr: Values,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Values = 0.8,
        cycle_max_mom: Values = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        if cycle_first_step_size <= 0 or second < 0:
            raise BadSchedule(
                "OneCycle needs a cycle_first_step_size above 0 and a cycle_second_step_size of 0 "
                f"or more, not {cycle_first_step_size} and {second}."
            )
        self._halves = float(cycle_first_step_size), float(second)
        stairs = cycle_first_stair_count
        self._stairs = (
            stairs,
            stairs if cycle_second_stair_count is None else (cycle_second_stair_count),
        )
        self._decay_step_size = decay_step_size
        self._decay_lr_rate, self._decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.min_lrs = self._each(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._each(cycle_max_lr, "cycle_max_lr")
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        self.min_moms = self._each(cycle_min_mom, "cycle_min_mom")
        self.max_moms = self._each(cycle_max_mom, "cycle_max_mom")
        if last_batch_iteration == -1:
            self._set(self.min_lrs)
            self._set_momentum(self.min_moms)

    @property
    def total_size(self) -> float:
        """Number of steps in the complete cycle."""
        return sum(self._halves)

    @property
    def step_ratio(self) -> float:
        """The first half's share of the cycle's steps, as a fraction."""
        return self._halves[0] / self.total_size

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one step, or to `last_batch_iteration`, and set learning rates and betas."""
        super().step(last_batch_iteration)
        if (moments := self.get_mom()) is not None:
            self._set_momentum([beta for beta, _ in moments])

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group at the current step."""
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            return [
                low + (high - low) * height
                for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
            ]
        factor = 1 + self._decay_lr_rate * self._decays()
        return [rate / factor for rate in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each parameter group at this step, or None if they are not cycled."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            firsts = [
                high - (high - low) * height
                for low, high in zip(self.min_moms, self.max_moms, strict=True)
            ]
        else:
            factor = 1 + self._decay_mom_rate * self._decays()
            firsts = [beta * factor for beta in self.max_moms]
        return [(first, _SECOND_BETA) for first in firsts]

    def _decays(self) -> float:
        """Return the number of decay intervals since the end of the cycle, including fractions."""
        if not self._decay_step_size:
            return 0.0
        return (self.last_batch_iteration - self.total_size + 1) / self._decay_step_size

    def _height(self) -> float:
        """Return the height in the cycle: 0 at its ends, 1 at its peak."""
        first, second = self._halves
        at = (self.last_batch_iteration + 1) % self.total_size
        rising = at <= first
        height = at / first if rising else (self.total_size - at) / second
        stairs = self._stairs[0 if rising else 1]
        return math.floor(height * stairs) / stairs if stairs > 0 else height

    def _set_momentum(self, firsts: Sequence[float]) -> None:
        if self.cycle_momentum:
            for group, first in zip(self.optimizer.param_groups, firsts, strict=True):
                group["betas"] = (first, _SECOND_BETA)


_SECOND_BETA = 0.99
"""The second Adam beta that OneCycle sets."""


def _warmed_up(done: int, steps: int, kind: str) -> float:
    """Return the progress of a warmup, from 0 to 1, after `done` of its `steps` steps."""
    return math.log(done + 1) / math.log(steps) if kind == "log" else done / steps


def _warmup_steps(count: Any) -> int:
    if not isinstance(count, int) or count <= 0:
        raise BadSchedule(f"warmup_num_steps must be an integer of 1 or more, not {count!r}.")
    return max(2, count)  # at 1, `_warmed_up` would divide by log(1) = 0


def _warmup_type(kind: str) -> str:
    if kind in ("log", "linear"):
        return kind
    warnings.warn(f"warmup_type must be log or linear, not {kind!r}: log is used.", stacklevel=4)
    return "log"


BY_NAME = {
    each.__name__: each for each in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}

VALID_LR_SCHEDULES = list(BY_NAME)
"""The names of the schedules. Scripts import this list."""
