"""Checks a host for problems that would make a run fail or slow it down."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise import __version__
from shardwise.config import Settings

GIB = 2**30
FEWEST_FILES = 1024
LEAST_MEMORY = GIB
LEAST_SHARED = GIB // 4

OLDEST_TORCH, NEWEST_TORCH = "2.9.1", "2.15.0"
"""The oldest and newest supported versions of torch. Unit and pipeline tests pass with both
(`make test-torch`)."""


@dataclass(frozen=True)
class Check:
    """The result of one check on a host: a row of the table.

    Attributes:
        name: Name of the row.
        shown: Value of the row for this host.
        fault: Why a run would fail, and what to do about it ("" if it would not fail).
        advice: Why a run might be slow or misleading, and what to do about it ("" otherwise).
    """

    name: str
    shown: str
    fault: str = ""
    advice: str = ""


def of_host(settings: Settings) -> list[Check]:
    """Return all checks of this host, in the order of the table."""
    return [
        Check("Python", platform.python_version()),
        Check("torch", torch.__version__),
        tested(torch.__version__),
        Check("shardwise", __version__),
        _devices(),
        Check("backends", ", ".join(_backends())),
        _memory(),
        _open_files(),
        Check("locked memory", _limit(resource.RLIMIT_MEMLOCK, 2**20, " MB")),
        _shared_memory(),
        _temporary(),
        *_offload_folders(settings),
    ]


def tested(installed: str) -> Check:
    """Check whether torch's version, `installed`, is in the range that the tests cover.

    Only minor versions are compared, so a patch release of a tested version is in the range.
    """
    bounds = f"{OLDEST_TORCH} to {NEWEST_TORCH}"
    if _minor(OLDEST_TORCH) <= _minor(installed) <= _minor(NEWEST_TORCH):
        return Check("tested torch", f"{bounds}: this version is in the range")
    return Check(
        "tested torch",
        f"{bounds}: this version is outside",
        advice=f"torch {installed} is outside the range that Shardwise is tested with. If "
        f"something fails, install a version from {bounds}.",
    )


def _minor(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in release.split(".")[:2])


def _devices() -> Check:
    # Count the cores that this process may use, because a batch job often has only some of the
    # host's cores.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpu = f"{cores} CPU core{'s' * (cores != 1)}"
    if not torch.cuda.is_available():
        return Check("devices", cpu)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    gpus = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return Check("devices", ", ".join([*gpus, cpu]))


def _backends() -> Iterator[str]:
    if dist.is_gloo_available():
        yield "gloo"
    if dist.is_nccl_available() and torch.cuda.is_available():
        yield "nccl"


def _memory() -> Check:
    table = Path("/proc/meminfo")
    if not table.exists():
        return Check("memory", "unknown")
    lines = dict(line.split(":", 1) for line in table.read_text().splitlines())
    # MemAvailable includes caches that the kernel can drop. MemFree excludes them, so it is low on
    # every busy host.
    free, total = (int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    # This is advice rather than a fault, because a small script needs less memory.
    few = free < LEAST_MEMORY
    advice = "little memory is free: end other programs on this host." if few else ""
    return Check("free memory", f"{free / GIB:.1f} of {total / GIB:.1f} GB", advice=advice)


def _open_files() -> Check:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    # Every pair of ranks needs sockets, and every DataLoader worker needs pipes.
    few = limit != resource.RLIM_INFINITY and limit < FEWEST_FILES
    fault = f"a rank may open only {limit} files: run `ulimit -n 65536` before the run."
    shown = _limit(resource.RLIMIT_NOFILE, 1, "")
    return Check("open files", shown, fault=fault if few else "")


def _limit(which: int, unit: int, name: str) -> str:
    soft = resource.getrlimit(which)[0]
    if soft == resource.RLIM_INFINITY:
        return "unlimited"
    return f"{soft / unit:,.0f}{name}"


def _shared_memory() -> Check:
    # On systems other than Linux, DataLoader workers use a different kind of shared memory.
    if not Path("/dev/shm").is_dir():
        return Check("/dev/shm", "none")
    free = shutil.disk_usage("/dev/shm").free
    few = (
        "DataLoader workers pass batches through /dev/shm, and crash when it is full: start the "
        "container with --shm-size 8g, or use num_workers=0."
    )
    return Check("/dev/shm", f"{free / GIB:.2g} GB free", advice=few if free < LEAST_SHARED else "")


def _temporary() -> Check:
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        return Check(
            "temporary folder", "none", fault="no folder is writable: set TMPDIR to one that is."
        )
    return Check(
        "temporary folder", f"{folder}, {shutil.disk_usage(folder).free / GIB:.0f} GB free"
    )


def _offload_folders(settings: Settings) -> Iterator[Check]:
    """Check each distinct offload folder in the settings."""
    tiers = [
        settings.offload_optimizer,
        settings.offload_params,
        settings.offload_gradients,
        settings.offload_activations,
    ]
    for folder in dict.fromkeys(tier.folder for tier in tiers if tier is not None):
        if not folder:
            continue
        if not os.path.isdir(folder):
            fault = f"no such folder to offload to: {folder}. Create it."
            yield Check(folder, "missing", fault=fault)
        elif not os.access(folder, os.W_OK):
            fault = f"{folder} is not writable: choose another folder."
            yield Check(folder, "read-only", fault=fault)
        else:
            yield Check(folder, f"{shutil.disk_usage(folder).free / GIB:.0f} GB free")
