"""Runs examples/larger_than_memory.py at a small size: data on the disk must not be in memory."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.disk import on_a_disk

pytestmark = pytest.mark.usefixtures("warm_programs")

ROOT = Path(__file__).parents[2]
SIZE = ("--layers", "8", "--width", "384", "--heads", "8", "--context", "32", "--steps", "2")
"""14M parameters with 230 MB of fp32 state.

Offloading saves more than the variation of the peak.
"""


def run(*flags: str) -> str:
    command = [sys.executable, "-m", "shardwise", "run", "-n", "1", "--zero", "3", *flags]
    script = str(ROOT / "examples" / "larger_than_memory.py")
    ran = subprocess.run(
        [*command, script, *SIZE], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def losses(screen: str) -> list[str]:
    return re.findall(r"step \d: (loss [\d.]+, norm [\d.]+)", screen)


def peak(screen: str) -> float:
    return float(re.findall(r"resident set at most ([\d.]+) GB", screen)[-1])


@pytest.mark.full  # test_nvme.py has the resident set of states on a disk
def test_a_disk_holds_what_memory_does_not() -> None:
    disk = f"nvme:{on_a_disk()}"
    here = run("--activations", "recomputed")
    away = run("--activations", "recomputed", "--offload-params", disk, "--offload-optimizer", disk)
    assert losses(here) == losses(away)
    assert len(losses(here)) == 2
    assert f"of which on {disk}: parameters" in away
    assert away.count("sharded, nvme") + away.count(" nvme ") >= 3, "the table says it by state"
    assert peak(away) < peak(here)
