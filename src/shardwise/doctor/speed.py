"""How fast ranks sum a buffer: the time of a small one, and the rate of a large one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch

from shardwise.collectives import Collectives

SMALL, SMALL_TIMES = 1024, 30
LARGE, LARGE_TIMES = 2**22, 5


@dataclass(frozen=True)
class Speed:
    """`latency` in seconds of an all-reduce of 4 KB; `bandwidth` in bytes per second of one of
    16 MB, as the bytes that each rank must send and receive in any algorithm."""

    latency: float
    bandwidth: float


def of_group(group: Collectives, device: torch.device) -> Speed:
    """Measure; collective. Medians over a few calls, after one that is not counted."""
    small = _seconds(group, SMALL, SMALL_TIMES, device)
    large = _seconds(group, LARGE, LARGE_TIMES, device)
    moved = 4 * LARGE * 2 * (group.size - 1) / group.size
    return Speed(latency=small, bandwidth=moved / large)


def _seconds(group: Collectives, numel: int, times: int, device: torch.device) -> float:
    buffer = group.allocate(numel, torch.float32, device)
    taken = []
    for _ in range(times + 1):
        group.barrier()
        began = time.perf_counter()
        handle = group.all_reduce(buffer)
        handle.wait()
        handle.reusable()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return median(taken[1:])
