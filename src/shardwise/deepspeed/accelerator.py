"""Implements deepspeed.accelerator, which describes the device of this process."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

import shardwise as sw
from shardwise.errors import UsageError

__all__ = ["get_accelerator", "is_current_accelerator_supported"]


_ON_CPU = {
    "synchronize": None,
    "empty_cache": None,
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "reset_peak_memory_stats": None,
}
"""CPU results of functions that only torch.cuda has."""


class DeepSpeedAccelerator:
    """The device of this rank.

    Once the process has joined its run, this is the run's device. Before that, it is a GPU if one
    is available. Other attributes are looked up in torch.cuda or torch.cpu.
    """

    def __getattr__(self, name: str) -> Any:
        if name in _ON_CPU and not self._is_cuda:
            return lambda *arguments, **keywords: _ON_CPU[name]
        module = torch.cuda if self._is_cuda else torch.cpu
        found = getattr(module, name, None) or getattr(torch, name, None)
        if found is None:
            raise AttributeError(f"Shardwise's accelerator has no {name!r}.")
        return found

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cpu" or "cuda", with the index if given."""
        try:
            kind = sw.world().device.type
        except UsageError:
            kind = "cuda" if torch.cuda.is_available() else "cpu"
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """Return a context manager that selects a GPU or, on a CPU, the device itself."""
        if self._is_cuda:
            return torch.cuda.device(device_index)
        return torch.device("cpu")

    def set_device(self, device_index: int) -> None:
        """No-op, because the run has chosen a device for each rank."""
        del device_index

    def current_device(self) -> Any:
        """Return the index of the GPU, or "cpu"."""
        return torch.cuda.current_device() if self._is_cuda else "cpu"

    def current_device_name(self) -> str:
        """Return the name of the device, such as "cuda:0" or "cpu"."""
        if self._is_cuda:
            return f"cuda:{torch.cuda.current_device()}"
        return "cpu"

    def device_count(self) -> int:
        """Return the number of visible GPUs or, on a CPU, the number of workers on this host."""
        if self._is_cuda:
            return torch.cuda.device_count()
        try:
            return sw.world().local_size
        except UsageError:
            return 1

    def is_available(self) -> bool:
        """Return True, because every process has a device."""
        return True

    @property
    def _is_cuda(self) -> bool:
        return self.device_name() == "cuda"

    def is_bf16_supported(self) -> bool:
        """Return whether the device supports bf16."""
        return not self._is_cuda or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Return True, because all devices support fp16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes in which models may be trained."""
        return [torch.float, torch.bfloat16, torch.half]

    def communication_backend_name(self) -> str:
        """Return the name of torch.distributed's backend."""
        return "nccl" if self._is_cuda else "gloo"

    def manual_seed(self, seed: int) -> None:
        """Seed this device's random number generator."""
        if self._is_cuda:
            torch.cuda.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Return the state of this device's random number generator."""
        if self._is_cuda:
            return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the state of this device's random number generator."""
        if self._is_cuda:
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)
        else:
            torch.set_rng_state(new_state)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is on this device."""
        return tensor.device.type == self.device_name()


@cache
def get_accelerator() -> DeepSpeedAccelerator:
    """Return the accelerator of this process."""
    return DeepSpeedAccelerator()


def is_current_accelerator_supported() -> bool:
    """Return True, because any device can train."""
    return True
