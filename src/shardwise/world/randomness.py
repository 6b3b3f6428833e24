"""Makes runs repeatable: seeds are pure functions of what is drawn, and arithmetic has one order.

A seed is the hash of its coordinates (the run's seed, the engine, the step, the rank ...) to 32
bits, since torch's CPU generator uses no more than 32 bits of what it is given.
"""

import base64
import ctypes
import hashlib
import os
import random
import struct
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def seed_from(*coordinates: int | str) -> int:
    """A 32-bit seed (BLAKE2b) from `coordinates`; equal coordinates give equal seeds."""
    text = "\x1f".join(str(coordinate) for coordinate in coordinates)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def seed_everything(seed: int) -> None:
    """Seed torch (every device), numpy where it is loaded, and random."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # torch.manual_seed would note a stack for each kind of device that might yet come
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)  # it takes no more


def generator_of(device: torch.device) -> torch.Generator:
    """torch's default generator for `device`, the CPU or an accelerator."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    if device.type == "mps":  # one device, with a generator of its own kind
        return module._get_default_mps_generator()  # type: ignore[no-any-return]
    module.init()
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class GeneratorStates:
    """Where the global generators are: those of torch (CPU, accelerator), numpy and random."""

    cpu: Tensor
    gpu: Tensor | None
    python: Any
    numpy: Any

    @classmethod
    def now(cls, device: torch.device) -> "GeneratorStates":
        """Those of this moment; of accelerators that of `device`, where it is one."""
        numpy: Any = sys.modules.get("numpy")
        return cls(
            torch.get_rng_state(),
            None if device.type == "cpu" else generator_of(device).get_state(),
            random.getstate(),
            numpy and numpy.random.get_state(),
        )

    def restore(self, device: torch.device) -> None:
        """Let the generators of this process be there."""
        torch.set_rng_state(self.cpu)
        if self.gpu is not None and device.type != "cpu":
            generator_of(device).set_state(self.gpu)
        random.setstate(self.python)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and self.numpy is not None:
            numpy.random.set_state(self.numpy)

    def digest(self) -> int:
        """32 bits that tell them from others."""
        version, words, gauss = self.python
        told = 0
        for state in (self.cpu, self.gpu):
            if state is not None:
                told = zlib.crc32(ctypes.string_at(state.data_ptr(), state.numel()), told)
        told = zlib.crc32(struct.pack(f"<{len(words)}I", *words), told)
        rest: list[Any] = [version, gauss]
        if self.numpy is not None:
            _, keys, *more = self.numpy
            told, rest = zlib.crc32(keys.tobytes(), told), [*rest, *more]
        return zlib.crc32(repr(rest).encode(), told)

    def plain(self) -> dict[str, Any]:
        """The same as JSON can say it."""
        version, words, gauss = self.python
        told: dict[str, Any] = {
            "cpu": _text(self.cpu),
            "python": [version, _packed(words), gauss],
        }
        if self.gpu is not None:
            told["gpu"] = _text(self.gpu)
        if self.numpy is not None:
            kind, keys, *rest = self.numpy
            told["numpy"] = [kind, _packed(keys.tolist()), *rest]
        return told

    @classmethod
    def of_plain(cls, told: dict[str, Any]) -> "GeneratorStates":
        """What `plain` told. Raises ValueError, KeyError or struct.error for anything else."""
        version, words, gauss = told["python"]
        numpy: Any = sys.modules.get("numpy")
        keys = None
        if numpy is not None and "numpy" in told:
            kind, packed, *rest = told["numpy"]
            keys = (kind, numpy.array(_unpacked(packed), dtype=numpy.uint32), *rest)
        return cls(
            _tensor(told["cpu"]),
            _tensor(told["gpu"]) if "gpu" in told else None,
            (version, tuple(_unpacked(words)), gauss),
            keys,
        )


def _text(state: Tensor) -> str:
    return base64.b85encode(bytes(state.tolist())).decode()


def _tensor(text: str) -> Tensor:
    return torch.tensor(list(base64.b85decode(text)), dtype=torch.uint8)


def _packed(words: Any) -> str:
    return base64.b85encode(struct.pack(f"<{len(words)}I", *words)).decode()


def _unpacked(text: str) -> list[int]:
    data = base64.b85decode(text)
    return list(struct.unpack(f"<{len(data) // 4}I", data))


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the CPU generators of torch, numpy and random on leaving."""
    numpy: Any = sys.modules.get("numpy")
    states = (torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state())
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if states[2] is not None:
            numpy.random.set_state(states[2])


def fix_arithmetic(device: torch.device) -> None:
    """Let this process compute in one order, for good.

    One thread, since kernels cut their work by the number of threads and sum accordingly. On a
    GPU torch's deterministic algorithms, which raise where an operation has none.
    """
    torch.set_num_threads(1)
    if device.type != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is loaded
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
