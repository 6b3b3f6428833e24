"""Decides whether a run that failed starts again, and says so in a line."""

import signal
from collections.abc import Callable
from dataclasses import dataclass, replace

from shardwise.errors import LaunchError
from shardwise.net.progress import Progress

STUCK = 3
"""So many failures in a row at one step, without a newer checkpoint, are not chance."""

SAVED = 75
"""The exit code of a run that was asked to end, and saved first: sysexits.h's "try again"."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failure that is not of the user's asking: `what` happened to whom, and `why`, in words;
    `progress` is what the ranks had made by then. `rank` is the one to blame, None for a host."""

    what: str
    why: str
    progress: Progress | None
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended: its exit code and last words, the `failure` if it was one, and the signal
    by which someone `asked` for the end."""

    code: int
    words: str = ""
    failure: Failure | None = None
    asked: signal.Signals | None = None


class Restarts:
    """Counts what has failed; `allowed` is how often a run starts again, or an island of it.
    Pure."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self._failures: list[tuple[int, int]] = []
        self._islands = 0

    @property
    def number(self) -> int:
        """The one that is next, counted from 1."""
        return len(self._failures) + self._islands + 1

    @property
    def is_spent(self) -> bool:
        """Whether nothing is started again any more."""
        return self.number > self.allowed

    def island_started(self) -> None:
        """An island was started again, while the others went on."""
        self._islands += 1

    def after(self, failure: Failure) -> tuple[bool, str]:
        """Whether to start again, and what to say of it, a line or nothing."""
        progress = failure.progress or Progress(step=0, kept=0)
        number, is_spent = self.number, self.is_spent
        self._failures.append((progress.step, progress.kept))
        if self.allowed == 0:
            return False, ""
        if self._failures[-STUCK:] == [self._failures[-1]] * STUCK:
            return False, (
                f"\nshardwise: {STUCK} failures in a row {_where(progress)}, and no newer "
                "checkpoint in between: not starting again.\n"
            )
        if is_spent:
            times = "once" if self.allowed == 1 else f"{self.allowed} times"
            return False, f"\nshardwise: it was started again {times}, and no more.\n"
        return True, (
            f"shardwise: {failure.what} {_where(progress)} ({failure.why}). Starting again, "
            f"{number} of {self.allowed}, {resume_point(progress)}.\n"
        )


def repeated(restarts: Restarts, once: Callable[[], Ending], say: Callable[[str], None]) -> int:
    """Run `once`, again and again while `restarts` allows it, and return the exit code."""
    ending = last_ending(restarts, once, say)
    say(ending.words)
    return ending.code


def last_ending(
    restarts: Restarts, once: Callable[[], Ending], say: Callable[[str], None]
) -> Ending:
    """Run `once`, again and again while `restarts` allows it. Return how it ended the last time,
    with all that is left to say."""
    ending = once()
    while ending.failure is not None:
        again, line = restarts.after(ending.failure)
        if not again:
            return replace(ending, words=ending.words + line)
        say(line)
        try:
            ending = once()
        except LaunchError as error:
            return replace(ending, words=f"\nshardwise: it cannot start again. {error}\n")
    return ending


def _where(progress: Progress) -> str:
    return f"at step {progress.step}" if progress.step else "before the first step"


def resume_point(progress: Progress) -> str:
    """Say where the next start continues, and what is lost."""
    lost = progress.step - (progress.kept if progress.resumes else 0)
    steps = f"{lost} step{'s' * (lost != 1)} {'is' if lost == 1 else 'are'} lost"
    if progress.kept and progress.resumes:
        return f"from the checkpoint of step {progress.kept}: {steps}"
    if not progress.step:
        return "from the beginning: nothing is lost"
    if progress.resumes:
        return f"from the beginning: there is no checkpoint yet, and {steps}"
    return f"from the beginning, for the script calls no engine.resume(folder): {steps}"
