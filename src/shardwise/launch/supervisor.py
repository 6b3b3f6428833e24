"""Watches the ranks of a run, wherever they are, and ends them together when one fails.

    [ output | end of a rank | Ctrl-C | time to send a signal ] ... -> closing words

Everything happens in one thread that sleeps until one of these comes. When a rank fails, the
others get a moment to fail too, so that the first cause can be told from its consequences; then
they are ended. Asked to end, ranks that have a folder for it save first, and are waited for.
The orphan reaper ends process groups that outlive all this.
"""

import selectors
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

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
"""Seconds after the first failure in which others may report that they failed too."""

UNEXPLAINED = 3.0
"""The same while every failed rank has only lost another one, which must be about to end."""

_ABORTED = -signal.SIGABRT, 128 + signal.SIGABRT
"""How a rank ends by abort(): by itself, and under a shell that tells of it."""

LAST_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL for a rank that did not heed SIGINT."""


class Site(Protocol):
    """The ranks of one host: LocalWorkers here, RemoteHost elsewhere."""

    def reap(self) -> None:
        """See which processes have ended."""

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to all ranks there."""

    def ask_to_end(self, number: signal.Signals) -> None:
        """Pass on that someone wants the ranks to end; those that save first report it."""

    def ended_well(self, rank: int) -> None:
        """Let the ranks there know that `rank`, of any host, ended with code 0."""

    def resize(self, window: tuple[int, int]) -> None:
        """Pass on the new rows and columns of the terminal."""


