"""Seeds, generator states and deterministic arithmetic, for reproducible runs.

A seed is a 32-bit hash of coordinates such as the run's seed, the engine, the step and the rank. It
has 32 bits because torch's CPU generator uses no more.
"""

import base64
import ctypes
import hashlib
import os
import random
import struct
import sys
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.world.cpu_generators import seed_cpu


def seed_from(*coordinates: int | str) -> int:
    """Return a 32-bit seed: the BLAKE2b hash of `coordinates`."""
    # Join with a separator that occurs in no coordinate, because ("a", "bc") and ("ab", "c") must
    # give different seeds. Don't use `hash`, which Python salts differently in every process.
    text = "\x1f".join(str(coordinate) for coordinate in coordinates)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), random and, if it is imported, numpy."""
    # Without an accelerator, torch.manual_seed would record a stack trace for each device type that
    # might appear.
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    seed_cpu(seed)


def generator_of(device: torch.device) -> torch.Generator:
    """Return torch's default generator of `device`, a CPU or accelerator."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    if device.type == "mps":  # a single device, with a separate function for its generator
        return module._get_default_mps_generator()  # type: ignore[no-any-return]
    module.init()
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class GeneratorStates:
    """The states of the global generators of torch (CPU, accelerator), numpy and random."""

    cpu: Tensor
    gpu: Tensor | None
    python: Any
    numpy: Any

    @classmethod
    def now(cls, device: torch.device) -> "GeneratorStates":
        """Return the CPU generators' states and, for an accelerator `device`, its generator's."""
        numpy: Any = sys.modules.get("numpy")
        return cls(
            torch.get_rng_state(),
            None if device.type == "cpu" else generator_of(device).get_state(),
            random.getstate(),
            numpy and numpy.random.get_state(),
        )

    def restore(self, device: torch.device) -> None:
        """Set this process's generators to these states."""
        torch.set_rng_state(self.cpu)
        if self.gpu is not None and device.type != "cpu":
            generator_of(device).set_state(self.gpu)
        random.setstate(self.python)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and self.numpy is not None:
            numpy.random.set_state(self.numpy)

    def digest(self) -> int:
        """Return a 32-bit checksum of the states."""
        version, words, gauss = self.python
        checksum = 0
        for state in (self.cpu, self.gpu):
            if state is not None:
                checksum = zlib.crc32(ctypes.string_at(state.data_ptr(), state.numel()), checksum)
        checksum = zlib.crc32(struct.pack(f"<{len(words)}I", *words), checksum)
        rest: list[Any] = [version, gauss]
        if self.numpy is not None:
            _, keys, *more = self.numpy
            checksum, rest = zlib.crc32(keys.tobytes(), checksum), [*rest, *more]
        return zlib.crc32(repr(rest).encode(), checksum)

    def plain(self) -> dict[str, Any]:
        """Convert the states to JSON values, for `of_plain`."""
        version, words, gauss = self.python
        plain: dict[str, Any] = {
            "cpu": _encode_state(self.cpu),
            "python": [version, _encode_words(words), gauss],
        }
        if self.gpu is not None:
            plain["gpu"] = _encode_state(self.gpu)
        if self.numpy is not None:
            kind, keys, *rest = self.numpy
            plain["numpy"] = [kind, _encode_words(keys.tolist()), *rest]
        return plain

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> "GeneratorStates":
        """Create the states from a result of `plain`.

        Raises ValueError, KeyError or struct.error if `plain` is malformed.
        """
        version, words, gauss = plain["python"]
        numpy: Any = sys.modules.get("numpy")
        keys = None
        if numpy is not None and "numpy" in plain:
            kind, encoded, *rest = plain["numpy"]
            keys = (kind, numpy.array(_decode_words(encoded), dtype=numpy.uint32), *rest)
        return cls(
            _decode_state(plain["cpu"]),
            _decode_state(plain["gpu"]) if "gpu" in plain else None,
            (version, tuple(_decode_words(words)), gauss),
            keys,
        )


# Base 85 takes 5 characters per 4 bytes; decimal numbers in JSON would take up to 11.


def _encode_state(state: Tensor) -> str:
    return base64.b85encode(bytes(state.tolist())).decode()


def _decode_state(text: str) -> Tensor:
    return torch.tensor(list(base64.b85decode(text)), dtype=torch.uint8)


def _encode_words(words: Any) -> str:
    return base64.b85encode(struct.pack(f"<{len(words)}I", *words)).decode()


def _decode_words(text: str) -> list[int]:
    data = base64.b85decode(text)
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def fix_arithmetic(device: torch.device) -> None:
    """Make arithmetic in this process deterministic until it exits.

    On a GPU, this enables torch's deterministic algorithms. Operations that have none raise an
    error.
    """
    # Use one thread: kernels split sums by the number of threads, which changes the rounding.
    torch.set_num_threads(1)
    if device.type != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is loaded
        torch.use_deterministic_algorithms(True)
        # By default this mode fills new memory with NaN, which costs a pass over every buffer.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
