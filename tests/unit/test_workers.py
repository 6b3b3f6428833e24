"""Processes of ranks, once they have ended: their numbers may be those of others."""

import os
import selectors
import sys
import time
from pathlib import Path

import pytest

from shardwise.errors import LaunchError
from shardwise.launch import orphan_reaper
from shardwise.launch.local_workers import HostTask, LocalWorkers, RankExit
from shardwise.launch.worker import Worker, WorkerStreams

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


class Reaper(orphan_reaper.OrphanReaper):
    """Notes what it is told of."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def _write(self, line: str) -> None:
        self.told.append(line)


def task(*command: str) -> HostTask:
    place = {"address": "127.0.0.1", "port": 1, "master_port": 1}
    return HostTask(
        command=command, flags={}, size=1, first=0, count=1, outlet=WorkerStreams(), **place
    )


def open_files() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def test_one_that_cannot_start_leaves_no_file_open() -> None:
    before = open_files()
    with pytest.raises(LaunchError, match="/no/such/program cannot be started: No such file"):
        Worker(0, lambda stream, data: None).start(["/no/such/program"], {}, [], WorkerStreams())
    assert open_files() == before


def test_nobody_is_sent_a_signal_that_was_for_one_who_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the reaper forgets it, once, when all that it had started is gone too."""
    reaper, ended = Reaper(), list[RankExit]()
    with selectors.DefaultSelector() as selector:
        workers = LocalWorkers(
            task("sh", "-c", "sleep 0.3 & exit 0"),
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
        assert not workers.release()  # what it has started runs on
        while not workers.release():
            time.sleep(0.01)
    (worker,) = workers._workers
    assert reaper.told == [f"+{worker.group}", f"-{worker.group}"]
    sent: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: sent.append(group))
    workers.send_signal(orphan_reaper.signal.SIGTERM)
    assert workers.release()
    assert (sent, len(reaper.told)) == ([], 2)
