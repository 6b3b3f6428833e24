"""Saves and stops a run after a signal, on all ranks at the same step boundary.

    signal on any rank ─▶ exchange of its next step ─▶ before the step after that, all ranks save
                          (all ranks learn of it)      and exit with code SAVED

The ranks save when the script requests the next training batch. By then, learning-rate schedulers
have been stepped too.

With `--survive`, SIGTERM to a single rank only asks that rank to leave after its step. The launcher
therefore sends SIGUSR1 to the ranks when it receives SIGTERM itself.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn
from weakref import WeakMethod

import torch

from shardwise.net.progress import ProgressWriter
from shardwise.net.restarts import SAVED

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that schedulers send some time before they kill a job."""

Save = Callable[[], Path]

AGAIN = 1.0
"""Seconds after which a second signal terminates the process immediately. An earlier one is treated
as a duplicate, because a launcher and a scheduler may both forward the same signal."""


class Preemption:
    """Handles signals that ask the run to stop.

    Attributes:
        asked: The signal that this rank received, or 0.
        agreed: The signal that all ranks know of, or 0.
    """

    def __init__(self, progress: ProgressWriter, say: Callable[..., None]) -> None:
        self.is_alone = False
        """True if SIGTERM asks only this rank to leave (`--survive`)."""
        self.asked = 0
        self.agreed = 0
        self._progress = progress
        self._say = say
        self._since = 0.0
        self._pid = os.getpid()
        self._savers: list[tuple[WeakMethod[Callable[[], bool]], WeakMethod[Save]]] = []
        self._ours: list[signal.Signals] = []

    @property
    def leaves_alone(self) -> bool:
        """True if only this rank, rather than the run, was asked to stop."""
        return self.is_alone and self.asked == signal.SIGTERM

    @property
    def asked_of_all(self) -> int:
        """The signal that told this rank to stop the run, or 0."""
        return 0 if self.leaves_alone else self.asked

    def leave_alone(self, step: int, reason: str = "SIGTERM") -> NoReturn:
        """Terminate this process after step `step`, while the other ranks continue."""
        print(f"shardwise: {reason}: this worker leaves after step {step}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # The default action, because the launcher continues only without ranks that were killed.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("SIGTERM ends the process")

    def heed(self, ready: Callable[[], bool], save: Save) -> None:
        """Before a signal stops this process, call `save` if `ready()` is true.

        Both are bound methods, held weakly. `save` is collective. A handler that user code has
        installed for a signal is not replaced.
        """
        self._savers.append((WeakMethod(ready), WeakMethod(save)))
        # Python allows setting signal handlers only in the main thread.
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._on_signal)
                self._ours.append(number)
        # Ask the launcher to give this process time to save before it kills it.
        self._progress.saves_when_asked(saves=signal.SIGTERM in self._ours)

    def leave_out(self, save: Save) -> None:
        """Stop calling `save`, because its engine is closed."""
        self._savers = [known for known in self._savers if known[1]() not in (None, save)]
        if not self._savers:
            self._progress.saves_when_asked(saves=False)

    def forget(self) -> None:
        """Restore the default signal handlers.

        Does nothing if a signal is already stopping the run, because a second signal must not kill
        it during a save.
        """
        while self._ours and not self.agreed:
            signal.signal(self._ours.pop(), signal.SIG_DFL)

    def before_batch(self, batch: object) -> None:
        """If the ranks have agreed to stop, save and exit instead of returning a training batch."""
        del batch
        # Let an evaluation finish: the save belongs before a training batch.
        if self.agreed and torch.is_grad_enabled():
            self.leave_between_steps()

    def leave_between_steps(self) -> None:
        """If all ranks have agreed to stop, save and exit with code SAVED.

        Collective if they have agreed.
        """
        if not self.agreed:
            return
        # Save all engines or none: a checkpoint of one engine without the others cannot be resumed.
        savers = [(r, s) for ready, save in self._savers if (r := ready()) and (s := save())]
        if savers and all(ready() for ready, _ in savers):
            self._leave([str(save()) for _, save in savers])

    def _leave(self, paths: list[str]) -> NoReturn:
        self._progress.ended()
        self._say(
            f"shardwise: {signal.Signals(self.agreed).name}: saved {' and '.join(paths)}, ending "
            f"with exit code {SAVED}. The same command continues from there.",
            file=sys.stderr,
        )
        raise SystemExit(SAVED)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a DataLoader worker, which inherited this handler
            ends_now = number == signal.SIGTERM
        else:
            ends_now = self.asked == number and time.monotonic() - self._since > AGAIN
            # An orphan, whose launcher has exited, must not delay a restart of the run. If no
            # engine saves, there is nothing to wait for.
            ends_now = ends_now or self._progress.is_orphan or not self._savers
        if ends_now:
            # Use the default action, so that the exit code shows the signal.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.asked != number:
            # Only record the signal: a save is collective, so it must wait for the exchange of the
            # next step.
            self.asked, self._since = number, time.monotonic()
