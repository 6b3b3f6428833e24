"""Runs forwards in a precision preset; `loss_scale.py` keeps the scale that fp16 needs.

    preset       parameters   forward          masters   loss scale
    fp32         as built     as built         -         -
    bf16-mixed   as built     autocast bf16    -         -
    fp16-mixed   as built     autocast fp16    -         dynamic
    bf16         bf16         bf16             fp32      -
    fp64         fp64         fp64             -         -

Outputs of the model come in fp32 under the presets of 16 bits, so that losses are computed in fp32.
Under fp64 they stay fp64, as gradients and optimizer state do. There every module takes its
floating-point inputs in fp64, so that a forward which makes fp32 tensors on its way, or casts to
fp32, goes on in fp64 from the next module with what that cast has left; and what a forward makes
without naming a dtype is fp64 too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.comm import ordered_sums
from shardwise.model.module_hooks import Hooked, attach
from shardwise.model.optimizer_access import held

NARROW = ordered_sums.NARROW
"""The dtypes of 16-bit floats."""


@dataclass(frozen=True)
class Preset:
    """A precision preset: what a name of `--precision` means."""

    autocast: torch.dtype | None = None
    cast: torch.dtype | None = None
    scaled: bool = False

    @property
    def widens(self) -> bool:
        """Whether it takes all of the model, in every module, to more than fp32."""
        return self.cast is torch.float64


PRESETS = {
    "fp32": Preset(),
    "bf16-mixed": Preset(autocast=torch.bfloat16),
    "fp16-mixed": Preset(autocast=torch.float16, scaled=True),
    "bf16": Preset(cast=torch.bfloat16),
    "fp64": Preset(cast=torch.float64),
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
        inner = [module for module in model.modules() if module is not model]
        return [
            attach(before, self.enter, kept=True, with_kwargs=True, prepend=True),
            attach(after, self.leave, kept=True, always_call=True),
            *(
                attach(module.register_forward_pre_hook, self.cast, kept=True, with_kwargs=True)
                for module in (inner if self._preset.widens else ())
            ),
        ]

    def enter(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before forward: autocast on, or floating inputs cast."""
        stack = ExitStack()
        if self._preset.autocast is not None:
            stack.enter_context(torch.autocast(self._device_type, self._preset.autocast))
        if self._preset.widens:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        self._open.append(stack)
        if self._preset.cast is None:
            return args, kwargs
        return self.cast(model, args, kwargs)

    def cast(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Floating inputs in the dtype that the preset casts to."""
        return pytree.tree_map_only(Tensor, self._cast, (args, kwargs))

    def leave(self, model: nn.Module, args: Any, output: Any) -> Any:
        """After forward, also one that raised: autocast off, outputs in fp32."""
        del model, args
        self._open.pop().close()
        return pytree.tree_map_only(Tensor, _raised, output)

    def _cast(self, value: Tensor) -> Tensor:
        return value.to(self._preset.cast) if value.is_floating_point() else value

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardPrecision:
        return ForwardPrecision(self._preset, self._device_type)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": []}


def _raised(value: Tensor) -> Tensor:
    return value.float() if value.dtype in NARROW else value


_STAYS = nn.modules.batchnorm._NormBase
"""Modules that compute in fp32 under every preset of 16 bits."""


def is_cast(places: Iterable[tuple[nn.Module, str]], dtype: torch.dtype) -> bool:
    """Whether a preset that casts to `dtype` would cast the parameter that is at `places`."""
    return dtype not in NARROW or not any(isinstance(module, _STAYS) for module, _ in places)


def cast_models(models: Iterable[nn.Module], dtype: torch.dtype) -> dict[nn.Parameter, Tensor]:
    """Cast floating parameters and buffers to `dtype`; of 16 bits not those of BatchNorm.

    Returns the values before the cast, for the masters.
    """
    before: dict[nn.Parameter, Tensor] = {}
    for module in (module for model in models for module in model.modules()):
        if dtype in NARROW and isinstance(module, _STAYS):
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


def widen_states(optimizers: Iterable[torch.optim.Optimizer], dtype: torch.dtype) -> None:
    """Cast what optimizers keep for parameters of `dtype` by element, as Adagrad does from the
    start, where it has fewer bits; their counts stay as torch has them."""
    for state in (state for optimizer in optimizers for state in held(optimizer).items()):
        parameter, kept = state
        for key, value in kept.items():
            if (
                isinstance(value, Tensor)
                and value.ndim
                and value.is_floating_point()
                and value.dtype.itemsize < dtype.itemsize
                and parameter.dtype == dtype
            ):
                kept[key] = value.to(dtype)


def widen_narrow_states(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Cast to fp32 what plain optimizers keep in 16 bits for parameters of those."""
    for optimizer in optimizers:
        for parameter, kept in held(optimizer).items():
            if isinstance(parameter, Tensor):
                kept.update(widened_state(parameter, kept))


def narrow_states(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Cast what `optimizers` keep by element in fp32 for parameters of 16 bits to those."""
    for optimizer in optimizers:
        for parameter, kept in held(optimizer).items():
            if not isinstance(parameter, Tensor) or parameter.dtype not in NARROW:
                continue
            for key, value in kept.items():
                if isinstance(value, Tensor) and value.ndim and value.dtype == torch.float32:
                    kept[key] = value.to(parameter.dtype)


def widened_state(parameter: Tensor, kept: Mapping[str, Any]) -> dict[str, Any]:
    """What a plain optimizer has `kept` for `parameter`, as it is for a master: in fp32 where it
    has the 16 bits of the parameter."""
    if parameter.dtype not in NARROW:
        return dict(kept)
    narrow = parameter.dtype
    return {
        key: value.float() if isinstance(value, Tensor) and value.dtype == narrow else value
        for key, value in kept.items()
    }
