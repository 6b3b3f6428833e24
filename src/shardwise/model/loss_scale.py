"""The fp16 loss scale: halved if a gradient overflows, doubled after a number of good steps.

All ranks detect an overflow in the step's exchange (engine/exchange.py). engine/step.py then skips
the step on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


class LossScale:
    """A dynamic loss scale (Micikevicius et al., "Mixed precision training", 2018).

    It is halved if a gradient overflows, and doubled after 2000 steps without overflow. If a
    GradScaler is passed, it provides the initial scale and these constants, and its own scale is
    kept up to date.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None, *, active: bool) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.active = active or self._scaler is not None
        self._growth, self._backoff, self._interval = 2.0, 0.5, 2000
        self.value = 65536.0 if self.active else 1.0
        self._good_steps = 0
        if self._scaler is not None:
            self._growth = self._scaler.get_growth_factor()
            self._backoff = self._scaler.get_backoff_factor()
            self._interval = self._scaler.get_growth_interval()
            self.value = self._scaler.get_scale()

    def update(self, *, overflow: bool, scale: float | None = None) -> None:
        """Adjust the scale after a step.

        Args:
            overflow: Whether a gradient overflowed. Must be the same on all ranks.
            scale: The scale of the applied gradients, if they were computed in an earlier step.
        """
        # Gradients that are applied some steps late may overflow several times at a scale that has
        # been halved since. A single cause must halve the scale only once.
        if not self.active or (overflow and scale is not None and scale > self.value):
            return
        if overflow:
            self.value *= self._backoff
            self._good_steps = 0
        else:
            self._good_steps += 1
            if self._good_steps == self._interval:
                self.value *= self._growth
                self._good_steps = 0
        self._update_scaler()

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"scale": self.value, "good_steps": self._good_steps}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore `state`. Does nothing if this run uses no loss scale."""
        if not self.active:
            return
        self.value, self._good_steps = float(state["scale"]), int(state["good_steps"])
        self._update_scaler()

    def _update_scaler(self) -> None:
        if self._scaler is not None:
            # A GradScaler creates its scale tensor on first use.
            self._scaler.scale(torch.ones((), device=self._scaler._device))
            self._scaler.update(self.value)