class Supervisor:
    """The ranks of one run, from their start to the closing words.

    `outputs` take what each rank writes, `hosts` are the names of their hosts where there are
    several. `grace` is the seconds between asking and killing. `joins`: the ranks are expected
    to call sw.init.
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
    ) -> None:
        self.selector = selectors.DefaultSelector()
        self.every_turn: list[Callable[[], float | None]] = []
        """Called in each turn; each returns the seconds until it must be called again at most."""
        self._console = console
        self._outputs = outputs
        self._signals = signals
        self._grace = grace
        self._joins = joins
        self._hosts = hosts or {}
        self._sites: Sequence[Site] = ()
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
        """Return how the run ended when all ranks have."""
        self._sites = sites
        while self._running and sites:
            self.turn()
        self._console.close()
        return self._conclude()

    def close(self) -> None:
        """Close what was waited on, and the logs."""
        self.selector.close()
        for output in self._outputs:
            output.close()

    def turn(self, limit: float | None = None) -> None:
        """Wait for something to happen, `limit` seconds at most, and deal with it."""
        waits = [wait for wait in (limit, *self._waits()) if wait is not None]
        for key, _ in self.selector.select(min(waits, default=None)):
            key.data()
        for number in self._plan.due():
            self._send(number)
        if self._console.broken and self._asked is None:
            self._stop(signal.SIGPIPE)

    def _waits(self) -> list[float | None]:
        """Return the seconds until each thing that happens at its time; None where none is due."""
        # The calls come first, because one that loses a host makes a new plan.
        return [*[call() for call in self.every_turn], self._plan.wait()]

    @property
    def is_asked(self) -> bool:
        """Whether someone wants the run to end."""
        return self._asked is not None

    def hear(self, rank: int, stream: int, data: bytes) -> None:
        """Take what `rank` has written."""
        self._outputs[rank].hear(stream, data)

    def left(self, rank_exit: RankExit) -> None:
        """Note that a rank has ended."""
        self._running.discard(rank_exit.end.rank)
        self._exits[rank_exit.end.rank] = rank_exit
        if rank_exit.end.code == 0 and rank_exit.alone:
            for site in self._sites:
                site.ended_well(rank_exit.end.rank)
        if self._is_patient:
            self._settle()

    def lost(self, ranks: Sequence[int], why: str) -> None:
        """Note that these ranks are out of reach, and end the others."""
        self._running.difference_update(ranks)
        self._losses.append(why)
        if self._is_patient:
            self._plan.make([(0, signal.SIGTERM), (self._grace, signal.SIGKILL)])

    def saves_first(self, asked: signal.Signals) -> None:
        """Note that a rank which was asked to end saves first: wait for it."""
        if not self._saving and not self._stopping:
            self._saving, self._asked = True, self._asked or asked
            self._plan.make([])
            self.say(failure_report.saving_line(asked))

    @property
    def _is_patient(self) -> bool:
        """Whether ranks may still end by themselves."""
        return (self._asked is None or self._saving) and not self._stopping

    def _on_signals(self) -> None:
        for number in self._signals.arrived():
            if number == signal.SIGCHLD:
                for site in self._sites:
                    site.reap()
            elif number == signal.SIGWINCH:
                self._resize()
            elif number == signal.SIGUSR1:
                self._ask(number)
            elif number == signal.SIGTERM and self._asked == signal.SIGUSR1:
                self._asked = number  # they are about to end already
            else:
                self._stop(number)

    def _resize(self) -> None:
        window = self._console.window()
        if window is not None:
            for site in self._sites:
                site.resize(window)

    def _settle(self) -> None:
        """Once a rank has failed, plan to end the others, soon after the cause has shown."""
        ends = self._ends()
        if all(end.code == 0 for end in ends):
            return
        explained = failure_report.is_explained(ends, self._reports())
        if self._plan and explained == self._explained:
            return
        self._explained = explained
        wait = SETTLE if explained else UNEXPLAINED
        self._plan.make([(wait, signal.SIGTERM), (wait + self._grace, signal.SIGKILL)])

    def _stop(self, asked: signal.Signals) -> None:
        """End the run, as someone wants it; a second time, at once."""
        if self._asked is not None:
            self._plan.make([(0, signal.SIGKILL)])
        elif asked == signal.SIGINT:
            kill = (self._grace + LAST_GRACE, signal.SIGKILL)
            self._plan.make([(0, asked), (self._grace, signal.SIGTERM), kill])
            for output in self._outputs:
                output.hide_interrupt()
        elif asked == signal.SIGTERM:
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
        """Pass on to the ranks that someone wants them to end; some save first."""
        for site in self._sites:
            site.ask_to_end(number)

    def _send(self, number: signal.Signals) -> None:
        self._stopping = True
        for site in self._sites:
            site.send_signal(number)

    def _conclude(self) -> Ending:
        reports, lost = self._reports(), failure_report.lost_hosts(self._losses)
        refused = "" if self._asked else failure_report.common_refusal(self._ends(), reports)
        self._show_refusals(reports, alike=bool(refused))
        judged = failure_report.judge(self._ends(), reports)
        saved = any(rank_exit.saved for rank_exit in self._exits.values())
        # Ranks that would have saved may be killed before, by a second signal: that is no good end.
        ended_well = all(end.code == 0 for end in self._ends())
        if judged is None and not lost and (saved or (self._saving and ended_well)):
            return Ending(code=SAVED if saved else 0, asked=self._asked)
        if self._asked is not None:
            unsaved = failure_report.unsaved_line(self._asked, self._progress())
            return Ending(code=128 + self._asked, words=lost + unsaved, asked=self._asked)
        if lost and (judged is None or failure_report.is_consequence(judged, reports)):
            failure = Failure(what="a host", why=self._losses[0], progress=self._progress())
            return Ending(code=1, words=lost, failure=failure)
        if judged is not None:
            return self._blame(judged, reports, refused)
        return Ending(
            code=0, words=failure_report.unjoined_copies(len(self._outputs)) if self._apart else ""
        )

    @property
    def _apart(self) -> bool:
        """Whether ranks that should have been one run have not heard of each other."""
        return self._joins and len(self._outputs) > 1 and self._progress() is None

    def _show_refusals(self, reports: Mapping[int, ErrorReport], *, alike: bool) -> None:
        """Show what each rank was refused; only in its log where it is the same for all."""
        for rank, found in reports.items():
            if found.refusal and alike:
                self._outputs[rank].keep(STDERR, as_utf8(found.text))
            elif found.refusal:
                self._outputs[rank].hear(STDERR, as_utf8(found.text))

    def _blame(
        self, judged: failure_report.Verdict, reports: Mapping[int, ErrorReport], refused: str
    ) -> Ending:
        """Which rank failed and why, or that all were `refused` the same."""
        rank = judged.rank if judged.waiting is None else judged.waiting
        found = reports.get(rank)
        rank_exit = self._exits[judged.rank]
        # A rank that we ended is to blame only where an error of its own came before.
        how = failure_report.UNCAUGHT if rank_exit.end.stopped else rank_exit.how
        trace = (
            failure_report.last_traceback(found.text)
            if found
            else failure_report.last_words(self._outputs[rank].tail.text())
        )
        if judged.late and found is not None:  # our frames do not say more of who is at fault
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
                f"shardwise: exit code {SAVED} is the script's own. This run ends with 1, because "
                f"{SAVED} says that a run was asked to end and has saved.\n"
            )
        what, why = failure_report.in_few_words(judged, how, len(self._outputs), found)
        return Ending(
            code=code,
            words=failure_report.lost_hosts(self._losses) + words,
            failure=Failure(what=what, why=why, progress=self._progress(), rank=judged.rank),
        )

    def _progress(self) -> Progress | None:
        """The progress of all ranks, as one."""
        reported = [d.progress for d in self._exits.values() if d.progress is not None]
        if not reported:
            return None
        return Progress(
            step=max(each.step for each in reported),
            kept=max(each.kept for each in reported),
            resumes=any(each.resumes for each in reported),
            saves_when_asked=any(each.saves_when_asked for each in reported),
        )

    def say(self, words: str) -> None:
        """Show whole lines of our own."""
        self._console.say(words)

    def _ends(self) -> list[failure_report.ExitStatus]:
        return [rank_exit.end for rank_exit in self._exits.values() if not rank_exit.saved]

    def _reports(self) -> dict[int, ErrorReport]:
        """The ranks' own error reports, and ours of those that NCCL's watchdog has ended."""
        found = {rank: each.report for rank, each in self._exits.items() if each.report}
        aborted = {
            rank: each.end.time
            for rank, each in self._exits.items()
            if rank not in found and each.end.code in _ABORTED
        }
        tails = {rank: self._outputs[rank].tail.text() for rank in aborted}
        ours = nccl_watchdog.reports(tails, aborted, len(self._outputs))
        return found | {report.rank: report for report in ours}
