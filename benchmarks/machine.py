"""Where and with what the figures were made; `python benchmarks/machine.py` prints it."""

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "shardwise", "deepspeed", "accelerate", "lightning", "mpi4py")


def describe() -> dict[str, str]:
    """The machine, the versions, the command and the date."""
    return {
        "machine": f"{_processor()}, {cores()} cores, {_memory()}",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {version}" for name, version in _versions()),
        "commit": _commit(),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def write_json(path: Path, figures: Any) -> None:
    """Write the result file so that a run which is cut leaves the last whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(figures, indent=1) + "\n")
    beside.replace(path)


def cores() -> int:
    """Cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{total / 2**30:.0f} GiB memory"


def _versions() -> list[tuple[str, str]]:
    installed = {d.name.lower(): d.version for d in metadata.distributions()}
    return [(name, installed[name]) for name in PACKAGES if name in installed]


def _commit() -> str:
    """The commit that was measured, marked when files had changed since."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    for name, value in describe().items():
        print(f"{name:>9}  {value}")
