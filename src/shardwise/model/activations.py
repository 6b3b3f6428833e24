"""Keeps, recomputes or offloads activations, the tensors saved for the backward pass.

Recomputation works per unit (units.py). A model without units is treated as a single unit.
Offloading moves the tensors that autograd saves in a model's forward pass. With recomputation,
these are the inputs of the units.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise.config import Settings
from shardwise.layout.placement import Tier
from shardwise.model import units
from shardwise.model.activation_offload import SavedTensors
from shardwise.model.compilation import CompiledForward, Compiler, fix_order_of_graphs
from shardwise.model.module_hooks import Hooked, attach
from shardwise.model.offloaded_tensor import DiskTarget, HostTarget, OffloadTarget, StagedDiskTarget
from shardwise.model.recomputation import RecomputedForward
from shardwise.tiers.copy_stream import CopyStream
from shardwise.tiers.device_spool import DeviceSpool
from shardwise.tiers.spool import Spool


class Activations:
    """Keeps, recomputes or offloads the activations of `models` according to `settings`.

    It is active until `close`. Raises TierError if the folder of `offload_activations` cannot be
    used.

    Args:
        models: The models to hook.
        settings: Settings that select recomputation and the tier.
        compiler: Compiles the forward pass of a unit. None means that units are not compiled.
        device: The device of the activations.
        rank: This rank's index, for a tier's error messages.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        settings: Settings,
        device: torch.device,
        *,
        rank: int,
        compiler: Compiler | None = None,
    ) -> None:
        self._settings = settings
        self._device = device
        self._forwards: list[RecomputedForward | CompiledForward] = []
        self._handles: list[Hooked] = []
        target = _target(settings.offload_activations, device, rank)
        self._recomputes = settings.activations == "recomputed"
        if compiler is not None and self._recomputes:
            fix_order_of_graphs()
        # Wrap a unit only once, even if several models share it.
        for unit in dict.fromkeys(
            unit for model in models for _, unit in units_of(model, settings)
        ):
            if self._recomputes:
                self._forwards.append(RecomputedForward(unit, compiler))
            elif compiler is not None:
                self._forwards.append(CompiledForward(unit, compiler))
        if target is not None:
            scope = OffloadScope(models, SavedTensors(target, device.type))
            self._handles = [handle for model in models for handle in scope.attach(model)]

    def describe(self) -> str:
        """Return a description of the active features, or an empty string."""
        parts = []
        if self._recomputes:
            count = len(self._forwards)
            parts.append(f"recomputed in {count} unit{'' if count == 1 else 's'}")
        tier = self._settings.offload_activations
        if self._handles:
            parts.append(f"on {tier}")
        elif tier.kind == "cpu":
            parts.append("on cpu, where these workers compute, so nothing is offloaded")
        return ", ".join(parts)

    def close(self) -> None:
        """Restore the models' original `forward` methods."""
        for forward in self._forwards:
            forward.undo()
        for handle in self._handles:
            handle.remove()


def units_of(model: nn.Module, settings: Settings) -> list[tuple[str, nn.Module]]:
    """Return the names and modules of the parts that are compiled or recomputed separately."""
    patterns = None if settings.activations == "recomputed" else settings.units
    return units.find_units(model, patterns) or [("", model)]


class OffloadScope:
    """Model hooks that offload what autograd saves in the forward pass. Their copies do nothing."""

    def __init__(self, models: Sequence[nn.Module] = (), saved: SavedTensors | None = None) -> None:
        self._models = models
        self._saved = saved
        self._open: list[saved_tensors_hooks | None] = []

    def attach(self, model: nn.Module) -> list[Hooked]:
        """Offload in every recorded forward pass of `model`, until the handles are removed."""
        # Prepend, so that this hook is entered first and the hooks of units nest inside it.
        return [
            attach(model.register_forward_pre_hook, self.enter, prepend=True),
            attach(model.register_forward_hook, self.leave, always_call=True),
        ]

    def enter(self, model: nn.Module, args: Any) -> None:
        """Start offloading. Runs before a forward pass."""
        del model, args
        hooks = None
        if self._saved is not None and torch.is_grad_enabled():
            self._saved.begin(self._models)
            hooks = saved_tensors_hooks(self._saved.pack, self._saved.unpack)
            hooks.__enter__()
        self._open.append(hooks)

    def leave(self, model: nn.Module, args: Any, output: Any) -> None:
        """Stop offloading. Runs after a forward pass, even if it raised."""
        del model, args
        if (hooks := self._open.pop()) is not None and self._saved is not None:
            hooks.__exit__()
            # If there is no output, the forward pass raised, and its error must stay visible.
            if output is not None:
                self._saved.end()

    def __reduce__(self) -> tuple[Any, ...]:
        return OffloadScope, ()


def _target(tier: Tier, device: torch.device, rank: int) -> OffloadTarget | None:
    """Return the target for offloaded activations, or None if they stay in place."""
    on_cpu = device.type == "cpu"
    if tier.kind == "nvme":
        spool = Spool(Path(tier.folder), "activations", rank=rank)
        if on_cpu:
            return DiskTarget(spool)
        return StagedDiskTarget(DeviceSpool(spool, CopyStream(device)))
    return None if tier.kind == "device" or on_cpu else HostTarget(device)
