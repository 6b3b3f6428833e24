"""Starts the ranks of this host, forwards their output, and reports when they exit."""

import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shardwise.launch import failure_report, resources
from shardwise.launch.failure_report import ExitStatus
from shardwise.launch.orphan_reaper import OrphanReaper
from shardwise.launch.run_spec import Meeting, RunSpec, rank_environment
from shardwise.launch.worker import Begin, OutputSource, Worker, WorkerStreams
from shardwise.net import environment, error_file, private_files, progress
from shardwise.net.error_file import ErrorReport
from shardwise.net.identity import Identity
from shardwise.net.progress import Progress, StopLimit
from shardwise.net.restarts import SAVED
from shardwise.watch import process_status
from shardwise.watch.process_status import STOPPED

LOOK = 1.0
"""Seconds between two checks for stopped ranks."""

Hear = Callable[[int, int, bytes], None]
"""Callback for output: called with the rank, the stream number, and new bytes (b"" at its end)."""


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """A report about a rank that has exited.

    Args:
        end: The exit status.
        how: The exit status in words.
        report: The rank's error report, or None if it wrote none.
        progress: The last progress that the rank recorded, or None.
        alone: True if the rank has not left any child process behind.
    """

    end: ExitStatus
    how: str
    report: ErrorReport | None
    progress: Progress | None
    alone: bool

    @property
    def saved(self) -> bool:
        """True if a signal asked the rank to stop, and it saved before it exited."""
        return self.end.code == SAVED and self.progress is not None and self.progress.ended


