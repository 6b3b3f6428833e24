"""Precision presets for forward passes. For the fp16 loss scale, see `loss_scale.py`.

    preset       parameters   forward          masters   loss scale
    fp32         as built     as built         -         -
    bf16-mixed   as built     autocast bf16    -         -
    fp16-mixed   as built     autocast fp16    -         dynamic
    bf16         bf16         bf16             fp32      -
    fp64         fp64         fp64             -         -

The 16-bit presets return the model's outputs in fp32, so that losses are computed in fp32. With
fp64, outputs, gradients and optimizer state are fp64, and every module casts its floating-point
inputs to fp64. If a forward pass creates fp32 tensors or casts to fp32, the next module therefore
computes in fp64 again, although those values have only fp32 precision. Tensors that a forward pass
creates without a dtype are fp64, too, also if the backward pass recomputes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.comm import ordered_sums
from shardwise.model.module_hooks import Hooked, attach
from shardwise.model.optimizer_access import held

NARROW = ordered_sums.NARROW
"""The 16-bit floating-point dtypes."""


@dataclass(frozen=True)
class Preset:
    """A precision preset, one of the values of `--precision`."""

    autocast: torch.dtype | None = None
    cast: torch.dtype | None = None
    scaled: bool = False

    @property
    def widens(self) -> bool:
        """True if every module of the model computes in a wider dtype than fp32."""
        return self.cast is torch.float64

    def in_backward(self) -> AbstractContextManager[None]:
        """Context manager for a backward pass, which may run parts of the forward pass again."""
        return creating(torch.float64) if self.widens else nullcontext()


PRESETS = {
    "fp32": Preset(),
    "bf16-mixed": Preset(autocast=torch.bfloat16),
    "fp16-mixed": Preset(autocast=torch.float16, scaled=True),
    "bf16": Preset(cast=torch.bfloat16),
    "fp64": Preset(cast=torch.float64),
}


@contextmanager
def creating(dtype: torch.dtype) -> Iterator[None]:
    """Context manager: new floating-point tensors have the dtype `dtype` by default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class ForwardPrecision:
    """Model hooks that run the forward pass with a preset.

    A copy of the model keeps the hooks, so that it computes in the same precision.
    """

    def __init__(self, preset: Preset, device_type: str) -> None:
        self._preset = preset
        self._device_type = device_type
        self._open: list[ExitStack] = []

    def attach(self, model: nn.Module) -> list[Hooked]:
        """Run every call of `model` with the preset, until the handles are removed."""
        before, after = model.register_forward_pre_hook, model.register_forward_hook
        # Only fp64 hooks inner modules, because a forward pass may create fp32 tensors between
        # them.
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
        """Enable autocast, or cast floating-point inputs. Runs before a forward pass."""
        stack = ExitStack()
        if self._preset.autocast is not None:
            stack.enter_context(torch.autocast(self._device_type, self._preset.autocast))
        if self._preset.widens:
            stack.enter_context(creating(torch.float64))
        self._open.append(stack)
        if self._preset.cast is None:
            return args, kwargs
        return self.cast(model, args, kwargs)

    def cast(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the inputs, with floating-point tensors cast to the preset's dtype."""

        def cast(value: Tensor) -> Tensor:
            # Skip integers and booleans, which are indices and masks.
            return value.to(self._preset.cast) if value.is_floating_point() else value

        return pytree.tree_map_only(Tensor, cast, (args, kwargs))

    def leave(self, model: nn.Module, args: Any, output: Any) -> Any:
        """Disable autocast, and return outputs in fp32. Runs even if the forward pass raised."""
        del model, args
        self._open.pop().close()
        return pytree.tree_map_only(
            Tensor, lambda value: value.float() if value.dtype in NARROW else value, output
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardPrecision:
        return ForwardPrecision(self._preset, self._device_type)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": []}


_STAYS = nn.modules.batchnorm._NormBase
"""Modules that compute in fp32 with all 16-bit presets."""


def is_cast(places: Iterable[tuple[nn.Module, str]], dtype: torch.dtype) -> bool:
    """Return whether a preset for `dtype` casts the parameter that is registered at `places`."""
    return dtype not in NARROW or not any(isinstance(module, _STAYS) for module, _ in places)


def cast_models(models: Iterable[nn.Module], dtype: torch.dtype) -> dict[nn.Parameter, Tensor]:
    """Cast floating-point parameters and buffers to `dtype`. BatchNorm's are never cast to 16 bits.

    Returns:
        The parameters' values before the cast, for the masters.
    """
    before: dict[nn.Parameter, Tensor] = {}
    for module in (module for model in models for module in model.modules()):
        if dtype in NARROW and isinstance(module, _STAYS):
            continue
        for parameter in module._parameters.values():
            if parameter is None or parameter.dtype == dtype or parameter.is_meta:
                continue  # a meta parameter is cast when it gets memory
            if parameter.is_floating_point() and parameter not in before:
                before[parameter] = parameter.detach()
                # Cast through .data, so that the parameter stays the same object for optimizers and
                # ties.
                parameter.data = parameter.detach().to(dtype)
        # A module's own flag, because modules of higher layers are unknown here.
        if dtype in NARROW and getattr(module, "buffers_stay_wide", False):
            continue
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                # Replace the buffer, because no optimizer refers to it.
                module._buffers[key] = buffer.to(dtype)
    return before


def widen_states(optimizers: Iterable[torch.optim.Optimizer], dtype: torch.dtype) -> None:
    """Widen the optimizer state of `dtype` parameters to `dtype`.

    Some optimizers, such as Adagrad, create their state before the parameters are cast. Only state
    with one value per element is cast. Step counts keep torch's dtype.
    """
    entries = (entry for optimizer in optimizers for entry in held(optimizer).items())
    for parameter, state in entries:
        for key, value in state.items():
            if (
                isinstance(value, Tensor)
                and value.ndim
                and value.is_floating_point()
                and value.dtype.itemsize < dtype.itemsize
                and parameter.dtype == dtype
            ):
                state[key] = value.to(dtype)


def widen_narrow_states(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Cast the 16-bit state of plain optimizers to fp32, if their parameters are 16-bit."""
    for optimizer in optimizers:
        for parameter, state in held(optimizer).items():
            if isinstance(parameter, Tensor):
                state.update(widen_state(parameter, state))


def narrow_states(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Cast fp32 state of 16-bit parameters to 16 bits, if it has one value per element."""
    for optimizer in optimizers:
        for parameter, state in held(optimizer).items():
            if not isinstance(parameter, Tensor) or parameter.dtype not in NARROW:
                continue
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim and value.dtype == torch.float32:
                    state[key] = value.to(parameter.dtype)


def widen_state(parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state from a plain optimizer, in the form that a master needs.

    Values in the parameter's 16-bit dtype become fp32.
    """
    if parameter.dtype not in NARROW:
        return dict(state)
    narrow = parameter.dtype
    return {
        key: value.float() if isinstance(value, Tensor) and value.dtype == narrow else value
        for key, value in state.items()
    }
