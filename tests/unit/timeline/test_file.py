"""The timeline file: many writers, and valid JSON at all times."""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardwise.timeline.file import PAGE, NoTimeline, TimelineFile, packed, sibling


def event(name: str, size: int = 0) -> str:
    return json.dumps({"name": name, "ph": "X", "fill": "x" * size})


def names(path: Path) -> list[str]:
    header, *events = json.loads(path.read_text())
    assert header["name"] == "shardwise timeline"
    return [one["name"] for one in events]


def joined(path: Path, rank: int = 0, run: str = "run") -> TimelineFile:
    return TimelineFile(path, run, rank, {})


def test_what_several_write_is_there_at_every_moment(tmp_path: Path) -> None:
    path, written = tmp_path / "t.json", []
    files = [joined(path, rank) for rank in range(3)]
    assert names(path) == []
    for turn in range(200):
        name = f"event {turn}"
        written.append(name)
        files[turn % 3].write([event(name, size=turn * 17 % 3000)])
        assert sorted(names(path)) == sorted(written)
    for file in files:
        file.close()
    assert sorted(names(path)) == sorted(written)
    whole = path.read_bytes()
    assert len(whole) % PAGE == 2  # nothing free is left when all have ended
    assert os.listdir(tmp_path) == ["t.json"]


def test_small_writes_share_a_page(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    file = joined(path)
    for turn in range(40):
        file.write([event(str(turn))])
    file.close()
    assert path.stat().st_size == 2 * PAGE + 2


def test_lines_are_put_on_pages_that_hold_them() -> None:
    lines = ["1" * 2000, "2" * 2000, "3" * 100]
    first, second = packed(lines)
    assert first == f",{lines[0]}\n,{lines[1]}\n".encode()
    assert second == f",{lines[2]}\n".encode()
    assert list(packed([], b"old")) == []
    assert list(packed(["4"], b"old")) == [b"old,4\n"]


def test_an_earlier_run_is_replaced_and_this_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    old = joined(path, run="old")
    old.write([event("old")])
    new = joined(path, run="new")
    with pytest.raises(OSError, match="another run writes"):
        old.write([event("older still")])
    new.write([event("first")])
    new.close()
    again = joined(path, run="new")
    again.write([event("second")])
    again.close()
    assert names(path) == ["first", "second"]


@pytest.mark.parametrize("text", ["print('my script')\n", "[1, 2]", '[{"name": "hvd"}'])
def test_no_other_file_is_lost(tmp_path: Path, text: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    with pytest.raises(NoTimeline, match="is no timeline of Shardwise"):
        joined(path)
    assert path.read_text() == text


def test_a_device_is_left_alone(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(NoTimeline, match="is no regular file"):
        joined(pipe)
    assert pipe.is_fifo()


def test_hosts_have_files_of_their_own() -> None:
    assert sibling(Path("a/run.json"), "node2.lan:1") == Path("a/run.node2.lan_1.json")


@pytest.mark.parametrize("anew", [False, True])
def test_a_process_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path, anew: bool) -> None:
    """A DataLoader worker may be forked while the thread writes."""
    path = tmp_path / "t.json"
    file = joined(path)
    read, write = os.pipe()
    with path.open() as old:
        with file._locked() as held:
            if (pid := os.fork()) == 0:
                os.close(write)
                os.read(read, 1)  # until the other end is closed
                os._exit(0)
            if anew:
                held.replace(held.pages(held.used()), 1, tmp_path / "aside")
        try:
            with path.open() as now:
                for other in (old, now):
                    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    fcntl.flock(other, fcntl.LOCK_UN)
        finally:
            os.close(read)
            os.close(write)
            os.waitpid(pid, 0)


WRITER = """
import sys
from pathlib import Path
from shardwise.timeline.file import TimelineFile
rank, number = int(sys.argv[2]), 0
file = TimelineFile(Path(sys.argv[1]), "run", rank, {})
print("begun", flush=True)
while True:
    lines = ['{"name": "%d", "rank": %d, "fill": "%s"}' % (number + i, rank, "x" * 300)
             for i in range(50)]
    file.write(lines)
    number += len(lines)
"""


def test_kills_leave_valid_json(tmp_path: Path) -> None:
    """Kill writers at random moments, half of them while they replace the file.

    The file must contain only complete events, and each writer's events from the first one on.
    """
    chance = random.Random(0)
    for turn in range(6):
        path = tmp_path / f"{turn}.json"
        writers = [start(path, rank) for rank in range(2)]
        try:
            for writer in writers:
                assert writer.stdout is not None
                assert writer.stdout.readline() == b"begun\n"
            time.sleep(0.05 + chance.random() * 0.3)
        finally:
            for writer in writers:
                writer.send_signal(signal.SIGKILL)
                writer.communicate()
        _, *events = json.loads(path.read_text())
        assert len(events) > 100
        for rank in range(2):
            told = [int(one["name"]) for one in events if one["rank"] == rank]
            assert told == list(range(len(told)))


def start(path: Path, rank: int) -> "subprocess.Popen[bytes]":
    command: list[Any] = [sys.executable, "-c", WRITER, path, str(rank)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)
