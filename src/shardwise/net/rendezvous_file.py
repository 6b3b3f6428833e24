"""Writes and reads the rendezvous file, in which rank 0 says where it listens.

mpirun and srun start processes and give them no address. Rank 0 then listens on a port that the
kernel gave it, and writes a file under a name that only this run has: in the user's own temporary
folder where all ranks are on one host, else in the working directory, which hosts of a cluster
mostly share. Only the same user can read it, so it also holds the secret of the run. The file is
removed when all ranks have come.
"""

import hashlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

from shardwise.errors import LaunchError
from shardwise.messages.printable import as_utf8
from shardwise.net import private_files
from shardwise.net.identity import Identity
from shardwise.net.launchers import detection as launcher_detection
from shardwise.net.launchers import processes

VARIABLE = "SHARDWISE_RENDEZVOUS"
PATTERN = ".shardwise-{user}-{run}"
DRAFT = ".writing"
"""What the name of a file begins with while it is being written; nobody looks for that."""

OLD = 60.0
"""Seconds after which a file may be one that a killed run left behind."""


@dataclass(frozen=True, kw_only=True)
class RendezvousFile:
    """Where rank 0 listens: names or addresses of its host, the likeliest first, and the port.

    `host`, `pid` and `began` (see `began`) are of the process that wrote the file. `secret` is that
    of the run, "" where ranks have it from their environment.
    """

    addresses: tuple[str, ...]
    port: int
    host: str
    pid: int
    secret: str = field(default="", repr=False)
    began: str = ""


def path(identity: Identity, folder: str | None = None, run: str | None = None) -> Path:
    """Return where the file of this run lies: in `folder`, or where all ranks look by themselves.

    `run` names the run where that is known otherwise. Raises LaunchError where nothing names the
    run on all of its hosts, or the user's own temporary folder cannot be had.
    """
    run = run or identity.job or _name_by_hydra(identity)
    if run is None:
        if not identity.on_one_host:
            raise LaunchError(_nameless(identity))
        run = name_by_process()
    if folder is None:
        folder = str(private_files.folder()) if identity.on_one_host else os.getcwd()
    digest = hashlib.sha256(as_utf8(run)).hexdigest()[:16]
    return Path(folder) / PATTERN.format(user=os.getuid(), run=digest)


def _nameless(identity: Identity) -> str:
    where = "on several hosts" if identity.is_placed else "somewhere"
    return (
        f"{identity.launcher} put the {identity.size} ranks {where} and tells them "
        f"nothing of each other. Name rank 0's host and a port that is free there: {VARIABLE}="
        f"{socket.gethostname()}:29500, passed on to all ranks (mpiexec -genv NAME VALUE, "
        "mpirun -x NAME=VALUE)."
    )


def addresses(identity: Identity) -> tuple[str, ...]:
    """Return how others may reach this host, which is rank 0's, the likeliest first."""
    if identity.on_one_host:
        return ("127.0.0.1",)
    name = socket.gethostname()
    found = [identity.address, name, _own_number(name)]
    return tuple(dict.fromkeys(one for one in found if one))


def _own_number(name: str) -> str | None:
    """Return the address of this host on the way out, for hosts that do not know its name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: only asks for the route
        except OSError:  # no way out: the name will do
            return None
        return str(probe.getsockname()[0])


@contextmanager
def written(place: Path, file: RendezvousFile) -> Iterator[None]:
    """Keep the file at `place` while the block runs, and no longer, also when SIGTERM comes.

    Raises LaunchError if another living process of this host has its file there.
    """
    _sweep(place.parent)
    before = read(place)
    is_here = before is not None and before.host == file.host and before.pid != file.pid
    # A number comes back, in containers soon; the time of the start does not.
    if before is not None and is_here and before.began and began(before.pid) == before.began:
        raise LaunchError(
            f"Process {before.pid} is rank 0 of a run that meets in {place.parent} under the name "
            "of this one. Does every process have a rank of its own? Give two runs that start at "
            f"the same time a place each: {VARIABLE}=FOLDER/ or HOST:PORT."
        )
    with _sigterm_raises():
        try:
            private_files.write(place, json.dumps(asdict(file)), DRAFT)
            yield
        except OSError as error:
            raise LaunchError(
                f"Rank 0 cannot write the rendezvous file in {place.parent}: {error.strerror}. "
                f"Name a folder that it may write to and all hosts share, or "
                f"rank 0's host and a free port: {VARIABLE}=FOLDER/ or HOST:PORT."
            ) from error
        finally:
            if read(place) in (None, file):  # another run may have written its own since
                place.unlink(missing_ok=True)
            private_files.tidy()


def began(pid: int) -> str:
    """Return when a process of this host started, in ticks since the boot; "" if unseen."""
    try:
        return processes.stat(pid)[3]
    except OSError:
        return ""


def read(place: Path) -> RendezvousFile | None:
    """Read the file at `place`; None where there is none that is whole and trusted."""
    with suppress(FileNotFoundError):
        os.listdir(place.parent)  # makes a network file system look again
        text = private_files.read(place)
        return None if text is None else _parsed(text)
    return None


def _parsed(text: str) -> RendezvousFile | None:
    """Parse the text of a file; None for what another version, or a crash, has left."""
    try:
        found = json.loads(text)
        return RendezvousFile(**found | {"addresses": tuple(found["addresses"])})
    except (ValueError, TypeError, KeyError):
        return None


def _sweep(folder: Path) -> None:
    """Remove files of this user whose process was killed before it could."""
    ours = PATTERN.format(user=os.getuid(), run="*")
    for old in [*folder.glob(ours), *folder.glob(DRAFT + ours)]:
        with suppress(FileNotFoundError):
            # A process that is alive in another container has no number here.
            if time.time() - old.stat().st_mtime > OLD and not _is_needed(old):
                old.unlink()


def _is_needed(old: Path) -> bool:
    """Whether its process may run still: on another host, or one of another version."""
    if old.name.startswith(DRAFT):
        return False
    file = read(old)
    return file is None or file.host != socket.gethostname() or _lives(file.pid)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process has the number now: keep the file
        return True
    return True


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM, with which launchers end a run, raise SystemExit: then the file is removed."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def name_by_process() -> str:
    """Name the run by the process that started this rank: its number and start time.

    A rank may be started through a script of its own, so parents are followed upwards; where none
    of them is a known launcher, the parent is taken.
    """
    pid = launcher_process() or os.getppid()
    # There may be no /proc, or one that hides other users' processes.
    return f"process {pid} started at {began(pid) or 'an unknown time'}"


def _name_by_hydra(identity: Identity) -> str | None:
    """Return a name of a run that MPICH's mpiexec started; None for other runs.

    Its ranks get no name of their run. The proxies that start them on each host get mpiexec's
    address, `--control-port HOST:PORT`, which no other run has at the same time.
    """
    pid = launcher_process() if "PMI_RANK" in identity.variables.values() else None
    try:
        words = [] if pid is None else Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return f"hydra at {os.fsdecode(words[words.index(b'--control-port') + 1])}"
    except (OSError, ValueError, IndexError):
        return None


def launcher_process(pid: int | None = None) -> int | None:
    """Return the nearest launcher's process above `pid` (this process); None where none is seen."""
    above = processes.ancestors(pid)
    return next((each for each, name in above if name in launcher_detection.PROCESSES), None)
