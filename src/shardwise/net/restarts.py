"""Decides whether to restart a failed run, and writes a message about the decision."""

import signal
from collections.abc import Callable
from dataclasses import dataclass, replace

from shardwise.errors import LaunchError
from shardwise.net.progress import Progress

STUCK = 3
"""Give up after this many consecutive failures at the same step without a newer checkpoint."""

SAVED = 75
"""Exit code of a run that was asked to stop and saved a checkpoint: EX_TEMPFAIL in sysexits.h."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failure that ends a run. A run that stops on request has not failed.

    Args:
        what: Text that names the event and the rank or host that it affected.
        why: Text that names the cause.
        progress: The ranks' progress at the time of the failure, or None if not recorded.
        rank: The rank at fault, or None if a host failed.
    """

    what: str
    why: str
    progress: Progress | None
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended.

    Args:
        code: The exit code.
        words: The final text to print.
        failure: The failure, or None if the run did not fail.
        asked: The signal that requested the run to stop, or None.
    """

    code: int
    words: str = ""
    failure: Failure | None = None
    asked: signal.Signals | None = None


class Restarts:
    """Counts failures and decides whether to restart. No side effects.

    `allowed` limits the total number of restarts, including those of single islands.
    """

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self._failures: list[tuple[int, int]] = []
        self._islands = 0

    @property
    def number(self) -> int:
        """The number of the next restart, starting at 1."""
        return len(self._failures) + self._islands + 1

    @property
    def is_spent(self) -> bool:
        """True if all allowed restarts are used up."""
        return self.number > self.allowed

    def island_started(self) -> None:
        """Count the restart of a single island, during which the other islands kept running."""
        self._islands += 1

    def after(self, failure: Failure) -> tuple[bool, str]:
        """Count `failure`. Return whether to restart the run, and a message for the user or ""."""
        progress = failure.progress or Progress(step=0, kept=0)
        number, is_spent = self.number, self.is_spent
        self._failures.append((progress.step, progress.kept))
        if self.allowed == 0:
            return False, ""
        if self._failures[-STUCK:] == [self._failures[-1]] * STUCK:
            return False, (
                f"\nshardwise: {STUCK} failures in a row {_where(progress)}, without a newer "
                "checkpoint in between: not restarting.\n"
            )
        if is_spent:
            return False, (
                f"\nshardwise: the limit of {self.allowed} restart{'s' * (self.allowed > 1)} "
                "(--restarts) is reached.\n"
            )
        return True, (
            f"shardwise: {failure.what} {_where(progress)} ({failure.why}). Restart "
            f"{number} of {self.allowed}, {resume_point(progress)}.\n"
        )


def repeated(restarts: Restarts, once: Callable[[], Ending], say: Callable[[str], None]) -> int:
    """Call `once` until it succeeds or `restarts` allows no further restart.

    Returns the exit code.
    """
    ending = last_ending(restarts, once, say)
    say(ending.words)
    return ending.code


def last_ending(
    restarts: Restarts, once: Callable[[], Ending], say: Callable[[str], None]
) -> Ending:
    """Call `once` until it succeeds or `restarts` allows no further restart.

    Returns the last ending.
    """
    ending = once()
    while ending.failure is not None:
        again, line = restarts.after(ending.failure)
        if not again:
            return replace(ending, words=ending.words + line)
        say(line)
        try:
            ending = once()
        except LaunchError as error:
            return replace(ending, words=f"\nshardwise: the restart failed. {error}\n")
    return ending


def _where(progress: Progress) -> str:
    return f"at step {progress.step}" if progress.step else "before the first step"


def resume_point(progress: Progress) -> str:
    """Return a phrase that says where the next start resumes, and how many steps are lost."""
    lost = progress.step - (progress.kept if progress.resumes else 0)
    steps = f"{lost} step{'s' * (lost != 1)} {'is' if lost == 1 else 'are'} lost"
    if progress.kept and progress.resumes:
        return f"from the checkpoint of step {progress.kept}: {steps}"
    if not progress.step:
        return "from the beginning: nothing is lost"
    if progress.resumes and progress.checkpoint_at:
        return f"with one engine from the beginning, because it has no checkpoint: {steps}"
    if progress.resumes:
        lack = "" if progress.checkpoint else "there is no checkpoint yet, and "
        return f"from the beginning: {lack}{steps}"
    return f"from the beginning, because the script does not call engine.resume(folder): {steps}"
