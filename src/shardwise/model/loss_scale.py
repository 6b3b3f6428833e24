"""Keeps the loss scale that fp16 needs: halved when a gradient overflows, doubled after a while.

Whether a gradient has overflowed all ranks know from the exchange of a step (engine/exchange.py);
engine/step.py skips the step then, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


class LossScale:
    """A dynamic loss scale (Micikevicius et al., 2018), ours or a GradScaler's.

    Halves when a gradient overflows and doubles after `interval` steps without. A GradScaler
    that is handed over gives its scale and constants and is kept up to date.
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
        """Move the scale after a step; `overflow` is alike on all ranks. `scale` is that of the
        step's gradients where they are older: one that was too high is halved once."""
        # Gradients that are used some steps late may overflow several times at a scale that has
        # been halved since: one cause, one halving.
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
        self._tell_scaler()

    def state(self) -> dict[str, float]:
        """What a checkpoint holds of it."""
        return {"scale": self.value, "good_steps": self._good_steps}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from `state`; nothing to do where this run needs no scale."""
        if not self.active:
            return
        self.value, self._good_steps = float(state["scale"]), int(state["good_steps"])
        self._tell_scaler()

    def _tell_scaler(self) -> None:
        if self._scaler is not None:
            # A GradScaler makes its scale tensor at the first use.
            self._scaler.scale(torch.ones((), device=self._scaler._device))
            self._scaler.update(self.value)
