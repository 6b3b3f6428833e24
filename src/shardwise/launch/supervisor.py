"""Watches the ranks of a run on all hosts, and stops all of them if one fails.

    [ output | exit of a rank | Ctrl-C | time to send a signal ] ... -> final message

A single thread waits for these events. If a rank fails, the supervisor first waits a moment,
because another rank may be the cause and report it later. Then it stops all ranks. If the run is
asked to stop, the supervisor first waits for ranks that save. The orphan reaper kills process
groups that outlive the supervisor.
"""

import os
import selectors
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from shardwise.errors import LaunchError
from shardwise.launch import failure_report, nccl_watchdog
from shardwise.launch.console import STDERR, Console
from shardwise.launch.local_workers import RankExit
from shardwise.launch.signals import Signals, SignalSchedule
from shardwise.launch.worker_output import WorkerOutput
from shardwise.messages.printable import as_utf8
from shardwise.net.error_file import ErrorReport
from shardwise.net.progress import Progress
from shardwise.net.restarts import SAVED, Ending, Failure

SETTLE = 0.4
"""Seconds to wait after the first failure for other ranks to report theirs."""

UNEXPLAINED = 3.0
"""Seconds to wait if all failures so far are lost peers, so the lost rank must be about to exit."""

_ABORTED = -signal.SIGABRT, 128 + signal.SIGABRT
"""Exit codes of a rank that called abort(), and of a shell that started such a rank."""

LAST_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL for a rank that has ignored SIGINT."""


EARLY = 10
"""A spare that ends within so many steps after it has joined has ended early."""

MOST_EARLY = 3
"""Number of times in succession that a rank may end early before it is not started again."""


class Site(Protocol):
    """The ranks of one host: a LocalWorkers for this host, a RemoteHost for others."""

    def reap(self) -> None:
        """Report the ranks whose processes have exited."""

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to all of the host's ranks."""

    def ask_to_end(self, number: signal.Signals) -> None:
        """Ask the host's ranks to stop. If ranks save first, they report this."""

    def ended_well(self, rank: int) -> None:
        """Tell the host's ranks that `rank`, on any host, has exited with code 0."""

    def resize(self, window: tuple[int, int]) -> None:
        """Pass on the new size of the terminal (rows, columns)."""


class Substitutes(Protocol):
    """Handles the loss of ranks, and replaces them by spares with `--spares`. See LocalWorkers."""

    def mark_lost(self, ranks: Sequence[int]) -> None:
        """Tell all other ranks that `ranks` no longer exist."""

    def clear_away(self, rank: int) -> None:
        """Kill the processes of `rank`, and those that it left behind."""

    def start_spare(self, rank: int, *, grows: bool = False) -> None:
        """Start a spare with the number `rank`. If `grows` is true, it need not replace a rank.

        Raises LaunchError if that fails.
        """

    def has_joined(self, rank: int) -> bool:
        """Return whether `rank`, which started as a spare, has joined the other ranks."""

    def have_met(self, ranks: Collection[int]) -> bool:
        """Return whether all `ranks` are known to have met all other ranks in `sw.init`."""


class _LostHost(NamedTuple):
    """A lost host's ranks, and the time from which they certainly no longer exist."""

    ended_at: float
    ranks: Sequence[int]
    why: str


