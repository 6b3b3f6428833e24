"""Saves, compares and restores the states of the CPU generators of torch, random and NumPy."""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


def seed_cpu(seed: int) -> None:
    """Seed the CPU generators of torch and `random`, and NumPy's if NumPy is loaded."""
    # Not torch.manual_seed, which also seeds every accelerator, because this runs once per sample.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)  # numpy rejects larger seeds


class CpuGenerators(NamedTuple):
    """The states of the three generators. Two instances are equal if nothing was drawn in between.

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
    numpy: bytes | None
    """A pickle of the state, or None if NumPy is not loaded."""

    @classmethod
    def now(cls) -> CpuGenerators:
        """Return the current states. This takes about 0.1 ms if NumPy is loaded."""
        numpy: Any = sys.modules.get("numpy")
        state = torch.get_rng_state()
        return cls(
            ctypes.string_at(state.data_ptr(), state.numel()),
            random.getstate(),
            # Pickled, because the state depends on the bit generator, which the user may replace.
            None if numpy is None else pickle.dumps(numpy.random.get_state(legacy=False)),
        )

    def has_changed(self) -> bool:
        """Return whether anything has been drawn since these states were saved."""
        return CpuGenerators.now() != self

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))
        random.setstate(self.python)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and self.numpy is not None:
            numpy.random.set_state(pickle.loads(self.numpy))


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
        """Context manager in which the global generators continue from the saved states."""
        with preserved():
            if self._states is None:
                seed_cpu(self._seed)
            else:
                self._states.restore()
            before = self._states or CpuGenerators.now()
            yield
            self._states = CpuGenerators.now()
            self.advanced = self.advanced or self._states != before
