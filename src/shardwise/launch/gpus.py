"""How many GPUs this host shows, without the seconds that importing torch takes."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path


def count(environ: Mapping[str, str] = os.environ) -> int:
    """The GPUs that a process started from here would see."""
    return visible(_present(), environ.get("CUDA_VISIBLE_DEVICES"))


def visible(present: int, listed: str | None) -> int:
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


def _present() -> int:
    nodes = [node for node in Path("/dev").glob("nvidia*") if node.name[6:].isdigit()]
    return len(nodes) or _listed_by_driver()


def _listed_by_driver() -> int:
    """Where there are no device files (Windows' Linux), the driver's tool knows."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        shown = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in shown.stdout.splitlines())
