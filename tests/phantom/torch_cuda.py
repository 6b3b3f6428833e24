"""The functions of torch.cuda that a torch without CUDA lacks, for the simulated device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from tests.phantom import streams
from tests.phantom.planting import RECORD, Planted
from tests.phantom.streams import Device, Stream


class _OneDevice(nullcontext[None]):
    """Replaces torch.cuda.device; there is only one."""

    def __init__(self, *_: Any) -> None:
        super().__init__()


def _record_stream(tensor: Tensor, stream: Stream) -> None:
    if Planted.leaves_out(RECORD):
        return
    Device.order.record_stream(tensor.untyped_storage().data_ptr(), stream.name)


def install() -> None:
    """Replace the functions that Shardwise, its tests and torch itself call."""
    generator = torch.Generator()
    functions = {
        "_get_device_index": lambda *_, **__: 0,
        "_is_in_bad_fork": lambda: False,
        "_initialized": True,
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "current_stream": streams.current_stream,
        "default_generators": (generator,),
        "default_stream": streams.default_stream,
        "device": _OneDevice,
        "device_count": lambda: 1,
        "empty_cache": lambda: None,
        "get_device_name": lambda *_: "a simulated device",
        "get_rng_state": lambda *_: generator.get_state(),
        "init": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: True,
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "max_memory_allocated": lambda *_: Device.order.most_nbytes(),
        "memory_allocated": lambda *_: Device.order.nbytes(),
        "reset_peak_memory_stats": lambda *_: Device.order.forget_most(),
        "set_device": lambda _: None,
        "set_rng_state": lambda state, *_: generator.set_state(state),
        "stream": streams.stream,
        "synchronize": streams.synchronize,
        "Event": streams.Event,
        "Stream": streams.Stream,
    }
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    Tensor.record_stream = _record_stream  # type: ignore[method-assign,assignment]
