"""Counts this host's cores and GPUs, and reads its memory. Does not import torch, which is slow."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


def gpu_count(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of GPUs that a child process would see."""
    # Count device files, because this is fast and does not create a CUDA context in the launcher.
    nodes = [node for node in Path("/dev").glob("nvidia*") if node.name[6:].isdigit()]
    return visible_gpus(len(nodes) or _gpus_by_driver(), environ.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus(present: int, listed: str | None) -> int:
    """Return the number of GPUs that CUDA_VISIBLE_DEVICES makes visible.

    As in CUDA, the list ends at the first index that does not exist. Names (GPU-..., MIG-...) are
    assumed to exist.

    Args:
        present: Number of GPUs in this host.
        listed: Value of CUDA_VISIBLE_DEVICES, or None if it is not set.
    """
    # An empty variable hides all GPUs, but an unset one hides none.
    if listed is None or present == 0:
        return present
    seen = 0
    for name in (word.strip() for word in listed.split(",")):
        if not name or (name.lstrip("-").isdigit() and not 0 <= int(name) < present):
            break
        seen += 1
    return seen


def _gpus_by_driver() -> int:
    """Count GPUs with nvidia-smi, for systems without device files, such as WSL."""
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
    """A host's memory at one point in time. Values are None if unknown.

    Args:
        total: Total memory of the host in bytes.
        available: Available memory in bytes.
        kills: Number of processes in this cgroup that the out-of-memory killer has killed.
    """

    total: int | None = None
    available: int | None = None
    kills: int | None = None


def host_memory() -> HostMemory:
    """Return this host's memory, and the number of out-of-memory kills."""
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
    """Return the `oom_kill` count of this cgroup (version 1 or 2), or None if unknown."""
    groups = [line.split(":", 2) for line in _text(Path("/proc/self/cgroup")).splitlines()]
    places = [
        Path("/sys/fs/cgroup/memory.events"),
        Path("/sys/fs/cgroup/memory/memory.oom_control"),
    ]
    # Prefer the files of this process's own group. In a container these paths may not exist, but
    # there the root of the mount is the group.
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
    # The affinity accounts for taskset and cpusets, but not every Unix has it.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
