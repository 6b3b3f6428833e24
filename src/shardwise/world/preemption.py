"""Saves and ends a run that is asked to end: at the next step boundary, all ranks together.

    signal, on any rank ─▶ the exchange of its next step ─▶ all save and leave before the one after

That is where a batch to train on is asked for: schedulers have made their step by then, too.
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
"""What schedulers send some time before they kill."""

Save = Callable[[], Path]

AGAIN = 1.0
"""Seconds after which the same signal is a wish of its own, to end at once."""


class Preemption:
    """The signals to end a run: one `asked` this rank, one was `agreed` on by all; 0 for none."""

    def __init__(self, progress: ProgressWriter, say: Callable[..., None]) -> None:
        self.asked = 0
        self.agreed = 0
        self._progress = progress
        self._say = say
        self._since = 0.0
        self._pid = os.getpid()
        self._savers: list[tuple[WeakMethod[Callable[[], bool]], WeakMethod[Save]]] = []
        self._ours: list[signal.Signals] = []

    def heed(self, ready: Callable[[], bool], save: Save) -> None:
        """From now on call `save`, when `ready`, before this process ends of a signal.

        Both are bound methods, held weakly; `save` is collective. Signals that the user's code
        handles stay its own.
        """
        self._savers.append((WeakMethod(ready), WeakMethod(save)))
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._on_signal)
                self._ours.append(number)
        self._progress.saves_when_asked(saves=signal.SIGTERM in self._ours)

    def leave_out(self, save: Save) -> None:
        """There is nothing for `save` to save any more."""
        self._savers = [known for known in self._savers if known[1]() not in (None, save)]
        if not self._savers:
            self._progress.saves_when_asked(saves=False)

    def forget(self) -> None:
        """Let signals be what they were; unless they have been heeded, and might come again."""
        while self._ours and not self.agreed:
            signal.signal(self._ours.pop(), signal.SIG_DFL)

    def before_batch(self, batch: object) -> None:
        """A batch is about to be handed out: what is to be trained on waits for the next start."""
        del batch
        if self.agreed and torch.is_grad_enabled():
            self.leave_between_steps()

    def leave_between_steps(self) -> None:
        """Save and end the process with SAVED, if all know that they should. Collective then."""
        if not self.agreed:
            return
        savers = [(r, s) for ready, save in self._savers if (r := ready()) and (s := save())]
        if savers and all(ready() for ready, _ in savers):
            self._leave([str(save()) for _, save in savers])

    def _leave(self, paths: list[str]) -> NoReturn:
        self._progress.ended()
        self._say(
            f"shardwise: {signal.Signals(self.agreed).name}: saved {' and '.join(paths)}, ending "
            f"with exit code {SAVED}. The same command goes on from there.",
            file=sys.stderr,
        )
        raise SystemExit(SAVED)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a DataLoader worker, which has inherited this
            again = number == signal.SIGTERM
        else:
            again = self.asked == number and time.monotonic() - self._since > AGAIN
            # Who starts the run anew does not wait for what an end of its launcher has left.
            again = again or self._progress.is_orphan or not self._savers
        if again:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.asked != number:
            self.asked, self._since = number, time.monotonic()
