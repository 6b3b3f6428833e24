"""Real ranks for tests: one warm group per world size and settings for the whole session.

    def rows(world, total):
        return world.share(torch.arange(total)).tolist()

    def test_rows(group):
        assert group(2)(rows, 5) == [[0, 1], [2, 3, 4]]

Importing torch takes seconds of CPU time, and the first optimizer imports its compiler, which takes
as long again. So one process (multiprocessing's forkserver) does both, and the ranks are forked
from it. A group is started by the first case that needs it and serves all later cases of that size.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from typing import IO, Any

from shardwise.net import environment
from shardwise.net.identity import Identity
from tests.distributed import worker
from tests.distributed.worker import Outcome

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.distributed.warm"])

Main = Callable[[Connection, int, Mapping[str, str], dict[str, Any]], None]

PR_SET_PDEATHSIG = 1

START_LIMIT = 120.0
MOST_RANKS = 60
"""Ranks that are kept for later cases. An idle rank occupies about 70 MB."""
GRACE = 1.0
"""Seconds that ranks may take to fail like the first.

After that the first rank is stopped, so that the others lose a peer.
"""


class RankFailed(AssertionError):
    """A case failed. The message contains the tracebacks, the primary one last."""


class RankLate(RankFailed):
    """A case took longer than its limit. The message contains the stacks."""


class Groups:
    """`groups(size)` returns the group of that size.

    `settings` are passed to its `shardwise.init`. Only the ranks of the group that was used last
    run, the others are stopped: Gloo has a thread for each process group, which wakes up a hundred
    times a second, and the threads of 200 idle ranks take a third of a core.
    """

    def __init__(self, origin: "Origin | None" = None) -> None:
        self._groups: dict[tuple[int, str], Group] = {}
        self._origin = origin or Origin()
        self._awake: Group | None = None

    def __call__(self, size: int, **settings: Any) -> "Group":
        key = size, json.dumps(settings, sort_keys=True)
        # Most recently used last.
        self._groups[key] = self._groups.pop(key, None) or Group(
            size, settings, self._origin, self._wake
        )
        self._close_idle(keep=self._groups[key])
        return self._groups[key]

    def _close_idle(self, keep: "Group") -> None:
        """Close the least recently used groups beyond MOST_RANKS. They start again when needed."""
        others = [group for group in self._groups.values() if group.is_running and group != keep]
        ranks = keep.size + sum(group.size for group in others)
        for group in others:
            if ranks > MOST_RANKS:
                group.close()
                ranks -= group.size

    def _wake(self, group: "Group") -> None:
        """Let the ranks of `group` run, and stop those of the group that was used before."""
        if group is not self._awake:
            if self._awake is not None:
                self._awake.send_signal(signal.SIGSTOP)
            group.send_signal(signal.SIGCONT)
            self._awake = group

    def close(self) -> None:
        """Stop every group and release its resources."""
        for group in self._groups.values():
            group.end()
        for group in self._groups.values():
            group.close()


@dataclass(frozen=True)
class Origin:
    """How the process of a rank is created, and the function that it runs."""

    context: Any = FORKED
    main: Main = worker.main


class Group:
    """`size` ranks, started at first use and restarted after a case that broke them."""

    def __init__(
        self,
        size: int,
        settings: Mapping[str, Any],
        origin: Origin,
        wake: "Callable[[Group], None]",
    ) -> None:
        self.size = size
        self._settings = dict(settings)
        self._origin = origin
        self._wake = wake
        self._ranks: list[_Rank] = []

    @property
    def is_running(self) -> bool:
        """True if the ranks have been started."""
        return bool(self._ranks)

    def __call__(self, function: Callable[..., Any], *args: Any, limit: float = 60) -> list[Any]:
        """Run `function(world, *args)` on every rank, and return the results by rank.

        `function` must be at the top level of a test module; `args` and results must be picklable.
        Raises RankFailed if any rank raises, or if `limit` seconds have passed.
        """
        __tracebackhide__ = True
        outcomes = self.outcomes(function, *args, limit=limit)
        if any(outcome.error for outcome in outcomes):
            raise RankFailed(story(function, outcomes))
        return [pickle.loads(outcome.result) for outcome in outcomes]

    def errors(
        self, function: Callable[..., Any], *args: Any, limit: float = 60
    ) -> list[tuple[str, str] | None]:
        """Run a case, but return each rank's (type name, message), or None if it raised nothing."""
        __tracebackhide__ = True
        return [outcome.error for outcome in self.outcomes(function, *args, limit=limit)]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, limit: float = 60
    ) -> list[Outcome]:
        """Run a case, but return each rank's outcome, including errors.

        Raises RankLate if `limit` seconds have passed.
        """
        __tracebackhide__ = True
        self._wake(self)
        if not self._ranks:
            self._start()
        case = pickle.dumps((function, args))
        for rank in self._ranks:
            rank.tell("run", case)
        outcomes = self._collect(limit)
        late = [number for number in range(self.size) if number not in outcomes]
        if late:
            stacks = self._stacks(late)
            self._kill()
            told = [outcomes[number] for number in sorted(outcomes)]
            raise RankLate(
                f"{function.__name__} took more than {limit} s on rank(s) {late}.\n"
                f"{story(function, told)}\n{stacks}"
            )
        if any(outcome.error for outcome in outcomes.values()) and not self._in_step(outcomes):
            self._kill()
        return [outcomes[number] for number in range(self.size)]

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the ranks that are alive."""
        for rank in self._ranks:
            # A rank that was killed is reaped by the fork server, maybe before this.
            with contextlib.suppress(ProcessLookupError):
                if rank.process.is_alive():
                    os.kill(rank.process.pid, number)

    def end(self) -> None:
        """Ask the ranks to exit once they are idle."""
        self.send_signal(signal.SIGCONT)
        for rank in self._ranks:
            rank.tell("end")

    def close(self) -> None:
        """Stop the ranks: ask idle ones to exit, and kill the rest."""
        self.end()
        for rank in self._ranks:
            rank.reap()
        self._ranks = []

    def _start(self) -> None:
        known = environment.draw_secret()
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
            self._ranks = [
                _Rank(rank, self.size, listener, known, self._settings, self._origin)
                for rank in range(self.size)
            ]
        try:
            for rank in self._ranks:
                if not rank.connection.poll(START_LIMIT):
                    raise RankFailed(f"Rank {rank.number} did not start.\n{rank.output()}")
                rank.connection.recv()
        except (OSError, EOFError) as error:
            said = "\n".join(rank.output() for rank in self._ranks)
            self._kill()
            raise RankFailed(f"A group of {self.size} could not start.\n{said}") from error

    def _collect(self, limit: float) -> dict[int, Outcome]:
        """Return the outcomes that arrive within `limit` seconds, by rank.

        A rank that failed is stopped if the others do not fail soon too, so that they lose a peer,
        as in a real run.
        """
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + limit
        impatient = None
        while len(outcomes) < self.size and (left := deadline - time.monotonic()) > 0:
            pending = [rank for rank in self._ranks if rank.number not in outcomes]
            # Also on the processes: after a rank has died, a child of it may hold the connection.
            awaited: list[Any] = [rank.connection for rank in pending]
            awaited += [rank.process.sentinel for rank in pending]
            ready = wait(awaited, min(left, 0.2))
            for rank in pending:
                if rank.connection in ready or rank.process.sentinel in ready:
                    outcomes[rank.number] = rank.outcome()
            failed = [number for number, outcome in outcomes.items() if outcome.error]
            if failed and impatient is None:
                impatient = time.monotonic() + GRACE
            if impatient and time.monotonic() > impatient:
                for number in failed:
                    self._ranks[number].process.kill()
        return outcomes

    def _in_step(self, outcomes: Mapping[int, Outcome]) -> bool:
        """Return whether the ranks can run another case after some of them raised."""
        if any(outcome.secondary for outcome in outcomes.values()):
            return False
        if len({outcome.calls for outcome in outcomes.values()}) > 1:
            return False
        try:
            for rank in self._ranks:
                rank.tell("sync")
            return all(rank.connection.poll(5) and rank.connection.recv() for rank in self._ranks)
        except (OSError, EOFError):
            return False

    def _stacks(self, numbers: list[int]) -> str:
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):  # it has died since
                os.kill(self._ranks[number].process.pid, signal.SIGUSR2)
        time.sleep(0.5)
        return "\n".join(self._ranks[number].output() for number in numbers)

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        self.close()


class _Rank:
    """One process of a group, the connection to it, and its output."""

    def __init__(
        self,
        number: int,
        size: int,
        listener: socket.socket,
        known: str,
        settings: dict[str, Any],
        origin: Origin,
    ) -> None:
        self.number = number
        self.printed: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in reap)
        self.connection, theirs = origin.context.Pipe()
        identity = Identity(
            launcher="shardwise run",
            rank=number,
            size=size,
            local_rank=number,
            local_size=size,
            address="127.0.0.1",
            port=listener.getsockname()[1],
        )
        inherited = _Descriptor(listener) if number == 0 else None
        self.process = origin.context.Process(
            target=_be,
            args=(
                origin.main,
                theirs,
                _Descriptor(self.printed),
                inherited,
                identity,
                session_environment() | {environment.RUN_SECRET_VARIABLE: known},
                settings,
            ),
        )
        with _one_thread():
            self.process.start()
        theirs.close()

    def outcome(self) -> Outcome:
        """Return this rank's outcome, or an error if the process has exited."""
        try:
            if not self.connection.poll():
                raise EOFError
            said = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            text = f"rank {self.number} ended with exit code {code}\n{self.output()}"
            return Outcome(error=("Died", f"exit code {code}"), trace=text, calls=-1)
        assert isinstance(said, Outcome)
        return said

    def output(self) -> str:
        """Return everything that this rank has printed."""
        self.printed.seek(0)
        text = self.printed.read().decode(errors="replace")
        return f"--- printed by rank {self.number} ---\n{text[-20000:]}"

    def tell(self, *message: Any) -> None:
        """Send a message. If the rank has exited, that shows when its outcome is read."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def reap(self) -> None:
        """Wait until the process exits, and kill it if it does not."""
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()
        self.printed.close()


class _Descriptor:
    """An open file, which is sent to the forked process as a duplicated descriptor."""

    def __init__(self, file: IO[bytes] | socket.socket) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _detached, (DupFd(self._file.fileno()),)


def _detached(copy: Any) -> int:
    return copy.detach()


def _be(
    main: Main,
    connection: Connection,
    printed: int,
    listen_fd: int | None,
    identity: Identity,
    environ: dict[str, str],
    settings: dict[str, Any],
) -> None:
    """Run in the forked process: become the rank."""
    if sys.platform == "linux":  # a stopped rank would not notice that the session has ended
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    told = environment.identity_variables(replace(identity, listen_fd=listen_fd))
    main(connection, printed, environ | told, settings)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Start the process that ranks are forked from, which must have no threads."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def session_environment() -> dict[str, str]:
    """Return the session's environment without the variables that define a rank or a test."""
    strange = ("SHARDWISE_", "PYTEST_")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(strange) and name not in names
    }
    return kept | {"OMP_NUM_THREADS": "1"}


def story(function: Callable[..., Any], outcomes: list[Outcome]) -> str:
    """Return the tracebacks of all ranks that raised, with the likely cause last."""
    failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.error]
    failed.sort(key=lambda pair: (not pair[1].secondary, -pair[0]))
    parts = [f"=== rank {rank} of {len(outcomes)} ===\n{outcome.trace}" for rank, outcome in failed]
    return f"{function.__name__} failed.\n" + "\n".join(parts)
