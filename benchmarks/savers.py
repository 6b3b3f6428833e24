"""The ranks of checkpoint.py: each way to save the same state in turn, timed on all ranks.

Started by checkpoint.py as `shardwise run -n N benchmarks/savers.py ...`; writes figures as JSON.
"""

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise as sw

BYTES_PER_PARAMETER = 12
"""fp32: the parameter and AdamW's two moments."""
MB = 2**20


class Savers:
    """The same bytes, held as each way to save wants them, and what saves them to a folder."""

    def __init__(self, world: sw.World, megabytes: float, width: int, folder: Path) -> None:
        self.world, self.folder = world, folder
        torch.manual_seed(0)
        layers = max(1, round(megabytes * 1e6 / BYTES_PER_PARAMETER / width**2))
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.engine = sw.Engine(self.model, optimizer, zero=3)
        self.engine.backward(
            self.model(world.share(torch.randn(world.size, width))).square().mean()
        )
        self.engine.step()
        self.whole = self._whole(layers, width) if world.is_main else {}
        self.mine = {n: torch.randn(width * width // world.size) for n in self._names(layers)}
        self.shards = self._shards(layers, width)
        self.nbytes = layers * width * width * BYTES_PER_PARAMETER
        self.copy = torch.empty(self.nbytes // world.size, dtype=torch.uint8)
        self.source = torch.ones_like(self.copy)

    def _names(self, layers: int) -> list[str]:
        return [f"{i}.{key}" for i in range(layers) for key in ("weight", "exp_avg", "exp_avg_sq")]

    def _whole(self, layers: int, width: int) -> dict[str, Tensor]:
        return {name: torch.randn(width, width) for name in self._names(layers)}

    def _shards(self, layers: int, width: int) -> dict[str, Any]:
        # With several ranks shardwise.init has made torch's own process group, too.
        mesh = init_device_mesh("cpu", (self.world.size,)) if dist.is_initialized() else None
        value = torch.randn(width, width)
        if mesh is None:
            return {name: value.clone() for name in self._names(layers)}
        return {name: distribute_tensor(value, mesh, [Shard(0)]) for name in self._names(layers)}

    def ways(self) -> dict[str, Callable[[Path], None]]:
        """By name, what saves to a folder."""
        return {
            "raw write": self._raw,
            "shardwise": lambda folder: void(self.engine.save(folder)),
            "DCP, sharded": self._dcp,
            "safetensors, rank 0": self._safetensors,
            "torch.save, rank 0": self._torch_save,
        }

    def _raw(self, folder: Path) -> None:
        """Every rank writes its part of one file, and syncs it."""
        fd = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT)
        offset = self.world.rank * self.nbytes // self.world.size
        for value in self.mine.values():
            data = value.view(torch.uint8).numpy().data
            while data:
                written = os.pwrite(fd, data, offset)
                data, offset = data[written:], offset + written
        os.fsync(fd)
        os.close(fd)

    def _dcp(self, folder: Path) -> None:
        writer = dcp.FileSystemWriter(folder, sync_files=True)
        dcp.save(self.shards, storage_writer=writer, no_dist=not dist.is_initialized())

    def _safetensors(self, folder: Path) -> None:
        if self.world.is_main:
            safetensors.torch.save_file(self.whole, folder / "all.safetensors")
            synced(folder / "all.safetensors")

    def _torch_save(self, folder: Path) -> None:
        if self.world.is_main:
            torch.save(self.whole, folder / "all.pt")
            synced(folder / "all.pt")

    def memcpy(self) -> float:
        """Seconds to copy as many bytes as a rank holds."""
        begun = time.perf_counter()
        self.copy.copy_(self.source)
        return time.perf_counter() - begun


def void(_: Any) -> None:
    """Forget a result."""


def synced(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def timed(world: sw.World, save: Callable[[Path], Any], folder: Path) -> float:
    """Seconds from when all begin until all have ended; what was written is removed."""
    if world.is_main:
        folder.mkdir()
        os.sync()
    world.barrier()
    begun = time.perf_counter()
    save(folder)
    world.barrier()
    took = time.perf_counter() - begun
    if world.is_main:
        shutil.rmtree(folder)
    world.barrier()
    return took


def background(world: sw.World, savers: Savers, folder: Path) -> tuple[float, float]:
    """Seconds for which a save in the background holds up this rank, and until it is written."""
    world.barrier()
    begun = time.perf_counter()
    savers.engine.save(folder, background=True)
    held_up = time.perf_counter() - begun
    savers.engine._checkpoints.saver.wait()
    done = time.perf_counter() - begun
    world.barrier()
    if world.is_main:
        shutil.rmtree(folder)
    world.barrier()
    return held_up, done


def peak_above(work: Callable[[], Any]) -> int | None:
    """Bytes by which the resident set grows at most while `work` is done; None where unknown."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = status("VmRSS:")
    work()
    return status("VmHWM:") - before


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in {
        "mb": float,
        "width": int,
        "repeats": int,
        "folder": Path,
        "json": Path,
    }.items():
        parser.add_argument(f"--{name}", type=kind, required=True)
    options = parser.parse_args()
    world = sw.init(seed=0, device="cpu", quiet=True)
    torch.set_num_threads(1)
    savers = Savers(world, options.mb, options.width, options.folder)
    ways = savers.ways()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    copies, held_up, written = [], [], []
    for repeat in range(options.repeats + 1):
        for name, save in ways.items():
            took = timed(world, save, options.folder / f"{repeat}-{name.split(',')[0]}")
            seconds[name] += [took] if repeat else []
        copied = savers.memcpy()
        blocked, done = background(world, savers, options.folder / f"{repeat}-background")
        if repeat:
            copies.append(max(world.gather(copied)))
            held_up.append(max(world.gather(blocked)))
            written.append(max(world.gather(done)))
    save = partial(timed, world, ways["shardwise"], options.folder / "peak")
    peaks = world.gather(peak_above(save))
    if world.is_main:
        told = {"nbytes": savers.nbytes, "seconds": seconds, "memcpy": copies}
        told |= {"bucket": savers.engine.settings.bucket_mb * 1e6}
        told |= {"held_up": held_up, "background": written, "peaks": peaks}
        options.json.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
