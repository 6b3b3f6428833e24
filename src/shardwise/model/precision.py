"""Runs forwards in a precision preset, and keeps the loss scale that fp16 needs.

    preset       parameters   forward          masters   loss scale
    fp32         as built     as built         -         -
    bf16-mixed   as built     autocast bf16    -         -
    fp16-mixed   as built     autocast fp16    -         dynamic
    bf16         bf16         bf16             fp32      -

Outputs of the model come in fp32 under every preset, so that losses are computed in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.collectives import ordered_sums
from shardwise.model.module_hooks import Hooked, attach

NARROW = ordered_sums.NARROW
"""The dtypes of 16-bit floats."""


@dataclass(frozen=True)
class Preset:
    """A precision preset: what a name of `--precision` means."""

    autocast: torch.dtype | None = None
    cast: torch.dtype | None = None
    scaled: bool = False


PRESETS = {
    "fp32": Preset(),
    "bf16-mixed": Preset(autocast=torch.bfloat16),
    "fp16-mixed": Preset(autocast=torch.float16, scaled=True),
    "bf16": Preset(cast=torch.bfloat16),
}


class ForwardPrecision:
    """Hooks on a model that run its forward in a preset.

    A copy of the model keeps them: it goes on computing in the same precision.
    """

    def __init__(self, preset: Preset, device_type: str) -> None:
        self._preset = preset
        self._device_type = device_type
        self._open: list[ExitStack] = []

    def attach(self, model: nn.Module) -> list[Hooked]:
        """Run every call of `model` in the preset, until the handles are removed."""
        before, after = model.register_forward_pre_hook, model.register_forward_hook
        return [
            attach(before, self.enter, kept=True, with_kwargs=True, prepend=True),
            attach(after, self.leave, kept=True, always_call=True),
        ]

    def enter(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before forward: autocast on, or floating inputs cast."""
        del model
        stack = ExitStack()
        if self._preset.autocast is not None:
            stack.enter_context(torch.autocast(self._device_type, self._preset.autocast))
        self._open.append(stack)
        if self._preset.cast is None:
            return args, kwargs
        return pytree.tree_map_only(Tensor, self._lowered, (args, kwargs))

    def leave(self, model: nn.Module, args: Any, output: Any) -> Any:
        """After forward, also one that raised: autocast off, outputs in fp32."""
        del model, args
        self._open.pop().close()
        return pytree.tree_map_only(Tensor, _raised, output)

    def _lowered(self, value: Tensor) -> Tensor:
        return value.to(self._preset.cast) if value.is_floating_point() else value

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardPrecision:
        return ForwardPrecision(self._preset, self._device_type)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": []}


def _raised(value: Tensor) -> Tensor:
    return value.float() if value.dtype in NARROW else value


_STAYS = nn.modules.batchnorm._NormBase
"""Modules that compute in fp32 under every preset."""


def is_cast(places: Iterable[tuple[nn.Module, str]]) -> bool:
    """Whether a preset that casts would cast the parameter that is at `places`."""
    return not any(isinstance(module, _STAYS) for module, _ in places)


def cast_models(models: Iterable[nn.Module], dtype: torch.dtype) -> dict[nn.Parameter, Tensor]:
    """Cast floating parameters and buffers to `dtype`, those of BatchNorm left in fp32.

    Returns the values before the cast, for the masters.
    """
    before: dict[nn.Parameter, Tensor] = {}
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, _STAYS):
            continue
        for parameter in module._parameters.values():
            if parameter is None or parameter.dtype == dtype or parameter.is_meta:
                continue  # what has no memory yet is cast when it gets some
            if parameter.is_floating_point() and parameter not in before:
                before[parameter] = parameter.detach()
                parameter.data = parameter.detach().to(dtype)
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[key] = buffer.to(dtype)
    return before


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

    def update(self, *, overflow: bool) -> None:
        """Move the scale after a step; `overflow` is alike on all ranks."""
        if not self.active:
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