class Supervisor:
    """The launcher's event loop, from starting the ranks to the final message.

    Args:
        console: Writes the output of the run.
        outputs: Each rank's output.
        signals: Signals sent to this process.
        grace: Seconds between SIGTERM and SIGKILL.
        joins: True if the ranks are expected to call sw.init.
        hosts: Host name of each rank, or None on a single host.
        survives: True if the other ranks continue after one was killed (`--survive`). Set
            `substitutes` before `watch`.
        spares: Number of ranks that wait to replace lost ones. They are the last ones of `outputs`.
        output_of: Returns the output of a rank that is added later, if the run may grow.
    """

    def __init__(
        self,
        console: Console,
        outputs: Sequence[WorkerOutput],
        signals: Signals,
        *,
        grace: float,
        joins: bool = False,
        hosts: Mapping[int, str] | None = None,
        survives: bool = False,
        spares: int = 0,
        output_of: Callable[[int], WorkerOutput] | None = None,
    ) -> None:
        self.selector = selectors.DefaultSelector()
        self.every_turn: list[Callable[[], float | None]] = []
        """Callbacks to call in each turn. Each returns the seconds until its next call, or None."""
        self._console = console
        self._outputs = list(outputs)
        self._output_of = output_of
        self._signals = signals
        self._grace = grace
        self._joins = joins
        self._hosts = hosts or {}
        self._survives = survives
        self.substitutes: Substitutes | None = None
        self._killed: set[int] = set()
        """Ranks whose exits do not end the run: the others continue without them."""
        self._spares = set(range(len(outputs) - spares, len(outputs)))
        """Ranks that started as spares."""
        self._has_spares = spares > 0
        self._early: Counter[int] = Counter()
        """How often in succession each rank has ended early after it joined as a spare."""
        self._dismissed: set[int] = set()
        """Spares that are killed because the other ranks have exited."""
        self._sites: Sequence[Site] = ()
        self._lost_hosts: list[_LostHost] = []
        """Lost hosts whose ranks may still exist."""
        if survives:
            self.every_turn.append(self._report_lost)
        self._plan = SignalSchedule()
        self._running = set(range(len(outputs)))
        self._exits: dict[int, RankExit] = {}
        self._losses: list[str] = []
        self._asked: signal.Signals | None = None
        self._stopping = False
        self._saving = False
        self._explained = False
        self.selector.register(signals.fd, selectors.EVENT_READ, self._on_signals)

    def watch(self, sites: Sequence[Site]) -> Ending:
        """Run the loop until all ranks have exited, and return how the run ended."""
        self._sites = sites
        while self._running and sites:
            self.turn()
        self._console.close()
        return self._conclude()

    def close(self) -> None:
        """Close the selector and the logs."""
        self.selector.close()
        for output in self._outputs:
            output.close()

    def turn(self, limit: float | None = None) -> None:
        """Wait up to `limit` seconds for events, and handle them."""
        waits = [wait for wait in (limit, *self._waits()) if wait is not None]
        for key, _ in self.selector.select(min(waits, default=None)):
            key.data()
        for number in self._plan.due():
            # After the first signal, ranks exit because of it, so their exits need no reaction.
            self._stopping = True
            for site in self._sites:
                site.send_signal(number)
        if self._console.broken and self._asked is None:
            self._stop(signal.SIGPIPE)

    def _waits(self) -> list[float | None]:
        """Return the seconds until each kind of event, or None if it is not scheduled."""
        # Run the callbacks before reading the schedule, because they may declare a host lost, which
        # changes the schedule.
        return [*[call() for call in self.every_turn], self._plan.wait()]

    @property
    def is_asked(self) -> bool:
        """True if a signal has asked the run to stop."""
        return self._asked is not None

    def hear(self, rank: int, stream: int, data: bytes) -> None:
        """Handle output from `rank`. `data` is b"" at the end of the stream."""
        self._outputs[rank].hear(stream, data)

    def left(self, rank_exit: RankExit) -> None:
        """Handle the exit of a rank."""
        self._running.discard(rank_exit.end.rank)
        self._exits[rank_exit.end.rank] = rank_exit
        # Only if the rank has left no process behind, because a background process may be the one
        # that trains.
        if rank_exit.end.code == 0 and rank_exit.alone:
            for site in self._sites:
                site.ended_well(rank_exit.end.rank)
        if self._survives and self._is_dispensable(rank_exit):
            return
        if self._is_patient:
            self._settle()

    def _is_dispensable(self, rank_exit: RankExit) -> bool:
        """Return whether the other ranks continue without a rank that has exited.

        If so, start a spare in its place with `--spares`.
        """
        workers, rank = self.substitutes, rank_exit.end.rank
        assert workers is not None
        if self._waits_to_join(rank):
            if self._asked is None and self._is_patient and rank not in self._dismissed:
                # Otherwise a refusal is only shown at the end of the run.
                if rank_exit.report is not None and rank_exit.report.refusal:
                    self._outputs[rank].hear(STDERR, as_utf8(rank_exit.report.text))
                self.say(failure_report.spare_line(rank, rank_exit.how))
            workers.clear_away(rank)
            # Ranks on other hosts may be waiting for it to join.
            self._mark_lost([rank])
            del self._exits[rank]  # it has not changed the result of the run
            return True
        is_last = self._dismiss_if_alone()
        # A rank that raises an error has found a mistake that the others would find too. A rank
        # that was killed has not. Without progress, it has not joined the others, and they would
        # wait for it until --timeout.
        was_killed = rank_exit.end.code < 0 and rank_exit.progress is not None
        is_killed = was_killed and self._is_patient and not is_last
        if is_killed:
            self._killed.add(rank)
            self.say(failure_report.killed_line(rank, rank_exit.how))
            workers.clear_away(rank)
            self._mark_lost([rank])
            # On several hosts, lost ranks are not started again.
            is_replaced = self._has_spares and not self._hosts and self._asked is None
            if is_replaced and self._may_start_again(rank_exit):
                self._start_spare(rank)
        return is_killed

    def _dismiss_if_alone(self) -> bool:
        """Return whether no rank is left that a spare could join. If so, kill the spares."""
        assert self.substitutes is not None
        waiting = {rank for rank in self._running if self._waits_to_join(rank)}
        if not self._running <= waiting:
            return False
        for rank in waiting - self._dismissed:
            self.substitutes.clear_away(rank)
        self._dismissed |= waiting
        return True

    def add_workers(self, count: int) -> list[int]:
        """Start `count` more workers, which join the others, and return their ranks.

        Raises LaunchError if the run is ending, or if a worker cannot be started.
        """
        assert self.substitutes is not None
        assert self._output_of is not None
        if self._asked is not None or self._stopping or not self._running - self._dismissed:
            raise LaunchError("The run is ending, so no worker can join it.")
        added: list[int] = []
        failure = ""
        for _ in range(count):
            rank = len(self._outputs)
            try:
                output = self._output_of(rank)
                self.substitutes.start_spare(rank, grows=True)
            except LaunchError as error:
                failure = str(error)
                break
            self._outputs.append(output)
            self._spares.add(rank)
            self._running.add(rank)
            added.append(rank)
        ranks = f"rank{'s' * (len(added) > 1)} {', '.join(map(str, added))}"
        if added:
            self.say(f"shardwise: started {ranks}\n")
        if failure:
            part = f"Only {len(added)} of {count} workers were started ({ranks}). "
            raise LaunchError(part * bool(added) + failure)
        return added

    def _waits_to_join(self, rank: int) -> bool:
        """Return whether `rank` is a spare that has not joined the other ranks."""
        assert self.substitutes is not None
        return rank in self._spares and not self.substitutes.has_joined(rank)

    def _may_start_again(self, rank_exit: RankExit) -> bool:
        """Return whether a lost rank is started again. Not if it repeatedly ends after it joins."""
        found, rank = rank_exit.progress, rank_exit.end.rank
        is_early = (
            found is not None and found.joined is not None and found.step < found.joined + EARLY
        )
        self._early[rank] = self._early[rank] + 1 if is_early else 0
        if self._early[rank] < MOST_EARLY:
            return True
        self.say(failure_report.given_up_line(rank, MOST_EARLY, EARLY))
        return False

    def _start_spare(self, rank: int) -> None:
        """Start the lost `rank` again, as a spare."""
        assert self.substitutes is not None
        try:
            self.substitutes.start_spare(rank)
        except LaunchError as error:
            self.say(f"shardwise: rank {rank} is not started again: {error}\n")
            return
        del self._exits[rank]
        self._killed.discard(rank)
        self._spares.add(rank)
        self._running.add(rank)

    def lost(self, ranks: Sequence[int], why: str, after: float = 0.0) -> None:
        """Stop all other ranks, because the host of `ranks` was lost.

        With `--survive`, let the others continue instead, once they have met.

        Args:
            ranks: The lost host's ranks.
            why: The reason, as a sentence.
            after: Seconds after which the lost host has certainly ended its ranks.
        """
        self._running.difference_update(ranks)
        is_last = not self._survives or self._dismiss_if_alone()
        has_others = not is_last or any(end.code == 0 for end in self._ends())
        if self._survives and self._is_patient and has_others:
            self._losses.append(why)
            self._lost_hosts.append(_LostHost(time.monotonic() + after, ranks, why))
            self._continue_without_lost_hosts()
            return
        self._losses.append(why)
        self._stop_others()

    def _continue_without_lost_hosts(self) -> None:
        """Let the other ranks continue without the lost hosts, if they are known to have met."""
        # Otherwise they may wait for the lost ranks in `sw.init`, until --timeout.
        lost = self._killed.union(*(host.ranks for host in self._lost_hosts))
        waiting = [host for host in self._lost_hosts if host.why in self._losses]
        if not waiting or not self._is_patient:
            return
        assert self.substitutes is not None
        if self.substitutes.have_met(set(range(len(self._outputs))) - lost):
            for host in waiting:
                self._losses.remove(host.why)
                self._killed.update(host.ranks)
                self.say(failure_report.lost_host_line(host.why, os.environ))

    def _stop_others(self) -> None:
        if self._is_patient:
            self._plan.make([(0, signal.SIGTERM), (self._grace, signal.SIGKILL)])

    def _report_lost(self) -> float | None:
        """Report ranks of lost hosts once they have ended. Return the seconds until the next."""
        now = time.monotonic()
        self._continue_without_lost_hosts()
        for host in [each for each in self._lost_hosts if each.ended_at <= now]:
            self._lost_hosts.remove(host)
            if host.why in self._losses:
                self._stop_others()
            else:
                self._mark_lost(host.ranks)
        return min((host.ended_at - now for host in self._lost_hosts), default=None)

    def _mark_lost(self, ranks: Sequence[int]) -> None:
        assert self.substitutes is not None
        self.substitutes.mark_lost(ranks)

    def saves_first(self, asked: signal.Signals) -> None:
        """Cancel all scheduled signals, because ranks save before they exit.

        Args:
            asked: The signal that asked the ranks to stop.
        """
        if not self._saving and not self._stopping:
            self._saving, self._asked = True, self._asked or asked
            self._plan.make([])
            self.say(failure_report.saving_line(asked))

    @property
    def _is_patient(self) -> bool:
        """True if the ranks may still exit on their own, without a signal from the launcher."""
        return (self._asked is None or self._saving) and not self._stopping

    def _on_signals(self) -> None:
        for number in self._signals.arrived():
            if number == signal.SIGCHLD:
                for site in self._sites:
                    site.reap()
            elif number == signal.SIGWINCH:
                if (window := self._console.window()) is not None:
                    for site in self._sites:
                        site.resize(window)
            elif number == signal.SIGUSR1:
                # Schedulers such as Slurm send SIGUSR1 some time before they end a job. Save, but
                # do not kill any rank yet.
                self._ask(number)
            elif number == signal.SIGTERM and self._asked == signal.SIGUSR1:
                self._asked = number  # the ranks are already shutting down
            else:
                self._stop(number)

    def _settle(self) -> None:
        """If a rank has failed, schedule the signals that stop the other ranks.

        Before the signals are sent, ranks have time to report the cause of the failure.
        """
        ends = [end for end in self._ends() if end.rank not in self._killed]
        if all(end.code == 0 for end in ends):
            return
        # A rank that loses its peer fails immediately, but the peer may take seconds to write its
        # traceback. So wait longer as long as no failure explains the others.
        explained = failure_report.is_explained(ends, self._reports())
        if self._plan and explained == self._explained:
            return
        self._explained = explained
        wait = SETTLE if explained else UNEXPLAINED
        self._plan.make([(wait, signal.SIGTERM), (wait + self._grace, signal.SIGKILL)])

    def _stop(self, asked: signal.Signals) -> None:
        """Stop the run because of signal `asked`. A second signal kills the ranks immediately."""
        if self._asked is not None:
            self._plan.make([(0, signal.SIGKILL)])
        elif asked == signal.SIGINT:
            # Send SIGINT first, which a script can catch, then SIGTERM for programs that ignore it.
            kill = (self._grace + LAST_GRACE, signal.SIGKILL)
            self._plan.make([(0, asked), (self._grace, signal.SIGTERM), kill])
            for output in self._outputs:
                output.hide_interrupt()
        elif asked == signal.SIGTERM:
            # `_ask` sends SIGTERM to the ranks below, and lets ranks save that do so.
            self._plan.make([(self._grace, signal.SIGKILL)])
        else:
            self._plan.make([(0, signal.SIGTERM), (self._grace, signal.SIGKILL)])
        again, size = self._asked is not None, len(self._outputs)
        words = failure_report.stopping_line(asked, size, again=again, broken=self._console.broken)
        first, self._asked = self._asked is None, self._asked or asked
        self.say(words)
        if first and asked == signal.SIGTERM:
            self._ask(asked)

    def _ask(self, number: signal.Signals) -> None:
        """Ask all ranks to stop. Some save before they exit."""
        for site in self._sites:
            site.ask_to_end(number)

    def _conclude(self) -> Ending:
        self._continue_without_lost_hosts()
        reports, lost = self._reports(), failure_report.lost_hosts(self._losses)
        refused = "" if self._asked else failure_report.common_refusal(self._ends(), reports)
        for rank, found in reports.items():
            if found.refusal:
                # If all ranks raise the same refusal, it is shown once at the end, so only log it.
                output = self._outputs[rank]
                (output.keep if refused else output.hear)(STDERR, as_utf8(found.text))
        ends = self._ends()
        saved = any(rank_exit.saved for rank_exit in self._exits.values())
        left = [end for end in ends if end.rank not in self._killed]
        if (left or saved) and all(end.code in (0, SAVED) for end in left):
            ends = left  # the others have finished, or saved, without those that were killed
        judged = failure_report.judge(ends, reports)
        # If a second signal has killed ranks before they saved, the run has not succeeded.
        ended_well = all(end.code == 0 for end in ends)
        if judged is None and not lost and (saved or (self._saving and ended_well)):
            return Ending(code=SAVED if saved else 0, asked=self._asked)
        if self._asked is not None:
            unsaved = failure_report.unsaved_line(self._asked, self._progress())
            return Ending(code=128 + self._asked, words=lost + unsaved, asked=self._asked)
        # If the ranks failed only because they lost peers, the lost host is the cause.
        if lost and (judged is None or failure_report.is_consequence(judged, reports)):
            failure = Failure(what="a host", why=self._losses[0], progress=self._progress())
            return Ending(code=1, words=lost, failure=failure)
        if judged is not None:
            return self._blame(judged, reports, refused)
        # After sw.init a rank records its progress. If no rank did, each has trained separately.
        apart = self._joins and len(self._outputs) > 1 and self._progress() is None
        words = failure_report.unjoined_copies(len(self._outputs)) if apart else ""
        return Ending(code=0, words=words)

    def _blame(
        self, judged: failure_report.Verdict, reports: Mapping[int, ErrorReport], refused: str
    ) -> Ending:
        """Return how a failed run ended, including its last lines.

        Args:
            judged: The rank to blame.
            reports: Error reports by rank.
            refused: The error message that all ranks have in common, or "".
        """
        rank = judged.rank if judged.waiting is None else judged.waiting
        found = reports.get(rank)
        rank_exit = self._exits[judged.rank]
        # A rank that the launcher stopped is blamed only if it had reported an error before that.
        how = failure_report.UNCAUGHT if rank_exit.end.stopped else rank_exit.how
        trace = (
            failure_report.last_traceback(found.text)
            if found
            else failure_report.last_words(self._outputs[rank].tail.text())
        )
        # If a rank waited for a late one, its traceback ends in shardwise's own frames. Show only
        # the message and the user's line.
        if judged.late and found is not None:
            trace = f"{found.message} [{found.where}]" if found.where else found.message
        words = failure_report.closing_words(
            judged,
            how,
            trace,
            size=len(self._outputs),
            where=found.where if found else "",
            host=self._hosts.get(judged.rank, ""),
        )
        if refused:
            words = failure_report.refusal_words(refused, list(reports), len(self._outputs))
        code = judged.exit_code
        if code == SAVED:
            code = 1
            words += (
                f"shardwise: the script itself ended with exit code {SAVED}. The run ends with 1, "
                f"because {SAVED} means that a run saved when it was asked to end.\n"
            )
        what, why = failure_report.in_few_words(judged, how, len(self._outputs), found)
        return Ending(
            code=code,
            words=failure_report.lost_hosts(self._losses) + words,
            failure=Failure(what=what, why=why, progress=self._progress(), rank=judged.rank),
        )

    def _progress(self) -> Progress | None:
        """Return the ranks' combined progress, or None if no rank recorded any."""
        # By rank, because only the main rank records that a checkpoint is saved.
        ranks = sorted(self._exits)
        reported = [found for rank in ranks if (found := self._exits[rank].progress) is not None]
        if not reported:
            return None
        last = max(reported, key=lambda each: (bool(each.checkpoint), each.checkpoint_at))
        return Progress(
            step=max(each.step for each in reported),
            kept=max(each.kept for each in reported),
            resumes=any(each.resumes for each in reported),
            saves_when_asked=any(each.saves_when_asked for each in reported),
            checkpoint=last.checkpoint,
            checkpoint_at=last.checkpoint_at,
        )

    def say(self, words: str) -> None:
        """Print complete lines from the launcher."""
        self._console.say(words)

    def _ends(self) -> list[failure_report.ExitStatus]:
        return [rank_exit.end for rank_exit in self._exits.values() if not rank_exit.saved]

    def _reports(self) -> dict[int, ErrorReport]:
        """Return error reports by rank, including ranks aborted by torch's NCCL watchdog."""
        found = {rank: each.report for rank, each in self._exits.items() if each.report}
        aborted = {
            rank: each.end.time
            for rank, each in self._exits.items()
            if rank not in found and each.end.code in _ABORTED
        }
        tails = {rank: self._outputs[rank].tail.text() for rank in aborted}
        ours = nccl_watchdog.reports(tails, aborted, len(self._outputs))
        return found | {report.rank: report for report in ours}
