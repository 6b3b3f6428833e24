"""Counts what this host offers: cores, GPUs, memory; without the seconds that torch takes."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


def gpu_count(environ: Mapping[str, str] = os.environ) -> int:
    """The GPUs that a process started from here would see."""
    nodes = [node for node in Path("/dev").glob("nvidia*") if node.name[6:].isdigit()]
    return visible_gpus(len(nodes) or _gpus_by_driver(), environ.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus(present: int, listed: str | None) -> int:
    """Of `present` GPUs those that CUDA_VISIBLE_DEVICES lists, as CUDA reads it.

    An index that does not exist ends the list; names (GPU-..., MIG-...) are taken at their word.
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
    """Where there are no device files (Windows' Linux), the driver's tool knows."""
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
    """The memory of a host now. `total` and `available` in bytes, None where not known.

    `kills` counts what the out-of-memory killer has ended in our control group.
    """

    total: int | None = None
    available: int | None = None
    kills: int | None = None


def host_memory() -> HostMemory:
    """This host's memory now, as far as it can be read."""
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
    """The `oom_kill` count of the control group we are in, in either version of that system."""
    groups = [line.split(":", 2) for line in _text(Path("/proc/self/cgroup")).splitlines()]
    places = [
        Path("/sys/fs/cgroup/memory.events"),
        Path("/sys/fs/cgroup/memory/memory.oom_control"),
    ]
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
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
