"""Launches the update of a single accelerator before the host knows the step's totals.

The host needs the norm of the gradients, which the device computes last, to decide about the step.
If the host launched the update only then, the device would be idle until it arrives:

    device   backward ── norm ── copy ── update ────── forward
    host     launch the update ──── wait ──── decide ──── launch forward

So the device computes the factor itself, and skips the update if the norm is not finite. The host
makes the same decision from the same numbers, and applies what depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from shardwise.engine.build import States
from shardwise.engine.gradient_weighting import GradientWeighting
from shardwise.engine.step_statistics import Aggregation, StepReport
from shardwise.states.optimizer.inner_optimizer import DeviceFactor
from shardwise.timeline.recorder import span


class EarlyUpdate:
    """The update of one step. It may be launched before the host reads the step's totals.

    Args:
        states: The engine's parameters, gradients and optimizer state.
        aggregation: Adds up the statistics of the only rank.
        weighting: Knows the divisor of the gradients.
        max_norm: The norm to which the gradient is clipped, or None.
        abandoning: Returns a context manager that discards the step if the block raises.
    """

    has_updated = False
    """True if the device has applied the update, or will do so without the host."""

    def __init__(
        self,
        states: States,
        aggregation: Aggregation,
        weighting: GradientWeighting,
        max_norm: float | None,
        abandoning: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._states = states
        self._aggregation = aggregation
        self._weighting = weighting
        self._max_norm = max_norm
        self._abandoning = abandoning

    def launch(self, report: StepReport) -> None:
        """Launch the update. Does nothing if the host must decide first.

        `report` is the step's report, whose norm and losses are still on the device.
        """
        states, inners = self._states, self._states.optimizer.inners
        if (
            report.squared_norm.device.type == "cpu"
            or report.squared_norm.numel() > 1
            or report.written
            or any(report.late)
            or not all(report.used)
            or states.averages is not None
            or states.optimizer.rounds
            or not all(inner.skips_on(report.squared_norm.device) for inner in inners)
        ):
            return
        # The host can decide without the losses, and without the norm unless it isn't finite.
        known = replace(
            report,
            losses=[0.0] * len(report.losses),
            squared_norm=torch.zeros((), dtype=torch.float64, device="cpu"),
        )
        weight = report.weights[0]
        if isinstance(weight, Tensor) and self._weighting.knows_divisor and not report.several:
            # The weight of the only loss cancels out. It matters only whether it is zero.
            known = replace(known, weights=[1.0], rows=0.0, shown=0.0)
        if not known.is_near:
            return
        totals = known.totals_of_one(self._aggregation)
        if totals.is_mixed or not totals.weight:
            return
        divisor = self._weighting.divisor(totals.denominator)
        factor = self._factor(report.squared_norm, divisor, weight)
        with self._abandoning(), span("update"), torch.no_grad():
            states.parameters.begin_update()
            for inner in inners:
                inner.step(totals.used, factor)
        self.has_updated = True

    def _factor(self, squared: Tensor, divisor: float, weight: float | Tensor) -> DeviceFactor:
        """Return the factor that `StepRunner` would compute on the host, in the same bits."""

        def number(value: float) -> Tensor:
            # Divide tensors only: torch multiplies by the reciprocal of a Python number.
            return torch.full((), value, dtype=torch.float64, device=squared.device)

        norm = squared.sqrt() / number(divisor)
        factor: float | Tensor = 1.0 / divisor
        if self._max_norm is not None:
            clip = (number(self._max_norm) / (norm + 1e-6)).clamp(max=1.0)
            factor = number(1.0 / divisor) * clip
        applies = norm.isfinite()
        if isinstance(weight, Tensor):
            applies = applies & (weight.reshape(()) != 0)
        return DeviceFactor.of(factor, skips=applies.logical_not())
