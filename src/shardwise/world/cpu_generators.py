"""Saves, compares and restores the states of the global CPU generators of torch, random and NumPy.

Datasets draw from these generators. The Loader compares their states around every micro-batch, so
this must be fast. The public functions `random.getstate` and `numpy.random.get_state` are slow,
because they convert 624 words each. So the words are copied from memory. NumPy has a public
attribute for their address. CPython has no such attribute, so `_find_python_words` searches the
generator object for them. If they are not found, or if NumPy uses another bit generator than its
default, the public functions are used.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

WORDS = 624
"""Number of 32-bit words in the state of a Mersenne Twister. Its position follows them."""
STATE_BYTES = 4 * (WORDS + 1)
Memory = ctypes.c_char * STATE_BYTES
_PYTHON: Any = random.seed.__self__  # type: ignore[attr-defined]
"""The generator behind the functions of `random`."""


def seed_cpu(seed: int) -> None:
    """Seed the CPU generators of torch and `random`, and NumPy's if NumPy is loaded."""
    # Not torch.manual_seed, which also seeds every accelerator, because this runs once per sample.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


class CpuGenerators(NamedTuple):
    """The states of the three generators. Two of them are equal if nothing was drawn between them.

    Example:
        ```python
        before = CpuGenerators.now()
        sample = dataset[0]
        if before.has_changed():
            before.restore()
        ```
    """

    torch: bytes
    python: tuple[Any, ...]
    numpy: bytes | tuple[bytes] | None
    """None if NumPy is not loaded."""

    @classmethod
    def now(cls) -> CpuGenerators:
        """Return the current states."""
        numpy: Any = sys.modules.get("numpy")
        return cls(
            _torch_state(),
            _python_state(),
            None if numpy is None else _numpy_state(numpy),
        )

    def has_changed(self) -> bool:
        """Return whether anything was drawn since these states were saved.

        It is the same as `CpuGenerators.now() != self`, but faster.
        """
        if _torch_state() != self.torch or _python_state() != self.python:
            return True
        numpy: Any = sys.modules.get("numpy")
        if isinstance(self.numpy, bytes) and (memory := _find_numpy_words(numpy)) is not None:
            # Without a kept number, each draw moves the words.
            return memory.raw != self.numpy
        return self.numpy != (None if numpy is None else _numpy_state(numpy))

    def restore(self) -> None:
        """Set the generators to these states."""
        state = torch.frombuffer(bytearray(self.torch), dtype=torch.uint8)
        torch.default_generator.set_state(state)
        words, *rest = self.python
        if isinstance(words, bytes):
            position, *numbers = struct.unpack(f"=i{WORDS}I", words)
            _PYTHON.setstate((random.Random.VERSION, (*numbers, position), *rest))
        else:
            _PYTHON.setstate(self.python)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and self.numpy is not None:
            _set_numpy_state(numpy, self.numpy)


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the CPU generators of torch, numpy and random at the end of the block."""
    states = CpuGenerators.now()
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
        self._states: CpuGenerators | None = None
        self.advanced = False
        """True if a `resume` block has drawn random numbers."""

    @contextmanager
    def resume(self) -> Iterator[None]:
        """Context manager in which the global generators have the states of this object."""
        with preserved():
            if self._states is None:
                seed_cpu(self._seed)
            else:
                self._states.restore()
            before = self._states or CpuGenerators.now()
            yield
            self.advanced = self.advanced or before.has_changed()
            self._states = CpuGenerators.now()


def _torch_state() -> bytes:
    state = torch.default_generator.get_state()
    return (ctypes.c_char * state.numel()).from_address(state.data_ptr()).raw


def _python_state() -> tuple[Any, ...]:
    memory = _find_python_words()
    if memory is None:
        return _PYTHON.getstate()  # type: ignore[no-any-return]
    return memory.raw, _PYTHON.gauss_next


@cache
def _find_python_words() -> ctypes.Array[ctypes.c_char] | None:
    """Return the memory of the state of `random`, which starts with the position, or None."""
    if sys.implementation.name != "cpython":  # elsewhere, id() is no address
        return None
    _, (*words, position), _ = _PYTHON.getstate()
    base: Any = random.Random.__base__  # the part of the object that C defines
    state = ctypes.string_at(id(_PYTHON), base.__basicsize__)
    offset = state.find(struct.pack(f"=i{WORDS}I", position, *words))
    return None if offset < 0 else Memory.from_address(id(_PYTHON) + offset)


def _numpy_state(numpy: Any) -> bytes | tuple[bytes]:
    """Return the words of NumPy's generator or, if they are not its full state, a pickle of it."""
    if (memory := _find_numpy_words(numpy)) is not None:
        words: bytes = memory.raw
        # NumPy draws normal numbers in pairs and keeps the second one outside these words. The only
        # quick way to see it is to take it. This may move the words, so they are written back.
        kept = _take_kept_normal(numpy, memory)
        memory.raw = words
        if kept is None:
            return words
        *keys, position = struct.unpack(f"={WORDS}Ii", words)
        numpy.random.set_state(("MT19937", keys, position, 1, kept))
    return (pickle.dumps(numpy.random.get_state(legacy=False)),)


def _set_numpy_state(numpy: Any, state: bytes | tuple[bytes]) -> None:
    memory = _find_numpy_words(numpy)
    if isinstance(state, tuple):
        numpy.random.set_state(pickle.loads(state[0]))
    elif memory is None:  # the user has replaced the bit generator, which NumPy reports
        *keys, position = struct.unpack(f"={WORDS}Ii", state)
        numpy.random.set_state(("MT19937", keys, position))
    else:
        _take_kept_normal(numpy, memory)
        memory.raw = state


def _find_numpy_words(numpy: Any) -> ctypes.Array[ctypes.c_char] | None:
    """Return the memory of the state of NumPy's generator, which ends with the position."""
    current = getattr(numpy.random, "get_bit_generator", None)  # new in NumPy 1.24
    return None if current is None else _words_of(current(), numpy.random.MT19937)


@lru_cache(1)
def _words_of(generator: Any, kind: type[Any]) -> ctypes.Array[ctypes.c_char] | None:
    """Return the memory of `generator`, which the cache keeps alive. None for another `kind`."""
    return Memory.from_address(generator.ctypes.state_address) if type(generator) is kind else None


def _take_kept_normal(numpy: Any, memory: ctypes.Array[ctypes.c_char]) -> float | None:
    """Remove the normal number that NumPy keeps and return it, or None if it keeps none."""
    before = memory.raw
    value: float = numpy.random.standard_normal()
    if memory.raw == before:
        return value
    numpy.random.standard_normal()
    return None
