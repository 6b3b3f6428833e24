"""Another user of the host can neither join a run nor block it."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.launcher import Launcher, script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0, reason="only root may become another user"
    ),
]
LIMIT = 90.0


@pytest.fixture
def meeting_place() -> Iterator[Path]:
    """Return a folder that everybody may write to.

    It is not in `tmp_path`: each pytest that starts takes the rights of others from the folder
    that all of these are in.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def listeners(pids: list[int]) -> set[str]:
    """Return the sockets that these processes listen on, in the form that the intruder reads."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(fd)
            except FileNotFoundError:  # the process has closed it meanwhile
                continue
            if target.startswith("socket:"):
                inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            found.add(f"tcp {int(fields[1].rpartition(':')[2], 16)}")
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and fields[6] in inodes and fields[7].startswith("@shardwise-"):
            found.add(f"unix {fields[7].removeprefix('@')}")
    return found


def test_another_user_neither_joins_nor_disturbs(shardwise: Launcher, meeting_place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ("run", "-n", "2", "--port", str(port), "--timeout", "60")
    run = shardwise.start(*words, script("guarded"), str(meeting_place))
    environ = {name: v for name, v in os.environ.items() if not name.startswith("SHARDWISE_")}
    intruder = subprocess.Popen(
        [sys.executable, script("intruder"), str(port), str(meeting_place)],
        stdin=subprocess.PIPE,
        env=environ | {"TMPDIR": str(meeting_place), "OMP_NUM_THREADS": "1"},
        cwd="/",
        text=True,
    )
    try:
        _tell(intruder, shardwise, run, port, meeting_place)
        ran = shardwise.finish(run, LIMIT)
    finally:
        intruder.kill()
        intruder.communicate()
    assert not (meeting_place / "harmed").exists()
    assert "joined" not in (meeting_place / "pose").read_text()
    assert (meeting_place / "store").read_text() != "written"
    assert (ran.code, ran.lines()) == (0, ["[0] [0, 1] {'by': 1} 2.0"]), ran.err


def _tell(
    intruder: "subprocess.Popen[str]",
    launcher: Launcher,
    run: "subprocess.Popen[str]",
    port: int,
    folder: Path,
) -> None:
    """Send new sockets to the intruder until it has disturbed enough of them."""
    assert intruder.stdin is not None
    told = {f"tcp {port}"}
    until = time.monotonic() + LIMIT
    while run.poll() is None and intruder.poll() is None and time.monotonic() < until:
        if (folder / "disturbed").exists():
            return
        for place in sorted(listeners(launcher.left()) - told):
            told.add(place)
            print(place, file=intruder.stdin, flush=True)
        time.sleep(0.05)
