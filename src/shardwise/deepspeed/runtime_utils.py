"""deepspeed.runtime.utils: seeds, and a line on memory."""

from __future__ import annotations

import logging
import random
import resource
import sys

import numpy as np
import torch

from shardwise.deepspeed.accelerator import get_accelerator
from shardwise.deepspeed.utils import log_dist

__all__ = ["see_memory_usage", "set_random_seed"]


def set_random_seed(seed: int) -> None:
    """Seed the generators of random, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log on rank 0, where it is asked for by `force`, `message` and the GB that tensors take on
    the GPU, the most that they took, and the most that this process had resident."""
    if not force:
        return
    accelerator = get_accelerator()
    now, most = accelerator.memory_allocated(), accelerator.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # of the kernel's count
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    log_dist(
        f"{message}: allocated {now / 1e9:.2f} GB, at most {most / 1e9:.2f} GB; "
        f"resident at most {resident / 1e9:.2f} GB",
        ranks=[0],
        level=logging.WARNING,
    )
