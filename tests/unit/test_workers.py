"""Processes of ranks after their end: their ids may be reused by other processes."""

import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.errors import LaunchError
from shardwise.launch import orphan_reaper
from shardwise.launch.local_workers import LocalWorkers, RankExit
from shardwise.launch.run_spec import Meeting, RunSpec
from shardwise.launch.worker import Worker, WorkerStreams, program
from shardwise.net.hosts import Host, Share

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


class Reaper(orphan_reaper.OrphanReaper):
    """A reaper that only records its messages."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self._groups = set()

    def _write(self, line: str) -> None:
        self.told.append(line)


def open_files() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def test_failed_start_leaves_no_file_open() -> None:
    before = open_files()
    begin, worker = program(["/no/such/program"]), Worker(0, lambda stream, data: None)
    with pytest.raises(LaunchError, match="/no/such/program cannot be started: No such file"):
        worker.start(begin, {}, [], WorkerStreams())
    assert open_files() == before


def test_no_signal_to_reused_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reaper drops a group once all of its processes have exited."""
    reaper, ended = Reaper(), list[RankExit]()
    with selectors.DefaultSelector() as selector:
        workers = LocalWorkers(
            RunSpec(words=(), size=1, shares=(Share(Host("localhost"), 0, 1),)),
            Meeting(address="127.0.0.1", port=1, master_port=1),
            WorkerStreams(),
            program(["sh", "-c", "sleep 0.3 & exit 0"]),
            tmp_path,
            reaper,
            selector,
            lambda rank, stream, data: None,
            ended.append,
            lambda asked: None,
        )
        workers.start(None)
        while not ended:
            workers.reap()
            time.sleep(0.01)
        assert not workers.release()  # a child of the rank still runs
        while not workers.release():
            time.sleep(0.01)
    (worker,) = workers._workers
    assert reaper.told == [f"+{worker.group}", f"-{worker.group}"]
    sent: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: sent.append(group))
    workers.send_signal(orphan_reaper.signal.SIGTERM)
    assert workers.release()
    assert (sent, len(reaper.told)) == ([], 2)


def sleeper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "60"], start_new_session=True)


def test_stopped_reaper_does_not_block_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphan_reaper, "LAST_WAIT", 0.5)
    folder = tmp_path / "run"
    folder.mkdir()
    rank = sleeper()
    with orphan_reaper.OrphanReaper(folder) as reaper:
        os.kill(reaper._process.pid, signal.SIGSTOP)
        for _ in range(20_000):  # more than its pipe takes
            reaper.started(rank.pid)
    assert rank.wait(5) == -signal.SIGTERM
    assert not folder.exists()


FORKS = """
import os, sys, time
from contextlib import ExitStack
from subprocess import DEVNULL
from shardwise.launch.function_fork import fork
from shardwise.launch.orphan_reaper import OrphanReaper
stack = ExitStack()
begin = fork(lambda: time.sleep(60), (), stack)
reaper = OrphanReaper()
rank = begin({"OMP_NUM_THREADS": "1"}, (), (DEVNULL, None, None))
print(rank.pid, flush=True)
os._exit(0)  # before it registers the rank
"""


def test_forked_rank_registers_itself() -> None:
    words = [sys.executable, "-c", FORKS]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    until = time.monotonic() + 5
    while Path(f"/proc/{ran.stdout.strip()}").exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert not Path(f"/proc/{ran.stdout.strip()}").exists()


STOPS = """
import os, signal, subprocess, sys, time
from pathlib import Path
from shardwise.launch.orphan_reaper import OrphanReaper
with OrphanReaper(Path(sys.argv[1]), limit=2.0) as reaper:
    rank = subprocess.Popen(["sleep", "60"], start_new_session=True)
    reaper.started(rank.pid)
    for _ in range(5):
        time.sleep(1)
        reaper.beat()
    print(rank.pid, flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_stopped_agent_is_killed_with_its_ranks(tmp_path: Path) -> None:
    """The reaper kills it only once it has stopped beating."""
    folder = tmp_path / "run"
    folder.mkdir()
    words = [sys.executable, "-c", STOPS, str(folder)]
    agent = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    rank = int(agent.stdout.readline())
    assert agent.wait(15) == -signal.SIGKILL
    agent.stdout.close()
    until = time.monotonic() + 5
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not folder.exists()
    assert not orphan_reaper.signal_group(rank, 0)
