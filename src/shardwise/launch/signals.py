"""Makes received signals available to a selector, and schedules signals to send to the ranks."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

WATCHED = (
    signal.SIGCHLD,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGWINCH,
)


class Signals:
    """Context manager that writes one byte per received signal to a pipe, readable from `fd`.

    Signals that were ignored when this process started (for example, by nohup) stay ignored.
    """

    def __enter__(self) -> "Signals":
        self.fd, self._written = os.pipe()
        for end in (self.fd, self._written):
            os.set_blocking(end, False)  # Python requires it of a wakeup descriptor
        self._before_fd = signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
        self._before: dict[signal.Signals, Any] = {}
        for number in WATCHED:
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                # Python writes to the wakeup descriptor only for signals that have a handler.
                self._before[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Restore everything before closing the pipe, because a signal may still arrive.
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._before_fd)
        os.close(self.fd)
        os.close(self._written)

    def arrived(self) -> list[signal.Signals]:
        """Return the signals received since the last call, in order of arrival."""
        try:
            return [signal.Signals(number) for number in os.read(self.fd, 4096)]
        except BlockingIOError:
            return []


class SignalSchedule:
    """A schedule of signals to send to the ranks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: list[tuple[float, signal.Signals]] = []

    def __bool__(self) -> bool:
        return bool(self._steps)

    def make(self, steps: Sequence[tuple[float, signal.Signals]]) -> None:
        """Replace the schedule.

        Args:
            steps: (seconds from now, signal), in ascending order.
        """
        now = self._clock()
        self._steps = [(now + delay, number) for delay, number in steps]

    def wait(self) -> float | None:
        """Return the seconds until the next signal is due, or None if none is scheduled."""
        return max(0.0, self._steps[0][0] - self._clock()) if self._steps else None

    def due(self) -> list[signal.Signals]:
        """Remove and return the signals that are due."""
        now = self._clock()
        ready = [number for moment, number in self._steps if moment <= now]
        # The steps are in ascending order, so those that are due come first.
        self._steps = self._steps[len(ready) :]
        return ready
