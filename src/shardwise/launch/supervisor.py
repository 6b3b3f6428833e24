"""Starts the ranks of one host, watches over them, and ends them together.

    start -> [ output | end of a rank | Ctrl-C | time to send a signal ] ... -> closing words

Everything happens in one thread that sleeps until one of these comes. When a rank fails, the
others get a moment to fail too, so that the first cause can be told from its consequences; then
they are ended. Process groups that outlive all this are the warden's.
"""

import os
import selectors
import signal
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardwise.launch import cause, closing, environment, rendezvous, report, verdict
from shardwise.launch.child import Child, Source
from shardwise.launch.console import Console
from shardwise.launch.identity import Identity
from shardwise.launch.signals import Plan, Signals
from shardwise.launch.warden import Warden

HERE = "127.0.0.1"
SETTLE = 0.4
"""Seconds after the first failure in which others may tell that they failed too."""

UNEXPLAINED = 3.0
"""The same while every failed rank has only lost another one, which must be about to end."""

LAST_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL for a rank that did not heed SIGINT."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run on this host: `size` times `command`, with the settings in `flags`.

    `port` 0 lets the kernel choose. `grace` is the seconds between asking and killing.
    """

    command: tuple[str, ...]
    size: int
    flags: Mapping[str, str]
    port: int = 0
    grace: float = 5.0


def run(job: Job) -> int:
    """Run `job` to its end and return the exit code. Raises LaunchError when it cannot start."""
    with rendezvous.listen(HERE, job.port) as meeting:
        folder = Path(tempfile.mkdtemp(prefix="shardwise-"))
        with Warden(folder) as warden, Signals() as signals:
            supervisor = Supervisor(job, folder, warden, signals)
            supervisor.start(meeting.fileno(), meeting.getsockname()[1])
            meeting.close()
            return supervisor.watch()


class Supervisor:
    """The ranks of one run, from their start to the closing words."""

    def __init__(self, job: Job, folder: Path, warden: Warden, signals: Signals) -> None:
        self._job = job
        self._folder = folder
        self._warden = warden
        self._signals = signals
        self._console = Console(job.size, os.environ)
        self._children: list[Child] = []
        self._plan = Plan()
        self._asked: signal.Signals | None = None
        self._stopping = False
        self._explained = False
        self._memory = cause.memory()
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.fd, selectors.EVENT_READ, self._on_signals)

    def start(self, listen_fd: int, port: int) -> None:
        """Start all ranks; rank 0 inherits the listening socket."""
        for rank in range(self._job.size):
            identity = Identity(
                launcher="shardwise run",
                rank=rank,
                size=self._job.size,
                local_rank=rank,
                local_size=self._job.size,
                address=HERE,
                port=port,
                listen_fd=listen_fd if rank == 0 else None,
            )
            child = Child(rank, self._console)
            passed = [listen_fd] if rank == 0 else []
            child.start(self._job.command, self._environment(identity), passed)
            self._warden.started(child.group)
            self._children.append(child)
            for source in child.sources:
                self._selector.register(
                    source.fd, selectors.EVENT_READ, partial(self._relay, source)
                )

    def watch(self) -> int:
        """Return the exit code of the run when all ranks have ended and the last word is said."""
        while any(child.end is None for child in self._children):
            for key, _ in self._selector.select(self._plan.wait()):
                key.data()
            for number in self._plan.due():
                self._send(number)
            if self._console.broken and self._asked is None:
                self._stop(signal.SIGPIPE)
        self._selector.close()
        self._console.close()
        return self._conclude()

    def _environment(self, identity: Identity) -> dict[str, str]:
        size = self._console.width()
        return environment.of_rank(
            os.environ,
            identity,
            flags=self._job.flags,
            reports=self._folder,
            cores=environment.usable_cores(),
            columns=size[1] if size else None,
        )

    def _relay(self, source: Source) -> None:
        if source.open and not source.read():
            self._selector.unregister(source.fd)

    def _on_signals(self) -> None:
        for number in self._signals.arrived():
            if number == signal.SIGCHLD:
                self._reap()
            elif number == signal.SIGWINCH:
                for child in self._children:
                    child.resize()
            else:
                self._stop(number)

    def _reap(self) -> None:
        for child in self._children:
            if child.end is None:
                self._reap_one(child)

    def _reap_one(self, child: Child) -> None:
        if not child.reap(stopped=self._stopping):
            return
        for source in child.sources:
            with suppress(KeyError):
                self._selector.unregister(source.fd)
            source.drain()
        if self._asked is None and not self._stopping:
            self._settle()

    def _settle(self) -> None:
        """Once a rank has failed, plan to end the others, soon after the cause has shown."""
        ends = self._ends()
        if all(end.code == 0 for end in ends):
            return
        explained = verdict.is_explained(ends, report.read(self._folder))
        if self._plan and explained == self._explained:
            return
        self._explained = explained
        wait = SETTLE if explained else UNEXPLAINED
        self._plan.make([(wait, signal.SIGTERM), (wait + self._job.grace, signal.SIGKILL)])

    def _stop(self, asked: signal.Signals) -> None:
        """Someone wants the run to end; a second time, at once."""
        grace = self._job.grace
        if self._asked is not None:
            self._plan.make([(0, signal.SIGKILL)])
        elif asked == signal.SIGINT:
            kill = (grace + LAST_GRACE, signal.SIGKILL)
            self._plan.make([(0, asked), (grace, signal.SIGTERM), kill])
            for child in self._children:
                child.hush()
        else:
            self._plan.make([(0, signal.SIGTERM), (grace, signal.SIGKILL)])
        words = closing.stopping(asked, self._job.size, again=self._asked is not None)
        self._asked = self._asked or asked
        self._console.err.lines(words.encode())

    def _send(self, number: signal.Signals) -> None:
        self._stopping = True
        for child in self._children:
            if not child.is_gone():
                child.send(number)

    def _conclude(self) -> int:
        for child in self._children:
            if child.is_gone():
                self._warden.ended(child.group)
        if self._asked is not None:
            return 128 + self._asked
        return self._speak()

    def _speak(self) -> int:
        """Say which rank failed and why, where one did; returns the exit code."""
        ends = self._ends()
        reports = report.read(self._folder)
        judged = verdict.judge(ends, reports)
        if judged is None:
            return 0
        shown = self._children[judged.rank if judged.waiting is None else judged.waiting]
        found = reports.get(shown.rank)
        trace = verdict.last_words(found.text if found else shown.tail.text())
        where = found.where if found else ""
        how = self._how(self._children[judged.rank])
        words = closing.words(judged, how, trace, size=self._job.size, where=where)
        self._console.err.lines(words.encode())
        return judged.exit_code

    def _ends(self) -> list[verdict.End]:
        return [child.end for child in self._children if child.end is not None]

    def _how(self, child: Child) -> str:
        assert child.end is not None
        now = cause.memory()
        return cause.of_exit(child.end.code, before=self._memory, now=now, peak=child.peak)
