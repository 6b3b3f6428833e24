"""The launcher's socket for `shardwise scale-up`, without a run."""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from shardwise.errors import LaunchError
from shardwise.launch.scale_up import PENDING, ScaleUpSocket, scale_up
from shardwise.net import private_files

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="--survive needs Linux")


def add(count: int) -> list[int]:
    """Add workers to a run of four that may have seven."""
    if count > 3:
        raise LaunchError(f"{count} are too many.")
    return list(range(4, 4 + count))


@contextmanager
def launcher() -> Iterator[None]:
    """Serve requests in a thread, as the launcher's event loop does."""
    ended = threading.Event()
    with selectors.DefaultSelector() as selector:

        def serve() -> None:
            while not ended.is_set():
                for key, _ in selector.select(0.05):
                    key.data()

        with closing(ScaleUpSocket(selector, add)):
            thread = threading.Thread(target=serve)
            thread.start()
            try:
                yield
            finally:
                ended.set()
                thread.join()


@pytest.fixture(autouse=True)
def _in_long_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a folder whose name is too long for a Unix socket."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))


@pytest.mark.parametrize("run", [None, os.getpid()])
def test_the_launcher_starts_workers(run: int | None) -> None:
    with launcher():
        assert scale_up(2, run) == [4, 5]


def test_the_launchers_error_is_raised() -> None:
    with launcher(), pytest.raises(LaunchError, match="4 are too many"):
        scale_up(4, None)


@contextmanager
def connection() -> Iterator[socket.socket]:
    """Connect to the launcher in this process."""
    with socket.socket(socket.AF_UNIX) as other:
        other.settimeout(10)
        name = os.open(private_files.folder(), os.O_RDONLY)
        try:
            other.connect(f"/proc/self/fd/{name}/scale-up-{os.getpid()}")
        finally:
            os.close(name)
        yield other


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (b"[]\nnothing\n", "A request has the form"),
        (b"nothing\n", "A request has the form"),
        (b"\xff\n", "A request has the form"),
        (b"[" * 10_000, "A request has the form"),
        (b'{"workers": null}\n', "workers must be a whole number from 1 to "),
        (b'{"workers": true}\n', "workers must be a whole number from 1 to "),
        (b'{"workers": 0}\n', "workers must be a whole number from 1 to "),
        (b'{"workers": 1000000}\n', "workers must be a whole number from 1 to "),
    ],
)
def test_other_bytes_do_not_stop_the_launcher(request_: bytes, message: str) -> None:
    with launcher():
        with connection() as other:
            other.sendall(request_)
            assert message in json.loads(other.recv(4096))["error"]
        assert scale_up(1, None) == [4]


def test_the_launcher_does_not_wait_for_a_slow_client() -> None:
    with launcher(), ExitStack() as stack:
        for _ in range(2 * PENDING):
            stack.enter_context(connection()).sendall(b"{")
        assert scale_up(1, None) == [4]


def test_only_sockets_that_refuse_connections_are_removed() -> None:
    folder = private_files.folder()
    with launcher():
        # The process id of a launcher in another container means nothing here.
        own, foreign = folder / f"scale-up-{os.getpid()}", folder / "scale-up-99999999"
        own.rename(foreign)
        stale = folder / "scale-up-1"
        with socket.socket(socket.AF_UNIX) as ended:
            name = os.open(folder, os.O_RDONLY)
            ended.bind(f"/proc/self/fd/{name}/{stale.name}")
            os.close(name)
        (folder / "scale-up-x").touch()
        assert scale_up(1, 99999999) == [4]
        assert not stale.exists()
        foreign.rename(own)


def test_a_folder_of_other_users_is_refused() -> None:
    private_files.folder().chmod(0o770)
    with pytest.raises(LaunchError, match="must be a folder that only this user can access"):
        scale_up(1, None)


def test_a_run_that_has_ended_is_not_found() -> None:
    with launcher():
        pass
    with pytest.raises(LaunchError, match=r"There is no run on this host.*: none\. Start one"):
        scale_up(1, None)
    with pytest.raises(LaunchError, match="There is no run with the process id 1 on this host"):
        scale_up(1, 1)
