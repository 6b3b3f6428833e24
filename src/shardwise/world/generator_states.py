"""Saves, compares and restores the states of the global generators of torch, random and NumPy."""

from __future__ import annotations

import base64
import ctypes
import pickle
import random
import struct
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from shardwise.errors import UsageError
from shardwise.world.randomness import generator_of, seed_cpu

CPU = torch.device("cpu")
WORDS = 624 * 4
"""Bytes of the words of an MT19937 generator. Its position follows them as an int."""


class GeneratorStates(NamedTuple):
    """The states of the global generators. Instances are equal if nothing was drawn in between.

    Example:
        ```python
        before = GeneratorStates.now()
        sample = dataset[0]
        if before.has_changed():
            before.restore()
        ```
    """

    cpu: bytes
    gpu: bytes | None
    """The state of an accelerator's generator, or None on the CPU."""
    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | bytes | None
    """The name, words, position and cached normal number of NumPy's MT19937.

    A pickle of the state if the user has chosen another bit generator, or None if NumPy is not
    loaded.
    """

    @classmethod
    def now(cls, device: torch.device = CPU) -> GeneratorStates:
        """Return the CPU generators' states and, for an accelerator `device`, its generator's.

        This takes about 0.1 ms if NumPy is loaded.
        """
        return cls(
            _torch_state(torch.default_generator),
            None if device.type == "cpu" else _torch_state(generator_of(device)),
            random.getstate(),
            _numpy_state(),
        )

    @classmethod
    def seeded(cls, seed: int) -> GeneratorStates:
        """Seed the CPU generators, and return their states. This is faster than `now`."""
        seed_cpu(seed)
        return cls(
            _torch_state(torch.default_generator),
            None,
            random.getstate(),
            _numpy_state(is_seeded=True),
        )

    def has_changed(self) -> bool:
        """Return whether a CPU generator has drawn since these states were saved."""
        return (
            _torch_state(torch.default_generator) != self.cpu
            or random.getstate() != self.python
            or not (_is_in_memory(self.numpy) or _numpy_state() == self.numpy)
        )

    def restore(self, device: torch.device = CPU) -> None:
        """Set the CPU generators and, for an accelerator `device`, its generator to these states.

        Raises ValueError, TypeError or RuntimeError if the states are not valid.
        """
        torch.set_rng_state(_as_tensor(self.cpu))
        if self.gpu is not None and device.type != "cpu":
            generator_of(device).set_state(_as_tensor(self.gpu))
        random.setstate(self.python)
        numpy: Any = sys.modules.get("numpy")
        if numpy is None or self.numpy is None:
            return
        if isinstance(self.numpy, bytes):
            numpy.random.set_state(pickle.loads(self.numpy))
        else:
            kind, words, *rest = self.numpy
            numpy.random.set_state((kind, numpy.frombuffer(words, numpy.uint32), *rest))

    def digest(self) -> int:
        """Return a 32-bit checksum of the states."""
        return zlib.crc32(repr(self).encode())

    def plain(self) -> dict[str, Any]:
        """Convert the states to JSON values, for `of_plain`.

        Raises UsageError if NumPy uses another bit generator than MT19937.
        """
        version, words, gauss = self.python
        words = struct.pack(f"<{len(words)}I", *words)
        plain: dict[str, Any] = {
            "cpu": _encode(self.cpu),
            "python": [version, _encode(words), gauss],
        }
        if self.gpu is not None:
            plain["gpu"] = _encode(self.gpu)
        if isinstance(self.numpy, bytes):
            raise UsageError(
                f"NumPy's global generator is {pickle.loads(self.numpy)['bit_generator']}, but "
                "other ranks and checkpoints can only continue MT19937, NumPy's default. Leave "
                "numpy.random.set_bit_generator out, and draw from a numpy.random.Generator of "
                "your own."
            )
        if self.numpy is not None:
            kind, words, *rest = self.numpy
            plain["numpy"] = [kind, _encode(words), *rest]
        return plain

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> GeneratorStates:
        """Create the states from a result of `plain`.

        Raises ValueError, KeyError, TypeError or struct.error if `plain` is malformed.
        """
        version, encoded, gauss = plain["python"]
        words = base64.b85decode(encoded)
        numpy = None
        if "numpy" in plain:
            kind, encoded, *rest = plain["numpy"]
            numpy = (kind, base64.b85decode(encoded), *rest)
            if kind != "MT19937" or len(numpy[1]) != WORDS:
                raise ValueError(f"NumPy's {kind} has {len(numpy[1])} bytes, not {WORDS}")
        return cls(
            base64.b85decode(plain["cpu"]),
            base64.b85decode(plain["gpu"]) if "gpu" in plain else None,
            (version, struct.unpack(f"<{len(words) // 4}I", words), gauss),
            numpy,
        )


def _encode(state: bytes) -> str:
    # Base 85 takes 5 characters per 4 bytes; decimal numbers in JSON would take up to 11.
    return base64.b85encode(state).decode()


def _torch_state(generator: torch.Generator) -> bytes:
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


def _as_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _numpy_state(*, is_seeded: bool = False) -> tuple[Any, ...] | bytes | None:
    """Return the state of NumPy's generator. `is_seeded` is True right after it was seeded."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if is_seeded and (memory := _numpy_memory()) is not None:
        (position,) = struct.unpack_from("i", memory, WORDS)
        return "MT19937", memory[:WORDS], position, 0, 0.0
    state = numpy.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return pickle.dumps(state)
    words = state["state"]["key"].tobytes()
    return "MT19937", words, state["state"]["pos"], state["has_gauss"], state["gauss"]


def _is_in_memory(state: tuple[Any, ...] | bytes | None) -> bool:
    """Return True if NumPy's generator is certain to have `state`. If unsure, return False."""
    # A cached normal number is not in this memory, and using it changes no word.
    if not isinstance(state, tuple) or state[3]:
        return False
    return bool(_numpy_memory() == state[1] + struct.pack("i", state[2]))


def _numpy_memory() -> bytes | None:
    """Return the words and the position of NumPy's MT19937, or None if it uses another generator.

    They are read from memory in 1 us, because `get_state` takes 0.1 ms.
    """
    numpy: Any = sys.modules.get("numpy")
    generator = numpy and numpy.random.get_bit_generator()
    if type(generator).__name__ != "MT19937":
        return None
    return ctypes.string_at(generator.ctypes.state_address, WORDS + 4)


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the CPU generators of torch, numpy and random at the end of the block."""
    states = GeneratorStates.now()
    try:
        yield
    finally:
        states.restore()


class SavedGenerators:
    """Generator states that are reserved for one purpose.

    Each `resume` block continues from the state at the end of the previous one.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: GeneratorStates | None = None
        self.advanced = False
        """True if a `resume` block has drawn random numbers."""

    @contextmanager
    def resume(self) -> Iterator[None]:
        """Context manager in which the global generators continue from the saved states."""
        with preserved():
            if self._states is None:
                seed_cpu(self._seed)
            else:
                self._states.restore()
            before = self._states or GeneratorStates.now()
            yield
            self._states = GeneratorStates.now()
            self.advanced = self.advanced or self._states != before
