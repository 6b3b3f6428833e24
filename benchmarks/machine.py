"""The machine, the versions and the commit of a figure; `python benchmarks/machine.py` prints them,
and with `--device` the facts of the GPU."""

import json
import os
import platform
import resource
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PEERS = ("deepspeed", "accelerate", "lightning")
PACKAGES = ("torch", "triton", "numpy", "shardwise", *PEERS, "transformers", "mpi4py")


def describe() -> dict[str, str]:
    """Return the machine, the versions, the command and the date."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    # A distribution without metadata has no name.
    installed = {d.name.lower(): d.version for d in metadata.distributions() if d.name}
    versions = [f"{name} {installed[name]}" for name in PACKAGES if name in installed]
    return {
        "machine": f"{_processor()}, {cores()} cores, {memory:.0f} GiB memory",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(versions),
        "commit": _commit(),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def describe_device(python: Sequence[str]) -> dict[str, str]:
    """Return the GPU, its driver, and the libraries of the torch that `python` has. Another process
    asks, so that this one holds nothing of the device's memory."""
    command = [*python, __file__, "--device"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def _device() -> dict[str, str]:
    """Return the facts for `describe_device`, in the process that asks."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("this needs a GPU, and torch.cuda.is_available() is False here")
    cuda = torch.version.cuda
    facts = {"device": torch.cuda.get_device_name(), "CUDA": cuda or "none"}
    if cuda:
        facts["cuDNN"] = str(torch.backends.cudnn.version())
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    query = ["nvidia-smi", "--query-gpu=driver_version,memory.total,clocks.max.sm,power.limit"]
    try:
        done = subprocess.run(
            [*query, "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
        said = done.stdout.strip().splitlines() if done.returncode == 0 else []
    except OSError:
        said = []
    return facts | {"driver, memory, clock, power": said[0] if said else "unknown"}


def write_json(path: Path, figures: Any) -> None:
    """Write the result file; a run that is killed meanwhile leaves the last whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(figures, indent=1) + "\n")
    new.replace(path)


def cores() -> int:
    """Return the number of cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def cpu_seconds(*who: int) -> float:
    """Return the CPU time of this process, or of `who`, such as resource.RUSAGE_CHILDREN."""
    used = [resource.getrusage(each) for each in who or (resource.RUSAGE_SELF,)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    """Return the commit, marked if files have changed since.

    COMMIT names it if there is no repository, as in a copy of the files.
    """
    if named := os.environ.get("COMMIT"):
        return named
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # no git
        return "unknown"
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    if "--device" in sys.argv[1:]:
        print(json.dumps(_device()))
        sys.exit()
    for name, value in describe().items():
        print(f"{name:>9}  {value}")
