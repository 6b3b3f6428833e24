"""Randomness as a pure function of what a draw is for: nothing to save, nothing to restore.

A seed is the hash of its coordinates (the run's seed, the engine, the step, the rank ...) to 32
bits, since torch's CPU generator uses no more than 32 bits of what it is given.
"""

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


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
        numpy.random.seed(seed)


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
