"""The launcher's socket for `shardwise scale-up`, without a run."""

from __future__ import annotations

import os
import selectors
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from shardwise.errors import LaunchError
from shardwise.launch.scale_up import ScaleUpSocket, scale_up
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


def test_other_bytes_do_not_stop_the_launcher() -> None:
    with launcher():
        with socket.socket(socket.AF_UNIX) as other:
            name = os.open(private_files.folder(), os.O_RDONLY)
            try:
                other.connect(f"/proc/self/fd/{name}/scale-up-{os.getpid()}")
            finally:
                os.close(name)
            other.sendall(b"[]\nnothing\n")
        assert scale_up(1, None) == [4]


def test_a_run_that_has_ended_is_not_found() -> None:
    with launcher():
        pass
    with pytest.raises(LaunchError, match=r"There is not exactly one run on this host.*none"):
        scale_up(1, None)
