"""Starts the ranks of this host, passes on what they write, and reports how they end."""

import os
import selectors
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from shardwise.launch import failure_report, resources
from shardwise.launch.failure_report import ExitStatus
from shardwise.launch.orphan_reaper import OrphanReaper
from shardwise.launch.worker import Begin, OutputSource, Worker, WorkerStreams, program
from shardwise.net import environment, error_file, progress
from shardwise.net.error_file import ErrorReport
from shardwise.net.identity import Identity
from shardwise.net.progress import Progress
from shardwise.net.restarts import SAVED

Hear = Callable[[int, int, bytes], None]
"""Takes a rank, a stream, and what has come on it; b"" ends the stream."""


@dataclass(frozen=True, kw_only=True)
class HostTask:
    """What one host is to run, in plain values: it travels as JSON.

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
    """The end of a rank: `how` in words, its error report, if any, and its last progress; `alone`
    says that it has left no process behind."""

    end: ExitStatus
    how: str
    report: ErrorReport | None
    progress: Progress | None
    alone: bool

    @property
    def saved(self) -> bool:
        """Whether it ended because it was asked to, when it had saved."""
        return self.end.code == SAVED and self.progress is not None and self.progress.ended


class LocalWorkers:
    """The ranks of `task`, as processes of this host; their error files lie in `folder`.

    `left` is called with each that ended, `saves` with the signal to end before which one saves.
    `begin` starts a process of another kind than the command of `task`.
    """

    def __init__(
        self,
        task: HostTask,
        folder: Path,
        reaper: OrphanReaper,
        selector: selectors.BaseSelector,
        hear: Hear,
        left: Callable[[RankExit], None],
        saves: Callable[[signal.Signals], None],
        begin: Begin | None = None,
    ) -> None:
        self._task = task
        self._begin = begin or program(task.command)
        self._folder = folder
        self._reaper = reaper
        self._selector = selector
        self._hear = hear
        self._left = left
        self._saves = saves
        self._workers: list[Worker] = []
        self._watched_over: list[Worker] = []
        """Those of which the orphan reaper knows."""
        self._stopping = False
        self._memory = resources.host_memory()

    def start(self, listener: socket.socket | None) -> None:
        """Start all ranks; rank 0 inherits the socket that listens. Raises LaunchError."""
        for local_rank in range(self._task.count):
            rank = self._task.first + local_rank
            fds = [listener.fileno()] if listener is not None and rank == self._meets_at else []
            worker = Worker(rank, partial(self._hear, rank))
            outlet = (
                self._task.outlet if rank == 0 else WorkerStreams(piped=self._task.outlet.piped)
            )
            environ = self._environment(local_rank, fds[0] if fds else None)
            self._start(worker, environ, fds, outlet)
            self._reaper.started(worker.group)
            self._workers.append(worker)
            self._watched_over.append(worker)
        self.listen()

    @property
    def _meets_at(self) -> int:
        """The rank to which the others come."""
        return 0

    def _start(
        self, worker: Worker, environ: dict[str, str], fds: list[int], outlet: WorkerStreams
    ) -> None:
        worker.start(self._begin, environ, fds, outlet)

    def listen(self) -> None:
        """Pass on what the ranks write, as it comes."""
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
        """Report the ranks that have ended since, once what they wrote has been passed on."""
        for worker in self._workers:
            if worker.end is None and worker.reap(stopped=self._stopping):
                for source in worker.sources:
                    self._ignore(source)
                    source.drain()
                self._left(self._rank_exit(worker))

    def ended_well(self, rank: int) -> None:
        """Let the ranks here know that `rank`, of any host, ended with code 0: they may wait for
        it."""
        progress.mark_ended_early(self._folder, rank)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to all that is left of the ranks; SIGTERM also ends who would save."""
        self._stopping = True
        for worker in self._workers:
            worker.send_signal(number)
            if number == signal.SIGTERM and self._saves_first(worker):
                worker.send_to_process(signal.SIGKILL)

    def ask_to_end(self, number: signal.Signals) -> None:
        """Pass on that someone wants the ranks to end.

        To those that save first alone, so that their DataLoader workers go on; to the whole process
        groups of the others.
        """
        saving = [
            worker for worker in self._workers if worker.end is None and self._saves_first(worker)
        ]
        for worker in self._workers:
            if worker in saving:
                worker.send_to_process(number)
            else:
                worker.send_signal(number)
        if saving:
            self._saves(number)

    def resize(self, window: tuple[int, int]) -> None:
        """Pass on the new rows and columns of the terminal to ranks that draw live."""
        for worker in self._workers:
            worker.resize(window)

    def release(self) -> bool:
        """Let the orphan reaper forget those that left no process behind; whether that is all."""
        for worker in [each for each in self._watched_over if each.is_gone()]:
            self._reaper.ended(worker.group)
            self._watched_over.remove(worker)
        return not self._watched_over

    def _environment(self, local_rank: int, listen_fd: int | None) -> dict[str, str]:
        task = self._task
        window = task.outlet.window
        return environment.of_rank(
            {**os.environ, **task.passed},
            self._identity(local_rank, listen_fd),
            flags=task.flags,
            reports=self._folder,
            cores=resources.usable_cores(),
            columns=window[1] if window else None,
            interface=task.interface,
            run=task.run,
            secret=task.secret,
            master_port=task.master_port,
        )

    def _identity(self, local_rank: int, listen_fd: int | None) -> Identity:
        task = self._task
        return Identity(
            launcher="shardwise run",
            rank=task.first + local_rank,
            size=task.size,
            local_rank=local_rank,
            local_size=task.count,
            address=task.address,
            port=task.port,
            listen_fd=listen_fd,
        )

    def _relay(self, source: OutputSource) -> None:
        if source.open and not source.read():
            source.open = False
            self._ignore(source)

    def _ignore(self, source: OutputSource) -> None:
        with suppress(KeyError):  # it has ended before
            self._selector.unregister(source.fd)

    def _open(self) -> list[OutputSource]:
        return [source for worker in self._workers for source in worker.sources if source.open]

    def _saves_first(self, worker: Worker) -> bool:
        found = progress.read(self._folder, worker.rank)
        return found is not None and found.saves_when_asked

    def _rank_exit(self, worker: Worker) -> RankExit:
        assert worker.end is not None
        now = resources.host_memory()
        how = failure_report.described_exit(
            worker.end.code, before=self._memory, now=now, peak=worker.peak
        )
        return RankExit(
            end=worker.end,
            how=how,
            report=error_file.read(self._folder).get(worker.rank),
            progress=progress.read(self._folder, worker.rank),
            alone=worker.is_gone(),
        )
