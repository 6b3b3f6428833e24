"""The ranks that this process starts on its own host: from their start to their ends."""

import os
import selectors
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from shardwise.launch import environment, error_file, failure_report, progress, resources
from shardwise.launch.error_file import ErrorReport
from shardwise.launch.failure_report import ExitStatus
from shardwise.launch.identity import Identity
from shardwise.launch.orphan_reaper import OrphanReaper
from shardwise.launch.progress import Progress
from shardwise.launch.restarts import SAVED
from shardwise.launch.worker import OutputSource, Worker, WorkerStreams

Hear = Callable[[int, int, bytes], None]
"""Takes a rank, a stream, and what has come on it; b"" ends the stream."""


@dataclass(frozen=True, kw_only=True)
class HostTask:
    """What one host is to run; plain values, so that it travels as JSON.

    `count` of `size` ranks, from `first` on, run `command` with the settings in `flags`. Rank 0
    listens on `port` of `address`; `master_port` there is free for torch's own rendezvous.
    `interface` leads to the other hosts, None on one host.
    `passed` are variables that the ranks get on top of this host's own, `run` is the name that all
    starts of the run share, `secret` what only its processes know. `outlet` is rank 0's; the others
    have pipes where it has.
    """

    command: tuple[str, ...]
    flags: Mapping[str, str]
    size: int
    first: int
    count: int
    address: str
    port: int
    master_port: int
    interface: str | None = None
    passed: Mapping[str, str] = field(default_factory=dict)
    run: str = ""
    secret: str = field(default="", repr=False)
    outlet: WorkerStreams


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """That a rank has ended, `how` in words, the report that it left, if any, and what it had told
    of its progress."""

    end: ExitStatus
    how: str
    report: ErrorReport | None
    progress: Progress | None

    @property
    def saved(self) -> bool:
        """Whether it ended because it was asked to, when it had saved."""
        return self.end.code == SAVED and self.progress is not None and self.progress.ended


class LocalWorkers:
    """The ranks of `task`, as processes of this host; their reports lie in `folder`.

    `left` is told of each that ended, `saves` of the signal to end before which one saves.
    """

    def __init__(
        self,
        task: HostTask,
        folder: Path,
        warden: OrphanReaper,
        selector: selectors.BaseSelector,
        hear: Hear,
        left: Callable[[RankExit], None],
        saves: Callable[[signal.Signals], None],
    ) -> None:
        self._task = task
        self._folder = folder
        self._warden = warden
        self._selector = selector
        self._hear = hear
        self._left = left
        self._saves = saves
        self._children: list[Worker] = []
        self._stopping = False
        self._memory = resources.host_memory()

    def start(self, listener: socket.socket | None) -> None:
        """Start all ranks; rank 0 inherits the socket that listens. Raises LaunchError."""
        for local_rank in range(self._task.count):
            rank = self._task.first + local_rank
            fds = [listener.fileno()] if listener is not None and rank == 0 else []
            child = Worker(rank, partial(self._hear, rank))
            outlet = (
                self._task.outlet if rank == 0 else WorkerStreams(piped=self._task.outlet.piped)
            )
            environ = self._environment(local_rank, fds[0] if fds else None)
            child.start(self._task.command, environ, fds, outlet)
            self._warden.started(child.group)
            self._children.append(child)
        self.listen()

    def listen(self) -> None:
        """Take what the ranks write, as it comes."""
        for source in self._open():
            with suppress(KeyError):  # it is listened to already
                self._selector.register(
                    source.fd, selectors.EVENT_READ, partial(self._relay, source)
                )

    def pause(self) -> None:
        """Leave what the ranks write where it is, for now."""
        for source in self._open():
            self._ignore(source)

    def reap(self) -> None:
        """Tell of those that have ended since, when what they wrote has been passed on."""
        for child in self._children:
            if child.end is None and child.reap(stopped=self._stopping):
                for source in child.sources:
                    self._ignore(source)
                    source.drain()
                self._left(self._departure(child))

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all that is left of the ranks; SIGTERM also ends who would save."""
        self._stopping = True
        for child in self._children:
            if not child.is_gone():
                child.send(number)
                if number == signal.SIGTERM and self._heeds(child):
                    child.send_alone(signal.SIGKILL)

    def ask(self, number: signal.Signals) -> None:
        """Pass on that someone wants the ranks to end: to those that save first alone, so that
        their DataLoader workers go on, and to all that is left of the others."""
        saving = [child for child in self._children if child.end is None and self._heeds(child)]
        for child in self._children:
            if child in saving:
                child.send_alone(number)
            elif not child.is_gone():
                child.send(number)
        if saving:
            self._saves(number)

    def resize(self, window: tuple[int, int]) -> None:
        """Tell ranks that draw live the new rows and columns of the terminal."""
        for child in self._children:
            child.resize(window)

    def release(self) -> None:
        """Tell the warden of those that left nothing behind."""
        for child in self._children:
            if child.is_gone():
                self._warden.ended(child.group)

    def _environment(self, local_rank: int, listen_fd: int | None) -> dict[str, str]:
        task = self._task
        identity = Identity(
            launcher="shardwise run",
            rank=task.first + local_rank,
            size=task.size,
            local_rank=local_rank,
            local_size=task.count,
            address=task.address,
            port=task.port,
            listen_fd=listen_fd,
        )
        window = task.outlet.window
        return environment.of_rank(
            {**os.environ, **task.passed},
            identity,
            flags=task.flags,
            reports=self._folder,
            cores=resources.usable_cores(),
            columns=window[1] if window else None,
            interface=task.interface,
            run=task.run,
            secret=task.secret,
            master_port=task.master_port,
        )

    def _relay(self, source: OutputSource) -> None:
        if source.open and not source.read():
            source.open = False
            self._ignore(source)

    def _ignore(self, source: OutputSource) -> None:
        with suppress(KeyError):  # it has ended before
            self._selector.unregister(source.fd)

    def _open(self) -> list[OutputSource]:
        return [source for child in self._children for source in child.sources if source.open]

    def _heeds(self, child: Worker) -> bool:
        told = progress.read(self._folder, child.rank)
        return told is not None and told.saves_when_asked

    def _departure(self, child: Worker) -> RankExit:
        assert child.end is not None
        now = resources.host_memory()
        how = failure_report.described_exit(
            child.end.code, before=self._memory, now=now, peak=child.peak
        )
        return RankExit(
            end=child.end,
            how=how,
            report=error_file.read(self._folder).get(child.rank),
            progress=progress.read(self._folder, child.rank),
        )
