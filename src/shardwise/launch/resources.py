"""Counts the cores, GPUs and memory of this host, without importing torch, which takes seconds."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


def gpu_count(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of GPUs that a child of this process would see."""
    # Counting device files is fast, and creates no CUDA context in the launcher.
    nodes = [node for node in Path("/dev").glob("nvidia*") if node.name[6:].isdigit()]
    return visible_gpus(len(nodes) or _gpus_by_driver(), environ.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus(present: int, listed: str | None) -> int:
    """Return how many of `present` GPUs the variable CUDA_VISIBLE_DEVICES shows, as CUDA reads it.

    An index that does not exist ends the list. Names (GPU-..., MIG-...) are assumed to exist.
    """
    if listed is None or present == 0:
        return present
    seen = 0
    for name in (word.strip() for word in listed.split(",")):
        if not name or (name.lstrip("-").isdigit() and not 0 <= int(name) < present):
            break
        seen += 1
    return seen


def _gpus_by_driver() -> int:
    """Count GPUs by nvidia-smi, for systems without device files, such as WSL."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        shown = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in shown.stdout.splitlines())


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """The memory of a host at one time; None for unknown values.

    Args:
        total: The memory of the host, in bytes.
        available: The memory that is free, in bytes.
        kills: The number of processes that the out-of-memory killer has ended in our cgroup.
    """

    total: int | None = None
    available: int | None = None
    kills: int | None = None


def host_memory() -> HostMemory:
    """Return the memory of this host now."""
    fields = {}
    for line in _text(Path("/proc/meminfo")).splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    return HostMemory(
        total=fields.get("MemTotal"),
        available=fields.get("MemAvailable"),
        kills=_out_of_memory_kills(),
    )


def _out_of_memory_kills() -> int | None:
    """Return the `oom_kill` count of our cgroup, of version 1 or 2; None if it is not readable."""
    groups = [line.split(":", 2) for line in _text(Path("/proc/self/cgroup")).splitlines()]
    places = [
        Path("/sys/fs/cgroup/memory.events"),
        Path("/sys/fs/cgroup/memory/memory.oom_control"),
    ]
    # Prefer the files of our own group. The ones above are right inside a container, where the
    # root of the mount is that group.
    for _, controllers, path in groups:
        inside = path.lstrip("/")
        if controllers == "":
            places.insert(0, Path("/sys/fs/cgroup", inside, "memory.events"))
        elif "memory" in controllers.split(","):
            places.insert(0, Path("/sys/fs/cgroup/memory", inside, "memory.oom_control"))
    for place in places:
        for line in _text(place).splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
