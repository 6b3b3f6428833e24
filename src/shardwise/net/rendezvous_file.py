"""Writes and reads the rendezvous file, which holds rank 0's address and the run's secret.

mpirun and srun do not give processes an address for their rendezvous. Rank 0 therefore listens on a
port chosen by the kernel, and writes a file whose name is unique to the run. If all ranks are on a
single host, the file is in the user's own temporary folder. Otherwise it is in the working
directory, which the hosts of a cluster usually share. Only the same user can read the file. Rank 0
removes it once all ranks have registered.
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
"""Prefix of the file name during writing, so that no rank reads an incomplete file."""

OLD = 60.0
"""Older files (age in seconds) may be left over from a killed run."""


@dataclass(frozen=True, kw_only=True)
class RendezvousFile:
    """The content of a rendezvous file.

    Args:
        addresses: Names or addresses of rank 0's host, the most likely to work first.
        port: Rank 0's port.
        host: Rank 0's host name.
        pid: Rank 0's process id.
        secret: The run's secret, or "" if the ranks read it from their environment.
        began: Rank 0's start time (see `start_time`).
    """

    addresses: tuple[str, ...]
    port: int
    host: str
    pid: int
    secret: str = field(default="", repr=False)
    began: str = ""


def path(identity: Identity, folder: str | None = None, run: str | None = None) -> Path:
    """Return the path of this run's file, which is the same on all ranks.

    Args:
        identity: This process's rank.
        folder: The folder for the file, or None for the default.
        run: A name for the run, or None to derive one from the launcher.

    Raises:
        LaunchError: The launcher provides no run name that all hosts know, or this user's temporary
            folder cannot be created.
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
    hosts = "several" if identity.is_placed else "unknown"
    return (
        f"{identity.launcher} started the {identity.size} ranks on {hosts} hosts and gives them no "
        f"common name or address. Name rank 0's host and a free port there: {VARIABLE}="
        f"{socket.gethostname()}:29500, for all ranks (mpiexec -genv NAME VALUE, "
        "mpirun -x NAME=VALUE)."
    )


def addresses(identity: Identity) -> tuple[str, ...]:
    """Return this host's addresses as seen from other hosts, the most likely to work first."""
    if identity.on_one_host:
        return ("127.0.0.1",)
    name = socket.gethostname()
    found = [identity.address, name, _own_number()]
    return tuple(dict.fromkeys(one for one in found if one))


def _own_number() -> str | None:
    """Return this host's address on the default route, for hosts that cannot resolve its name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing, only looks up the route
        except OSError:  # no default route: the host name has to suffice
            return None
        return str(probe.getsockname()[0])


@contextmanager
def publish(place: Path, file: RendezvousFile) -> Iterator[None]:
    """Context manager that writes `file` to `place`, and removes it on exit or SIGTERM.

    Raises LaunchError if `place` holds the file of another running process on this host.
    """
    _remove_stale(place.parent)
    before = read(place)
    is_here = before is not None and before.host == file.host and before.pid != file.pid
    # Process ids are reused, especially in containers, so compare start times too.
    if before is not None and is_here and before.began and start_time(before.pid) == before.began:
        raise LaunchError(
            f"Process {before.pid} is rank 0 of another run with the same name and meeting place, "
            f"{place.parent}. Give every process its own rank, and runs that start at the same "
            f"time different meeting places: {VARIABLE}=FOLDER/ or HOST:PORT."
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
            if read(place) in (None, file):  # otherwise another run has replaced it
                place.unlink(missing_ok=True)
            private_files.tidy()


def start_time(pid: int) -> str:
    """Return a process's start time in ticks since boot, or "" if the process is not visible."""
    try:
        return processes.stat(pid)[3]
    except OSError:
        return ""


def read(place: Path) -> RendezvousFile | None:
    """Read the file at `place`, or return None if it is missing, malformed or not trusted."""
    with suppress(FileNotFoundError):
        os.listdir(place.parent)  # makes a network file system refresh its cache
        text = private_files.read(place)
        # A different version of Shardwise may have left a file in a different format.
        with suppress(ValueError, TypeError, KeyError):
            found = json.loads(text or "")
            return RendezvousFile(**found | {"addresses": tuple(found["addresses"])})
    return None


def _remove_stale(folder: Path) -> None:
    """Remove files left behind by this user's killed processes."""
    ours = PATTERN.format(user=os.getuid(), run="*")
    for old in [*folder.glob(ours), *folder.glob(DRAFT + ours)]:
        with suppress(FileNotFoundError):
            # Check the age too, because a process in another container is not visible here.
            if time.time() - old.stat().st_mtime <= OLD:
                continue
            # A file of another host is kept, because its writer may still be running there.
            file = read(old)
            ended = file and file.host == socket.gethostname() and not _is_alive(file.pid)
            if old.name.startswith(DRAFT) or ended:
                old.unlink()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process has this id now: keep the file
        return True
    return True


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Context manager in which SIGTERM raises SystemExit, so that cleanup code runs."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def name_by_process() -> str:
    """Return a run name based on the id and start time of the process that started this rank."""
    # There may be a wrapper script between launcher and rank, so search all ancestors. If none is a
    # known launcher, use the parent.
    pid = launcher_process() or os.getppid()
    # /proc may be missing, or hide the processes of other users.
    return f"process {pid} started at {start_time(pid) or 'an unknown time'}"


def _name_by_hydra(identity: Identity) -> str | None:
    """Return a run name if MPICH's mpiexec started the run, or None for other launchers."""
    # mpiexec does not give ranks a run name. But the proxies that start the ranks on each host are
    # passed mpiexec's address, `--control-port HOST:PORT`, which is unique at any time.
    pid = launcher_process() if "PMI_RANK" in identity.variables.values() else None
    try:
        words = [] if pid is None else Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return f"hydra at {os.fsdecode(words[words.index(b'--control-port') + 1])}"
    except (OSError, ValueError, IndexError):
        return None


def launcher_process() -> int | None:
    """Return the id of this process's nearest ancestor that is a launcher, or None."""
    above = processes.ancestors()
    return next((each for each, name in above if name in launcher_detection.PROCESSES), None)
