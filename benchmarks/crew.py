"""The ranks of one contender, seen from the process that starts and times them."""

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from contenders import Contender
from link import INTERFACE, Link
from workloads import Setting, Workload, told

WORKER = Path(__file__).with_name("worker.py")
PYTHON = [sys.executable]
"""The command that runs a rank's script; tests replace it by one with a simulated device."""

LOG_LINES = 30
SAMPLE_EVERY = 0.01


class CrewFailed(Exception):
    """A rank raised or died; the message ends with its output."""


class TooLate(CrewFailed):
    """A rank gave no answer in time."""


class NotInstalled(Exception):
    """A rank could not import a module; the message is the module's name."""


class DoesNotFit(Exception):
    """A rank had not enough memory, on its device or on the host."""


@dataclass(frozen=True)
class Stint:
    """Some steps of a crew, by rank: the moments in ns at which each ended, the losses, the answers
    to `Job.told`, and of traced steps the profile (`device_trace.Seen`, as numbers)."""

    ends: list[list[int]]
    losses: list[list[float]]
    told: list[dict[str, Any]]
    seen: list[dict[str, Any]] = field(default_factory=list)


class Crew:
    """Started ranks, ready to step; a context manager that leaves no process behind. With a `link`
    there are two, one at each end.

    Raises NotInstalled, DoesNotFit or CrewFailed. `limit` (seconds) bounds the start and each
    stint, `until` (on the monotonic clock) all of them.
    """

    def __init__(
        self,
        contender: Contender,
        workload: Workload,
        ranks: int,
        limit: float,
        setting: Setting | None = None,
        until: float = math.inf,
        link: Link | None = None,
    ) -> None:
        self.size = 1 if contender.alone else ranks
        self.setting = setting or Setting()
        self._limit, self._until, self._link = limit, until, link
        self._folder = tempfile.TemporaryDirectory(prefix="crew-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[Connection] = []
        try:
            self._start(contender, workload)
            self.empty = [answer["empty"] for answer in self._answers()]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process of each rank."""
        return [process.pid for process in self._processes]

    def take(
        self, steps: int, meanwhile: Callable[[], None] | None = None, *, traced: bool = False
    ) -> Stint:
        """Train `steps` steps, `traced` by a profiler or not; call `meanwhile` until they are
        done."""
        self._ask(steps=steps, traced=traced)
        answers = self._answers(meanwhile)
        columns = ("ends", "losses", "told", *(["seen"] if traced else []))
        return Stint(*([answer[name] for answer in answers] for name in columns))

    def release(self) -> None:
        """Return the memory that the ranks' allocators keep to the GPU, for other crews."""
        self._ask(steps=0, release=True)
        self._answers()

    def close(self) -> None:
        """Close the sockets, which ends every rank; kill those that stay."""
        # An idle rank exits when its socket ends; one that hangs in a step does not.
        for rank in self._ranks:
            rank.close()
        for process in self._processes:
            try:
                process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def _start(self, contender: Contender, workload: Workload) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            for rank in range(self.size):
                job = {
                    "workload": told(workload),
                    "setting": asdict(self.setting),
                    "rank": rank,
                    "size": self.size,
                    "shares": 1 if contender.one_batch else self.size,
                    "port": listener.getsockname()[1],
                    "listen_fd": listener.fileno() if rank == 0 and not self._link else None,
                    "addresses": self._link.addresses if self._link else (),
                }
                spec = {"build": contender.build, "options": contender.options, "job": job}
                # Rank 0 inherits the listening socket: no other process can take its port.
                fds = [listener.fileno()] if rank == 0 else []
                self._spawn(rank, spec, fds, contender.environment)

    def _spawn(
        self, rank: int, spec: dict[str, Any], fds: list[int], environment: Mapping[str, str]
    ) -> None:
        before: list[str] = []
        if self._link:
            before = self._link.enter(rank)
            environment = {"GLOO_SOCKET_IFNAME": INTERFACE} | dict(environment)
        # A socket pair, which `ip netns exec` passes on, and which ends when either side dies.
        ours, theirs = socket.socketpair()
        with theirs, self._log(rank).open("wb") as log:
            process = subprocess.Popen(
                [*before, *PYTHON, WORKER, str(theirs.fileno()), json.dumps(spec)],
                pass_fds=[theirs.fileno(), *fds],
                stdin=subprocess.DEVNULL,
                stdout=log,  # a pipe that nobody reads would block a rank that writes much
                stderr=subprocess.STDOUT,
                cwd=self._folder.name,  # files that libraries write there go with it
                env=_environment(self.setting) | environment,
            )
        self._processes.append(process)
        self._ranks.append(Connection(ours.detach()))

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.log"

    def _ask(self, **message: Any) -> None:
        for rank in self._ranks:
            # If the rank has died, `_answer` reports its output.
            with contextlib.suppress(ConnectionError):
                rank.send(message)

    def _answers(self, meanwhile: Callable[[], None] | None = None) -> list[dict[str, Any]]:
        """Return one message from every rank, in rank order."""
        begun = time.monotonic()
        deadline = min(begun + self._limit, self._until)
        answers: dict[int, dict[str, Any]] = {}
        waiting = {connection: rank for rank, connection in enumerate(self._ranks)}
        while waiting:
            if meanwhile is not None:
                meanwhile()
            pause = SAMPLE_EVERY if meanwhile else deadline - time.monotonic()
            # wait() refuses an infinite timeout.
            pause = None if pause == math.inf else max(pause, 0)
            for connection in wait(list(waiting), pause):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                answers[rank] = self._answer(rank, connection)
            if waiting and time.monotonic() > deadline:
                waited = time.monotonic() - begun
                late = sorted(waiting.values())
                raise TooLate(f"rank(s) {late} gave no answer in {waited:.0f} s")
        return [answers[rank] for rank in range(self.size)]

    def _answer(self, rank: int, connection: Connection) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = connection.recv()
        except (EOFError, ConnectionError):
            written = self._log(rank).read_text(errors="replace").splitlines()[-LOG_LINES:]
            if self._processes[rank].wait() == -signal.SIGKILL:
                raise DoesNotFit(
                    f"rank {rank} was killed, as the system does for the host's memory"
                ) from None
            raise CrewFailed("\n".join([f"rank {rank} died; it wrote:", *written])) from None
        if "missing" in answer:
            raise NotInstalled(answer["missing"])
        if "full" in answer:
            raise DoesNotFit(answer["full"].rstrip().splitlines()[-1])
        if "error" in answer:
            raise CrewFailed(f"rank {rank}: {answer['error'].rstrip()}")
        return answer


def _environment(setting: Setting) -> dict[str, str]:
    """Return the variables of a rank: its threads, the loopback, and none of the caller's settings
    of Shardwise, which would change only our rows. Ranks on the CPU see no GPU."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHARDWISE_")}
    kept |= {
        "OMP_NUM_THREADS": str(setting.threads),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }
    if setting.device == "cpu":
        kept |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return kept
