"""One job at a time saves into a folder."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest

from shardwise.checkpoint import folder_lock
from shardwise.checkpoint.folder_lock import LOCK, take
from shardwise.errors import FolderInUse

HOLDER = """
import sys
from pathlib import Path
from shardwise.checkpoint.folder_lock import take
sys.argv = ["\\x1b[31mother.py"]
held = take(Path(sys.stdin.readline().strip()))
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def other(tmp_path):
    """Another job that has claimed `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    process.stdin.write(f"{tmp_path}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_another_job_is_named(tmp_path, other):
    words = rf"job saves into .*: \\x1b\[31mother.py \(process {other.pid} on .*, since .*step-N"
    with pytest.raises(FolderInUse, match=words):
        take(tmp_path, patience=0)
    take(tmp_path / "own", patience=0).release()


@pytest.mark.parametrize("how", ["kill", "end"])
def test_the_lock_ends_with_its_job(tmp_path, other, how):
    if how == "kill":
        other.kill()
        other.wait()
        assert (tmp_path / LOCK).exists()
    else:
        other.stdin.write("\n")
        other.stdin.flush()
    held = take(tmp_path)  # waits until the other job has ended
    assert held.locked
    held.release()
    assert os.listdir(tmp_path) == []


def test_engines_of_one_process_share_it(tmp_path):
    one, two = take(tmp_path), take(tmp_path)
    one.release()
    one.release()
    assert two.holds()
    with pytest.raises(FolderInUse):
        subprocess_takes(tmp_path)
    two.release()
    subprocess_takes(tmp_path)


def subprocess_takes(folder):
    """Claim the folder in another process; raise FolderInUse if that fails."""
    code = (
        "import sys; from pathlib import Path; from shardwise.checkpoint.folder_lock import take\n"
    )
    code += "take(Path(sys.argv[1]), patience=0)"
    ran = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
    if "FolderInUse" in ran.stderr:
        raise FolderInUse(ran.stderr)
    assert ran.returncode == 0, ran.stderr


def test_a_removed_folder_is_claimed_again(tmp_path):
    held = take(tmp_path / "run")
    (tmp_path / "run" / LOCK).unlink()
    (tmp_path / "run").rmdir()
    assert not held.holds()
    again = take(tmp_path / "run", patience=0)
    held.release()
    assert again.holds()
    again.release()


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_releases_nothing(tmp_path):
    held = take(tmp_path)
    child = os.fork()
    if child == 0:
        held.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert held.holds()
    with pytest.raises(FolderInUse):
        subprocess_takes(tmp_path)
    held.release()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def lockf(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    held = take(tmp_path)
    assert not held.locked
    assert held.holds()
    held.release()


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        take(tmp_path / "run")
    assert not (tmp_path / "elsewhere").exists()
    assert folder_lock._locks == {}
