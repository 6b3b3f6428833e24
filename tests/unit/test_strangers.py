"""Other users of the host: their files in the temporary folder, and their silent sockets."""

import os
import shutil
import socket
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from shardwise.comm import socket_mesh
from shardwise.errors import LaunchError
from shardwise.horovod.elastic import CommitFile
from shardwise.net import environment, private_files

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root may become another user"
)
NOBODY = 65534
SECRET = b"what all ranks know"


@contextmanager
def another_user(do: Callable[[], object]) -> Iterator[None]:
    """Run a function as a different user (nobody), and keep its files open in the block."""
    told, tells = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            kept = do()
            os.write(tells, b"1")
            time.sleep(60)
            del kept
        finally:
            os._exit(0)
    os.close(tells)
    try:
        assert os.read(told, 1) == b"1"
        yield
    finally:
        os.close(told)
        os.kill(pid, 9)
        os.waitpid(pid, 0)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder that all users may write to.

    It is not pytest's own: each pytest that starts closes the folder above that to other users.
    """
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(folder))
    yield folder
    shutil.rmtree(folder)


class TestFolder:
    def test_folder_is_private(self, temporary: Path) -> None:
        found = private_files.folder()
        assert found.parent == temporary
        assert stat.S_IMODE(found.stat().st_mode) == 0o700
        private_files.write(found / "text", "mine")
        assert stat.S_IMODE((found / "text").stat().st_mode) == 0o600
        assert private_files.read(found / "text") == "mine"
        private_files.tidy()
        assert found.exists()
        (found / "text").unlink()
        private_files.tidy()
        assert not found.exists()

    @pytest.mark.parametrize("kind", ["folder", "link", "open"])
    def test_refuses_folder_of_other_user(self, temporary: Path, kind: str) -> None:
        place = private_files.folder_path()
        if kind == "open":
            place.mkdir()
            place.chmod(0o770)
        else:
            make = place.mkdir if kind == "folder" else lambda: place.symlink_to(temporary)
            with another_user(make):
                pass
        with pytest.raises(LaunchError, match=rf"{place} must be .* Remove it, .*TMPDIR=FOLDER"):
            private_files.folder()

    def test_folder_is_created_again_after_tidy(self, temporary: Path) -> None:
        place = private_files.folder() / "text"
        private_files.tidy()
        private_files.write(place, "mine")
        assert private_files.read(place) == "mine"

    def test_folder_is_created_again_during_tidy(
        self, temporary: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make, made = Path.mkdir, []

        def mkdir(place: Path, mode: int = 0o777) -> None:
            made.append(place)
            make(place, mode)
            if len(made) == 1:
                private_files.tidy()

        monkeypatch.setattr(Path, "mkdir", mkdir)
        assert private_files.folder().is_dir()
        assert len(made) == 2


class TestFiles:
    def test_links_are_not_followed(self, temporary: Path) -> None:
        kept = temporary / "kept"
        kept.write_text("kept")
        link = temporary / "link"
        with another_user(lambda: link.symlink_to(kept)):
            assert private_files.read(link) is None
            with pytest.raises(FileExistsError):
                private_files.create(link)
        assert kept.read_text() == "kept"

    def test_pipe_does_not_block(self, temporary: Path) -> None:
        os.mkfifo(temporary / "pipe")
        assert private_files.read(temporary / "pipe") is None

    def test_ignores_file_of_other_user(self, temporary: Path) -> None:
        place = temporary / "note"
        with another_user(lambda: place.write_text("theirs")):
            assert private_files.read(place) is None

    def test_commit_file_is_in_private_folder(self, temporary: Path) -> None:
        with another_user(
            lambda: torch.save(
                {"number": 9, "state": {"epoch": 9}}, temporary / private_files.commit_file("run")
            )
        ):
            commits = CommitFile({environment.RUN_VARIABLE: "run"})
            assert commits.read() is None
            commits.write(1, {"epoch": 1})
            assert commits.read() == (1, {"epoch": 1})
        commits.remove()
        assert not private_files.folder_path().exists()


def meet(name: str, rank: int, listener: socket.socket) -> list[int]:
    """Connect a rank to its peer, and return the ranks that it found."""
    with listener:
        found = socket_mesh.connect(listener, name, SECRET, rank, 2, 20.0)
    for peer in found.values():
        peer.close()
    return list(found)


def test_silent_sockets_of_other_user_do_not_block_ranks() -> None:
    name = uuid.uuid4().hex
    listeners = [socket_mesh.listen(name, rank, 2, 20.0) for rank in range(2)]

    def crowd() -> list[socket.socket]:
        held = []
        for _ in range(20):
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peer.setblocking(False)
            peer.connect_ex(f"\0shardwise-{name}-0")
            held.append(peer)
        return held

    with another_user(crowd), ThreadPoolExecutor(2) as pool:
        began = time.monotonic()
        found = [pool.submit(meet, name, rank, listeners[rank]) for rank in range(2)]
        assert [each.result() for each in found] == [[1], [0]]
        assert time.monotonic() - began < socket_mesh.GREETING


def test_detects_listener_of_other_user() -> None:
    name = uuid.uuid4().hex
    with (
        another_user(lambda: socket_mesh.listen(name, 0, 2, 20.0)),
        socket_mesh.listen(name, 1, 2, 20.0) as listener,
        pytest.raises(PermissionError, match="another user listens in the place of rank 0"),
    ):
        socket_mesh.connect(listener, name, SECRET, 1, 2, 20.0)


def test_gives_up_silent_process_of_same_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_mesh, "GREETING", 0.1)
    name = uuid.uuid4().hex
    listeners = [socket_mesh.listen(name, rank, 2, 20.0) for rank in range(2)]
    with ExitStack() as stack:
        peer = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        peer.connect(f"\0shardwise-{name}-0")
        pool = stack.enter_context(ThreadPoolExecutor(2))
        found = [pool.submit(meet, name, rank, listeners[rank]) for rank in range(2)]
        assert [each.result() for each in found] == [[1], [0]]
