"""Runs the measurements of a calibration on each rank.

    shardwise run -n N -m shardwise.tools.plan.calibration_worker FILE

All ranks measure at the same time, because in a real run they also share the host's memory and
cores. For each measurement, rank 0 appends a JSON line to FILE: {"kind", "size", "seconds"} or
{"kind", "value"}.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from shardwise.world.initialize import init
from shardwise.world.world import World

MATMUL_SIDES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MEMORY_MB = (0.1, 1.0, 10.0, 100.0)
COLLECTIVE_BYTES = (4096, 2**20, 2**25)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}

SURE = 512
"""Square matrices with sides up to this length are always measured."""

LEAST = 0.1
"""Minimum duration of a measurement in seconds, over all repetitions."""

LONGEST = 1.0
"""Larger matrices are skipped once a single product would take longer than this, in seconds."""

DISK_BYTES = 2**27


def main(file: Path) -> None:
    """Measure on all ranks. Rank 0 writes the results to `file`."""
    world = init(seed=0)
    for line in _measured(world):
        # The barrier keeps all ranks at the same measurement, because they share cores and memory.
        world.barrier()
        if world.is_main:
            with file.open("a") as out:
                out.write(json.dumps(line) + "\n")


def _measured(world: World) -> Iterator[dict[str, Any]]:
    device = world.device
    if device.type == "cpu":  # ranks share the host's memory
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world.size
    else:
        memory = int(torch.cuda.get_device_properties(device).total_memory)
    yield {"kind": "memory bytes", "value": memory}
    yield {"kind": "launch", "value": _launch(device)}
    for name, dtype in DTYPES.items():
        for side in MATMUL_SIDES:
            seconds = _matmul(side, dtype, device)
            yield {"kind": f"matmul_{name}", "size": 2.0 * side**3, "seconds": seconds}
            # A product with the next side takes 8 times as long. `any` makes all ranks stop at the
            # same size.
            if side >= SURE and world.any(seconds > LONGEST / 8):
                break
    for megabytes in MEMORY_MB:
        seconds = _traffic(int(megabytes * 1e6 / 12), device)
        yield {"kind": "memory", "size": megabytes * 1e6, "seconds": seconds}
    if world.size > 1:
        for count in COLLECTIVE_BYTES:
            seconds = _all_reduce(world, count)
            yield {"kind": "all_reduce", "size": float(count), "seconds": seconds}
        yield {"kind": "overlap", "value": _hidden(world)}
    yield {"kind": "disk", "size": 2.0 * DISK_BYTES, "seconds": _disk()}


def _timed(work: Callable[[], object], device: torch.device, least: float = LEAST) -> float:
    """Return the shortest time of `work` over at least three runs and at least `least` seconds.

    The shortest time is the best estimate, because other load can only slow `work` down.
    """
    work()
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - begun < least and len(times) < 10_000):
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _launch(device: torch.device) -> float:
    """Return the time in seconds that the host needs to launch an operation."""
    # With a single element, the kernel itself takes practically no time.
    small = torch.ones(1, device=device)

    def many() -> None:
        for _ in range(200):
            small.add_(1)

    return _timed(many, device) / 200


def _matmul(side: int, dtype: torch.dtype, device: torch.device) -> float:
    left = torch.ones(side, side, dtype=dtype, device=device)
    # Preallocate the result, so that the allocator is not part of the measurement.
    out = torch.empty_like(left)
    return _timed(lambda: torch.mm(left, left, out=out), device)


def _traffic(numel: int, device: torch.device) -> float:
    """Return the time in seconds to add two fp32 tensors with `numel` elements each."""
    left, right = torch.ones(numel, device=device), torch.ones(numel, device=device)
    out = torch.empty_like(left)
    return _timed(lambda: torch.add(left, right, out=out), device)


def _all_reduce(world: World, count: int) -> float:
    """Return the time in seconds of an all-reduce of `count` bytes with the engine's transport."""
    group = world.collectives
    buffer = group.allocate(count // 4, torch.float32, world.device)

    def once() -> None:
        handle = group.all_reduce(buffer)
        handle.wait()
        handle.reusable()

    times = []
    for _ in range(8):  # the same number on all ranks, because each iteration is a collective
        world.barrier()
        start = time.perf_counter()
        once()
        _wait(world.device)
        times.append(time.perf_counter() - start)
    return min(times)


def _hidden(world: World) -> float:
    """Return the fraction of an all-reduce that does not slow down concurrent matrix products."""
    group, side = world.collectives, 768
    buffer = group.allocate(2**23, torch.float32, world.device)
    left = torch.ones(side, side, device=world.device)

    def compute() -> None:
        for _ in range(8):
            torch.mm(left, left)
        _wait(world.device)

    # Take the minimum over repetitions, because other load can only slow a measurement down.
    def elapsed(work: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            world.barrier()
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return min(times)

    def both() -> None:
        handle = group.all_reduce(buffer)
        compute()
        handle.wait()
        handle.reusable()

    def reduce() -> None:
        handle = group.all_reduce(buffer)
        handle.wait()
        handle.reusable()

    alone, reduced = elapsed(compute), elapsed(reduce)
    # The time saved by running both at once, as a fraction of the most that could be saved.
    saved = alone + reduced - elapsed(both)
    return min(1.0, max(0.01, saved / min(alone, reduced)))


def _disk() -> float:
    """Return the time in seconds to write and sync a file in the current directory and read it."""
    # Use random bytes, because some file systems and disks compress data.
    chunk = os.urandom(2**20) * 8
    with tempfile.NamedTemporaryFile(dir=".") as file:
        start = time.perf_counter()
        for _ in range(DISK_BYTES // len(chunk)):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - start
        if hasattr(os, "posix_fadvise"):  # drop the page cache, to read from the disk
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        while file.read(len(chunk)):
            pass
        return written + time.perf_counter() - start


if __name__ == "__main__":
    main(Path(sys.argv[1]))