class LocalWorkers:
    """The ranks in `spec.share`, as processes on this host.

    Args:
        spec: The run.
        meeting: Address and ports of the rendezvous.
        streams: Rank 0's standard streams. Other ranks write to pipes.
        begin: Starts a process.
        folder: Folder for the ranks' error files.
        reaper: Kills the ranks if this process is killed.
        selector: Selector of the event loop.
        hear: Called with output from the ranks.
        left: Called when a rank has exited.
        saves: Called if a signal asks the ranks to stop and they save before they exit. Receives
            the signal.
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
        """Workers whose process groups are registered with the orphan reaper."""
        self._stopping = False
        self._look_at = time.monotonic()
        self._stopped_since: dict[StopLimit, float] = {}
        self._memory = resources.host_memory()

    def start(self, listener: socket.socket | None) -> None:
        """Start all ranks. Raises LaunchError if a rank cannot be started.

        Args:
            listener: Socket for the rendezvous, which rank 0 inherits, or None.
        """
        for local_rank, rank in enumerate(self._spec.share.numbers):
            # Only the listening rank inherits the socket, so that the port is closed when it exits.
            fds = [listener.fileno()] if listener is not None and rank == self._meets_at else []
            identity = self._identity(local_rank, fds[0] if fds else None)
            self._start_rank(rank, identity, fds, self._streams if rank == 0 else None)
        for rank in self._spec.share.spares:
            self.start_spare(rank)

    def start_spare(self, rank: int, *, grows: bool = False) -> None:
        """Start a spare, which waits until it can replace a lost rank.

        Args:
            rank: The spare's number in the run: a new one, or that of a lost rank.
            grows: True if the spare joins at once, as a further rank.
        """
        # A lost spare with this number may have joined before.
        progress.forget(self._folder, rank)
        # Spares have numbers after those of the ranks that start the run.
        size, share = max(self._spec.size + self._spec.spares, rank + 1), self._spec.share
        place, places = rank, size
        if share.count < self._spec.size:  # other hosts have ranks too
            place, places = share.every.index(rank), len(share.every)
        identity = replace(
            self._identity(0, None), rank=rank, size=size, local_rank=place, local_size=places
        )
        spare = environment.GROWS if grows else environment.REPLACES
        self._start_rank(rank, identity, [], None, spare=spare)

    def _start_rank(
        self,
        rank: int,
        identity: Identity,
        fds: list[int],
        streams: WorkerStreams | None,
        *,
        spare: str = "",
    ) -> None:
        """Start a rank, and forward its output. `streams` are those of rank 0."""
        worker = Worker(rank, partial(self._hear, rank))
        environ = rank_environment(
            self._spec,
            identity,
            self._meeting,
            os.environ,
            reports=self._folder,
            cores=resources.usable_cores(),
            columns=self._streams.window[1] if self._streams.window else None,
            spare=spare,
        )
        self._start(worker, environ, fds, streams or WorkerStreams(piped=self._streams.piped))
        # Register each rank immediately, because the launcher may be killed before the next.
        self._reaper.started(worker.group)
        self._workers.append(worker)
        self._watched_over.append(worker)
        self.listen()

    @property
    def _meets_at(self) -> int:
        """The rank that the other ranks connect to."""
        return 0

    def _start(
        self, worker: Worker, environ: dict[str, str], fds: list[int], outlet: WorkerStreams
    ) -> None:
        worker.start(self._begin, environ, fds, outlet)

    def listen(self) -> None:
        """Start forwarding the ranks' output."""
        for source in self._open():
            with suppress(KeyError):  # already registered
                self._selector.register(
                    source.fd, selectors.EVENT_READ, partial(self._relay, source)
                )

    def pause(self) -> None:
        """Stop reading the ranks' output. A rank then blocks once its pipe is full."""
        for source in self._open():
            self._ignore(source)

    def reap(self) -> None:
        """Report the ranks that have exited."""
        for worker in self._workers:
            if worker.end is None and worker.reap(stopped=self._stopping):
                # Read the remaining output first, because the report needs the rank's last lines.
                for source in worker.sources:
                    self._ignore(source)
                    source.drain()
                self._left(self._rank_exit(worker))

    def ended_well(self, rank: int) -> None:
        """Tell this host's ranks, which may be waiting for `rank`, that it exited with code 0."""
        progress.mark_ended_early(self._folder, rank)

    def mark_lost(self, ranks: Sequence[int]) -> None:
        """Tell this host's ranks that `ranks`, on any host, no longer exist."""
        progress.mark_lost(self._folder, ranks)

    def kill_stopped(self) -> float:
        """Kill each rank that is stopped (SIGSTOP) for longer than its limit (`--survive`).

        A stopped rank keeps its sockets open, so the other ranks would wait for it. If it resumed
        later, it would act on an outdated state.

        Returns the seconds until the next call.
        """
        now = time.monotonic()
        if now < self._look_at:
            return self._look_at - now
        if now > self._look_at + 2 * LOOK:  # this process was stopped too: begin to count again
            self._stopped_since.clear()
        self._look_at = now + LOOK
        running = (worker.rank for worker in self._workers if worker.end is None)
        limits = {rank: progress.read_stop_limit(self._folder, rank) for rank in running}
        stopped = [
            limit
            for limit in limits.values()
            if limit and process_status.process_state(limit.pid, limit.begun) == STOPPED
        ]
        self._stopped_since = {each: self._stopped_since.get(each, now) for each in stopped}
        for limit, since in self._stopped_since.items():
            if now - since > limit.seconds:
                with suppress(ProcessLookupError):
                    os.kill(limit.pid, signal.SIGKILL)
        return LOOK

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process groups of all ranks."""
        self._stopping = True
        for worker in self._workers:
            worker.send_signal(number)
            # Some ranks save on SIGTERM. But the run has failed, and a save would wait for ranks
            # that no longer exist, so kill these ranks at once.
            if number == signal.SIGTERM and self._saves_first(worker):
                worker.send_to_process(signal.SIGKILL)

    def clear_away(self, rank: int) -> None:
        """Kill the processes of `rank`, including those that it left behind.

        These are, for example, DataLoader workers.
        """
        for worker in self._workers:
            if worker.rank == rank:
                worker.send_signal(signal.SIGKILL)

    def has_joined(self, rank: int) -> bool:
        """Return whether `rank`, which started as a spare, has joined the other ranks."""
        found = progress.read(self._folder, rank)
        return found is not None and found.joined is not None

    def joined_spares(self) -> list[int]:
        """Return the spares of this host that have joined the other ranks."""
        return [rank for rank in self._spec.share.spares if self.has_joined(rank)]

    def members(self) -> tuple[int, str]:
        """Return the addresses that ranks of this host have published for spares.

        The first value is the generation of the group, or -1 if no rank of this host has published
        any addresses.
        """
        try:
            text = (self._folder / environment.MEMBERS_FILE).read_text()
        except FileNotFoundError:
            return -1, ""
        return int(json.loads(text)["generation"]), text

    def set_members(self, text: str) -> None:
        """Pass on the addresses from another host to the spares of this one."""
        # Not to the file that ranks of this host write, so that neither replaces a newer one.
        private_files.write(self._folder / environment.OTHER_MEMBERS_FILE, text)

    def have_met(self, ranks: Collection[int]) -> bool:
        """Return whether all `ranks`, on this host, have met all other ranks in `sw.init`."""
        # A rank records its progress once it has exchanged messages with every other rank.
        return all(progress.read(self._folder, rank) is not None for rank in ranks)

    def ask_to_end(self, number: signal.Signals) -> None:
        """Ask the ranks to stop by sending them signal `number`. Some save before they exit."""
        saving = [
            worker for worker in self._workers if worker.end is None and self._saves_first(worker)
        ]
        for worker in self._workers:
            # Signal only the process of a rank that saves, because it still needs its DataLoader
            # workers.
            if worker in saving:
                # With --survive, SIGTERM would only ask this rank to leave.
                all_save = self._spec.survives and number == signal.SIGTERM
                worker.send_to_process(signal.SIGUSR1 if all_save else number)
            else:
                worker.send_signal(number)
        if saving:
            self._saves(number)

    def ask_to_leave(self) -> None:
        """Ask the ranks to leave a run with --survive, which the others continue."""
        for worker in self._workers:
            if worker.end is None:
                worker.send_to_process(signal.SIGTERM)

    def resize(self, window: tuple[int, int]) -> None:
        """Set the terminal size (rows, columns) of ranks that write to a terminal."""
        for worker in self._workers:
            worker.resize(window)

    def release(self) -> bool:
        """Unregister workers that have no remaining processes from the orphan reaper.

        This is necessary because the system may reuse an empty process group's id.

        Returns:
            True if no worker has any processes left.
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
            local_size=max(share.count, 1),  # a host may only have spares
            address=self._meeting.address,
            port=self._meeting.port,
            listen_fd=listen_fd,
        )

    def _relay(self, source: OutputSource) -> None:
        # An earlier event in the same turn may have drained and closed the source.
        if source.open and not source.read():
            source.open = False
            self._ignore(source)

    def _ignore(self, source: OutputSource) -> None:
        with suppress(KeyError):  # not registered any more
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
