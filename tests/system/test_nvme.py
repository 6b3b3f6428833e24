"""The nvme tier in separate processes: its cost, and the files left after any kind of exit."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disk import MB

UNFINISHED = """
import sys
from pathlib import Path
from shardwise.tiers.nvme import Store

store = Store(Path(sys.argv[1]), "state", [8 << 20] * 8, rank=0)
first, second = store.read(0), store.read(1)
first.wait().fill_(1)
first.write()
store.read(2)
second.wait()
"""


def test_a_process_may_end_in_the_middle_of_a_sweep(folder: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", UNFINISHED, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


SWEPT = """
import sys
from pathlib import Path
import torch
from shardwise.tiers.nvme import Store

def own():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(x.split()[1]) * 1024 for x in lines if x.startswith(("Pss_Anon", "Pss_Shmem")))

store = Store(Path(sys.argv[1]), "state", [8 << 20] * 32, rank=0)
torch.ones(1 << 20).add_(1)
before = own()
most = 0
for sweep in range(2):
    ahead = store.read(0)
    for index in range(32):
        lease = ahead
        if index < 31:
            ahead = store.read(index + 1)
        lease.wait().view(torch.float32).add_(1)
        lease.write()
        most = max(most, own())
print(store.nbytes, store.staging_bytes, most - before, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def running(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that has swept 256 MB twice, and waits."""
    command = [sys.executable, "-c", SWEPT, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_the_resident_set_stays_a_few_buffers_and_a_kill_leaves_nothing(
    running: "subprocess.Popen[str]", folder: Path
) -> None:
    assert running.stdout is not None
    stored, staging, grown = map(int, running.stdout.readline().split())
    assert stored == 256 * MB
    assert staging == 32 * MB
    assert staging // 2 <= grown <= staging + 4 * MB
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    assert list(folder.iterdir()) == []
