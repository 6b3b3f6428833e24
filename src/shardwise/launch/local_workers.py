"""Starts the ranks of this host, forwards their output, and reports their ends."""

import os
import selectors
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardwise.launch import failure_report, resources
from shardwise.launch.failure_report import ExitStatus
from shardwise.launch.orphan_reaper import OrphanReaper
from shardwise.launch.run_spec import Meeting, RunSpec, rank_environment
from shardwise.launch.worker import Begin, OutputSource, Worker, WorkerStreams
from shardwise.net import error_file, progress
from shardwise.net.error_file import ErrorReport
from shardwise.net.identity import Identity
from shardwise.net.progress import Progress
from shardwise.net.restarts import SAVED

Hear = Callable[[int, int, bytes], None]
"""Takes a rank, the number of a stream, and new bytes of it; b"" ends the stream."""


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """The end of a rank.

    Args:
        end: The exit status.
        how: The exit status in words.
        report: The error report of the rank, if it wrote one.
        progress: The last progress of the rank, if it recorded any.
        alone: The rank has left no process behind.
    """

    end: ExitStatus
    how: str
    report: ErrorReport | None
    progress: Progress | None
    alone: bool

    @property
    def saved(self) -> bool:
        """Whether the rank ended because it was asked to, after a save."""
        return self.end.code == SAVED and self.progress is not None and self.progress.ended


class LocalWorkers:
    """The ranks of `spec.share`, as processes of this host.

    Args:
        spec: The run.
        meeting: The place of its rendezvous.
        streams: The standard streams of rank 0; other ranks have pipes.
        begin: Starts a process.
        folder: The folder for error files of the ranks.
        reaper: Ends the ranks if this process is killed.
        selector: The selector of the event loop.
        hear: Called with output of ranks.
        left: Called with the end of each rank.
        saves: Called with the signal when a rank saves before it ends.
    """

    def __init__(
        self,
        spec: RunSpec,
        meeting: Meeting,
        streams: WorkerStreams,
        begin: Begin,
        folder: Path,
        reaper: OrphanReaper,
        selector: selectors.BaseSelector,
        hear: Hear,
        left: Callable[[RankExit], None],
        saves: Callable[[signal.Signals], None],
    ) -> None:
        self._spec, self._meeting, self._streams = spec, meeting, streams
        self._begin = begin
        self._folder = folder
        self._reaper = reaper
        self._selector = selector
        self._hear = hear
        self._left = left
        self._saves = saves
        self._workers: list[Worker] = []
        self._watched_over: list[Worker] = []
        """Workers that the orphan reaper knows."""
        self._stopping = False
        self._memory = resources.host_memory()

    def start(self, listener: socket.socket | None) -> None:
        """Start all ranks. Rank 0 inherits `listener`. Raises LaunchError."""
        columns = self._streams.window[1] if self._streams.window else None
        for local_rank, rank in enumerate(self._spec.share.numbers):
            # Only the rank that listens inherits the socket, so that the port closes when it ends.
            fds = [listener.fileno()] if listener is not None and rank == self._meets_at else []
            worker = Worker(rank, partial(self._hear, rank))
            environ = rank_environment(
                self._spec,
                self._identity(local_rank, fds[0] if fds else None),
                self._meeting,
                os.environ,
                reports=self._folder,
                cores=resources.usable_cores(),
                columns=columns,
            )
            piped = WorkerStreams(piped=self._streams.piped)
            self._start(worker, environ, fds, self._streams if rank == 0 else piped)
            # After each start rather than after all: the launcher may be killed in between.
            self._reaper.started(worker.group)
            self._workers.append(worker)
            self._watched_over.append(worker)
        self.listen()

    @property
    def _meets_at(self) -> int:
        """The rank that the others connect to."""
        return 0

    def _start(
        self, worker: Worker, environ: dict[str, str], fds: list[int], outlet: WorkerStreams
    ) -> None:
        worker.start(self._begin, environ, fds, outlet)

    def listen(self) -> None:
        """Forward the output of ranks as they write it."""
        for source in self._open():
            with suppress(KeyError):  # it is registered already
                self._selector.register(
                    source.fd, selectors.EVENT_READ, partial(self._relay, source)
                )

    def pause(self) -> None:
        """Stop reading the output of ranks, so that ranks block when their pipes are full."""
        for source in self._open():
            self._ignore(source)

    def reap(self) -> None:
        """Report the ranks that have ended."""
        for worker in self._workers:
            if worker.end is None and worker.reap(stopped=self._stopping):
                # Read the output first: the report about a rank needs the last lines that it wrote.
                for source in worker.sources:
                    self._ignore(source)
                    source.drain()
                self._left(self._rank_exit(worker))

    def ended_well(self, rank: int) -> None:
        """Tell the ranks here, which may wait for `rank`, that it ended with code 0."""
        progress.mark_ended_early(self._folder, rank)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process groups of all ranks."""
        self._stopping = True
        for worker in self._workers:
            worker.send_signal(number)
            # A rank that saves when it is asked to end would start to save on SIGTERM. But the run
            # has failed, and the save would wait for ranks that are gone.
            if number == signal.SIGTERM and self._saves_first(worker):
                worker.send_to_process(signal.SIGKILL)

    def ask_to_end(self, number: signal.Signals) -> None:
        """Ask the ranks to end because the run was asked to. Ranks that save do so first."""
        saving = [
            worker for worker in self._workers if worker.end is None and self._saves_first(worker)
        ]
        for worker in self._workers:
            # Not the whole group of a rank that saves: it still needs its DataLoader workers.
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
        """Make the orphan reaper forget workers without any process. Return whether all are gone.

        The system may give the number of an empty process group to other processes.
        """
        for worker in [each for each in self._watched_over if each.is_gone()]:
            self._reaper.ended(worker.group)
            self._watched_over.remove(worker)
        return not self._watched_over

    def _identity(self, local_rank: int, listen_fd: int | None) -> Identity:
        share = self._spec.share
        return Identity(
            launcher="shardwise run",
            rank=share.first + local_rank,
            size=self._spec.size,
            local_rank=local_rank,
            local_size=share.count,
            address=self._meeting.address,
            port=self._meeting.port,
            listen_fd=listen_fd,
        )

    def _relay(self, source: OutputSource) -> None:
        if source.open and not source.read():
            source.open = False
            self._ignore(source)

    def _ignore(self, source: OutputSource) -> None:
        with suppress(KeyError):  # it is not registered any more
            self._selector.unregister(source.fd)

    def _open(self) -> list[OutputSource]:
        return [source for worker in self._workers for source in worker.sources if source.open]

    def _saves_first(self, worker: Worker) -> bool:
        found = progress.read(self._folder, worker.rank)
        return found is not None and found.saves_when_asked

    def _rank_exit(self, worker: Worker) -> RankExit:
        assert worker.end is not None
        now = resources.host_memory()
        how = failure_report.describe_exit(
            worker.end.code, before=self._memory, now=now, peak=worker.peak
        )
        return RankExit(
            end=worker.end,
            how=how,
            report=error_file.read(self._folder).get(worker.rank),
            progress=progress.read(self._folder, worker.rank),
            alone=worker.is_gone(),
        )
