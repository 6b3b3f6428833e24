"""Finds the rank that caused a failure, and writes the report at the end of a run.

`judge` finds the rank to blame, `describe_exit` explains its exit code, and `closing_words` returns
the last lines that the launcher prints. This module does not start or signal processes.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.launch.resources import HostMemory
from shardwise.messages.printable import from_here, printable
from shardwise.net.error_file import ErrorReport
from shardwise.net.progress import Progress
from shardwise.net.restarts import resume_point

_CHAINED = (
    "During handling of the above exception",
    "The above exception was the direct cause",
)
_LINES_WITHOUT_TRACE = 20

_LINES_OF_TRACE = 250
"""Number of lines to search, at the end of the output, for the start of a traceback. Enough for two
stacks from faulthandler, which have up to 100 lines each."""

_CRASH = "Fatal Python error:"

_STACK = re.compile(r"^(?:Current thread|Thread) 0x.*\n(?:  .*\n?)*\n*", re.MULTILINE)
"""Matches the stack of one thread, as faulthandler writes it."""

_MODULES = re.compile(r"^Extension modules: .*\n?", re.MULTILINE)

_TRACE = re.compile(
    r"^[^|\n]*?((?:  \+ Exception Group )?Traceback \(most recent call last\):"
    r"|Fatal Python error:)",
    re.MULTILINE,
)
"""Matches the start of a traceback, possibly after an unfinished progress bar. Does not match
tracebacks nested in an exception group."""


@dataclass(frozen=True, kw_only=True)
class ExitStatus:
    """A rank's exit status.

    Args:
        rank: The rank.
        code: The exit code, or the negative signal number, as in subprocess.
        time: Time of the exit, in seconds since the epoch.
        stopped: True if the launcher had sent the rank a signal before it exited.
    """

    rank: int
    code: int
    time: float
    stopped: bool = False


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The rank to blame, and the run's exit code.

    Args:
        rank: The rank to blame.
        exit_code: The exit code of the run.
        waiting: A rank that waited for `rank`, or None if `rank` itself failed.
        late: Meaningful only if `waiting` is not None. True if `rank` never arrived, and reported
            nothing until it was stopped. False if `rank` exited too early, with code 0.
    """

    rank: int
    exit_code: int
    waiting: int | None = None
    late: bool = False


def judge(ends: Sequence[ExitStatus], reports: Mapping[int, ErrorReport]) -> Verdict | None:
    """Find the rank to blame in a run whose ranks have all exited.

    Returns None if no rank failed. Otherwise blames the first of these that exists:

    1. the first rank that failed for a reason other than a lost peer
    2. the first rank that exited on its own with code 0, and thus too early
    3. a rank that other ranks waited for, and that reported nothing
    4. the first rank that failed
    """
    # A rank that the launcher stopped counts as failed only if it had reported an error before.
    failures = [end for end in ends if end.code != 0 and (not end.stopped or end.rank in reports)]
    if not failures:
        return None
    first = min(failures, key=lambda end: _moment(end, reports))
    # If the first failure (causes sort first) is a lost peer, no rank has any other reason.
    if _is_secondary(first, reports):
        # A rank that exits with code 0 leaves no error, but its peers still wait for it.
        left = [end for end in ends if end.code == 0 and not end.stopped]
        if left:
            early = min(left, key=lambda end: end.time)
            return Verdict(rank=early.rank, exit_code=1, waiting=first.rank)
        late = _silent_rank(ends, failures, reports)
        if late is not None:
            return late
    by_shell = 128 - first.code if first.code < 0 else first.code  # 128 + signal, as in shells
    return Verdict(rank=first.rank, exit_code=1 if first.stopped else by_shell)


def _silent_rank(
    ends: Sequence[ExitStatus], failures: Sequence[ExitStatus], reports: Mapping[int, ErrorReport]
) -> Verdict | None:
    """Blame a rank that others waited for, and that reported nothing before it was stopped.

    If the waiting ranks do not name such a rank, blames the only rank that reported nothing.
    Returns None if several ranks reported nothing.
    """
    silent = {end.rank for end in ends} - {end.rank for end in failures}
    waited = sorted(failures, key=lambda end: _moment(end, reports))
    for end in waited:
        for rank in reports[end.rank].at_fault if end.rank in reports else ():
            if rank in silent:
                return Verdict(rank=rank, exit_code=1, waiting=end.rank, late=True)
    if len(silent) == 1:
        return Verdict(rank=silent.pop(), exit_code=1, waiting=waited[0].rank, late=True)
    return None


def is_explained(ends: Sequence[ExitStatus], reports: Mapping[int, ErrorReport]) -> bool:
    """Return whether any rank in `ends` exited for a reason other than a lost peer."""
    return any(not _is_secondary(end, reports) for end in ends)


def is_consequence(judged: Verdict, reports: Mapping[int, ErrorReport]) -> bool:
    """Return whether the failure in `judged` merely results from the loss of a peer."""
    found = reports.get(judged.rank if judged.waiting is None else judged.waiting)
    return found is not None and found.secondary


def common_refusal(ends: Sequence[ExitStatus], reports: Mapping[int, ErrorReport]) -> str:
    """Return the error message for an invalid call (a refusal) if all ranks report the same one.

    Returns "" if a rank failed for a different reason. Ranks that ended with code 0, and ranks that
    the launcher stopped before they could report an error, are ignored.
    """
    # All ranks make the same wrong call, but not at the same time.
    own = [end.rank for end in ends if end.rank in reports or (end.code and not end.stopped)]
    found = {reports[rank].refusal if rank in reports else "" for rank in own}
    return found.pop() if len(found) == 1 else ""


def _is_secondary(end: ExitStatus, reports: Mapping[int, ErrorReport]) -> bool:
    return end.rank in reports and reports[end.rank].secondary


def _moment(end: ExitStatus, reports: Mapping[int, ErrorReport]) -> tuple[bool, float]:
    """Return a sort key that puts causes before consequences, and orders each of them by time."""
    time = reports[end.rank].time if end.rank in reports else end.time
    return _is_secondary(end, reports), time


def last_traceback(tail: str) -> str:
    """Return the last traceback in `tail`, including any tracebacks chained to it.

    If there is none, returns the last lines.
    """
    text = tail.rstrip()
    starts = [match.start(1) for match in _TRACE.finditer(text)]
    if not starts:
        return "\n".join(text.splitlines()[-_LINES_WITHOUT_TRACE:])
    start = starts.pop()
    # If "During handling of the above exception" separates two tracebacks, they belong together.
    while starts and any(words in text[starts[-1] : start] for words in _CHAINED):
        start = starts.pop()
    return text[start:]


def last_words(tail: str) -> str:
    """Extract the cause of failure from the output of a rank that left no error report.

    After a crash in native code, this consists of the stacks of the current and the main thread.
    Otherwise it is the last traceback, or the last lines if there is no traceback.
    """
    before, crash, after = tail.rpartition(_CRASH)
    text = before + crash + (_two_stacks(after) if crash else after)
    return last_traceback("\n".join(text.rstrip().splitlines()[-_LINES_OF_TRACE:]))


def _two_stacks(text: str) -> str:
    """Reduce a faulthandler dump to the stacks of the current and the main thread."""
    # faulthandler writes the main thread last, so keep the last stack and the current thread's.
    stacks = [match[0] for match in _STACK.finditer(text)]
    others = [stack for stack in stacks[:-1] if not stack.startswith("Current")]
    for stack in others:
        text = text.replace(stack, "", 1)
    text = _MODULES.sub("", text).rstrip()
    return f"{text}\n\n({len(others)} other threads are left out.)" if others else text


_AGAIN_HINT = "A second one kills them immediately."


def closing_words(
    judged: Verdict, how: str, trace: str, *, size: int, where: str = "", host: str = ""
) -> str:
    """Return the last lines of a failed run, which usually end with a traceback.

    Args:
        judged: The rank to blame.
        how: The rank's exit status in words.
        trace: The traceback of the rank that failed or waited.
        size: Number of ranks.
        where: The line of user code that the waiting rank was executing.
        host: The host of the blamed rank, or "" on a single host.

    Returns:
        The lines, or "" if the run had only one rank, and it exited on its own. Its output, which
        explains the failure, is already visible.
    """
    by_itself = how.startswith("exit code")
    if size == 1:
        return "" if by_itself else f"\nshardwise: the program was ended by {how}.\n"
    who = f"rank {judged.rank} of {size}" + (f" on {host}" if host else "")
    if judged.late:
        return (
            f"\nshardwise: {who} did not arrive, and reported nothing until it was ended. Rank "
            f"{judged.waiting} was waiting for it:\n\n{trace}\n"
        )
    if judged.waiting is not None:
        return (
            f"\nshardwise: {who} ended ({how}) while the others were still training.\n"
            "All ranks must take the same number of steps: look for an exit, return or break "
            f"that only rank {judged.rank} takes.\n"
            f"Rank {judged.waiting} was waiting for it here:\n\n{where or trace}\n"
        )
    head = f"{who} failed ({how})" if by_itself else f"{who} was ended by {how}"
    last = f" Its last output:\n\n{trace}" if trace else ""
    return f"\nshardwise: {head}.{last}\n"


def unjoined_copies(size: int) -> str:
    """Return the last lines of a run whose `size` ranks never connected to one another."""
    return (
        "\nshardwise: no rank called sw.init or hvd.init. Unless a library connected them, "
        f"{size} independent copies of the program have run, and each did all of the work. To "
        "train as one: world = sw.init() and an sw.Engine, or shardwise.horovod in a Horovod "
        "script.\n"
    )


def refusal_words(sentence: str, ranks: Sequence[int], size: int) -> str:
    """Return the last lines of a run in which several ranks reported the same refusal.

    Args:
        sentence: The error message.
        ranks: The ranks that reported it. The launcher stopped the others before they could.
        size: Number of ranks.
    """
    who = "" if len(ranks) == size else f"rank {min(ranks)} of {size}: "
    return f"\nshardwise: {who}{sentence}\n"


def in_few_words(
    judged: Verdict, how: str, size: int, report: ErrorReport | None
) -> tuple[str, str]:
    """Describe a failure in two short texts: what happened to which rank, and why."""
    who = "the program" if size == 1 else f"rank {judged.rank} of {size}"
    if judged.late:
        return f"{who} did not arrive", report.message.partition("\n")[0] if report else ""
    if judged.waiting is not None:
        return f"{who} ended", "while the others were still training"
    if report is not None:
        return f"{who} failed", report.message.partition("\n")[0]
    return (f"{who} failed" if how.startswith("exit code") else f"{who} was ended"), (
        re.split(r"[,:] ", how)[0]
    )


def saving_line(asked: signal.Signals) -> str:
    """Return the line that the launcher prints when ranks save before they exit."""
    return f"shardwise: {asked.name}: the ranks save after this step. {_AGAIN_HINT}\n"


def killed_line(rank: int, how: str) -> str:
    """Return the line that the launcher prints if the other ranks continue after one was killed."""
    cause, _, advice = how.partition(". ")
    # A rank that leaves has printed why, and then sends itself this signal.
    cause = "SIGTERM" if cause.startswith("SIGTERM") else cause
    rest = f" {advice}." if advice else ""
    return (
        f"shardwise: rank {rank} ended ({cause}). The others continue without it (--survive).{rest}"
        "\n"
    )


def lost_host_line(why: str, environ: Mapping[str, str]) -> str:
    """Return the line that the launcher prints if the other ranks continue without a host.

    Args:
        why: The reason, as a sentence.
        environ: Environment variables. torchrun sets some of them.
    """
    waits = environ.get("GROUP_WORLD_SIZE", "1") != "1"
    rest = " After the run, torchrun may wait up to 300 s for this host." if waits else ""
    return f"shardwise: {why} The others continue without it (--survive).{rest}\n"


def spare_line(rank: int, how: str) -> str:
    """Return the line that the launcher prints if a spare exits before it has joined the others."""
    return (
        f"shardwise: spare rank {rank} ended ({how}) before it joined the others. The run "
        "continues without this spare (--spares).\n"
    )


def given_up_line(rank: int, times: int, steps: int) -> str:
    """Return the line that the launcher prints if it does not start a lost rank again."""
    return (
        f"shardwise: rank {rank} is not started again, because it has ended {times} times in "
        f"succession within {steps} steps after it joined the others (--spares).\n"
    )


def unsaved_line(asked: signal.Signals, progress: Progress | None) -> str:
    """Return the last line of a run that was stopped: what is lost, and the newest checkpoint.

    Returns "" if no step is lost and there is no checkpoint.
    """
    if progress is None or not progress.step:
        return ""
    path = printable(from_here(progress.checkpoint)).replace("\n", "\\n")
    newest = f" The last checkpoint is {path}." if path else ""
    by = "Ctrl-C" if asked == signal.SIGINT else asked.name
    if progress.kept >= progress.step:
        return f"shardwise: {by} ended the run at step {progress.step}.{newest}\n" if newest else ""
    hint = " To save before the end, send SIGTERM instead." if asked == signal.SIGINT else ""
    return (
        f"shardwise: {by} ended the run at step {progress.step} without a save. A new start "
        f"continues {resume_point(progress)}.{newest}{hint if progress.saves_when_asked else ''}\n"
    )


def stopping_line(asked: signal.Signals, size: int, *, again: bool, broken: str = "") -> str:
    """Return the line that the launcher prints when it stops the ranks.

    Args:
        asked: The signal that stops the run. SIGPIPE means that the output cannot be written.
        size: Number of ranks.
        again: True if this is the second signal.
        broken: Why the output cannot be written.
    """
    by = {signal.SIGINT: "Ctrl-C", signal.SIGPIPE: broken}
    reason = by.get(asked, asked.name)
    ranks = "the program" if size == 1 else f"{size} ranks"
    if again:
        return f"shardwise: {reason} again: killing {ranks}.\n"
    hint = f" {_AGAIN_HINT}" if asked == signal.SIGINT else ""
    return f"shardwise: {reason}: stopping {ranks}.{hint}\n"


def lost_hosts(losses: Sequence[str]) -> str:
    """Return one line per lost host, with the reason, or "" if there are no lost hosts."""
    return "".join(f"\nshardwise: {why}\n" for why in losses)


GIGABYTE = 10**9

SHORT_MEMORY = 0.1
"""A host is short of memory if a smaller fraction of it is available."""

UNCAUGHT = "exit code 1"
"""How a Python process exits after an uncaught exception."""

_SIGNAL_CAUSES = {
    signal.SIGSEGV: "a crash in native code: a driver, an extension, or a use of freed memory",
    signal.SIGABRT: "native code aborted; its message is above",
    signal.SIGFPE: "a crash in native code: an integer division by zero",
    signal.SIGILL: "an instruction that this CPU lacks: a package was built for another CPU",
    signal.SIGTERM: "something outside ended it: a scheduler's limit, or a person",
    signal.SIGINT: "it was interrupted",
    signal.SIGHUP: "its terminal was closed",
    signal.SIGPIPE: "the reader of its output was gone",
    signal.SIGXCPU: "it reached the limit of CPU time (ulimit -t)",
    signal.SIGXFSZ: "a file reached the limit of file sizes (ulimit -f)",
}


def describe_exit(code: int, *, before: HostMemory, now: HostMemory, peak: int) -> str:
    """Describe how a process exited, and the most likely cause.

    Args:
        code: The exit code, or the negative signal number.
        before: The host's memory when the process started.
        now: The host's memory now.
        peak: The peak resident set size of the process, in bytes.
    """
    if code >= 0:
        by_signal = signal_name(code - 128) if code > 128 else ""
        shell = f" (a shell's code for {by_signal})" if by_signal.startswith("SIG") else ""
        return f"exit code {code}{shell}"
    name = signal_name(-code)
    if -code == signal.SIGKILL:
        return f"{name}, {_killed(before, now, peak)}"
    if -code == signal.SIGBUS:
        return f"{name}: {_bus_error()}"
    words = _SIGNAL_CAUSES.get(signal.Signals(-code)) if name.startswith("SIG") else None
    return f"{name}: {words}" if words else name


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _killed(before: HostMemory, now: HostMemory, peak: int) -> str:
    is_short = False
    used = f"Its memory had reached {_gigabytes(peak)}"
    if now.total is not None and now.available is not None:
        total, free = _gigabytes(now.total), _gigabytes(now.available)
        used += f"; the host has {total}, and {free} are free now"
        # The memory of the killed process is free again.
        is_short = now.available - peak < SHORT_MEMORY * now.total
    if before.kills is None or now.kills is None:
        who = "most likely by the out-of-memory killer, or by kill -9"
    elif now.kills > before.kills:
        who = "by the out-of-memory killer, according to the kernel"
    else:
        who = "by kill -9 or another program: the kernel reports no out-of-memory kill"
        # Programs such as systemd-oomd kill before the kernel does.
        if not is_short:
            return who
    return (
        f"{who}. {used}. To use less memory: a smaller --micro-batch-size, a higher --zero, fewer "
        "ranks on this host, or fewer DataLoader workers"
    )


def _bus_error() -> str:
    free = ""
    if Path("/dev/shm").is_dir():
        usage = shutil.disk_usage("/dev/shm")
        free = f" ({_gigabytes(usage.free)} of {_gigabytes(usage.total)} free now)"
    return (
        f"shared memory may be full: DataLoader workers pass batches through /dev/shm{free}. Make "
        "it larger (docker run --shm-size) or use fewer workers"
    )


def _gigabytes(count: int) -> str:
    return f"{count / GIGABYTE:.1f} GB"


OS_ERROR_HINTS = {
    errno.ENOSPC: "free some space on that disk",
    errno.EDQUOT: "free some of this user's quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f unlimited)",
    errno.EMFILE: "raise the limit on open files (ulimit -n), or start fewer ranks here",
    errno.ENFILE: "this host has too many files open: start fewer ranks here",
    errno.EAGAIN: "raise the limit on processes (ulimit -u), or start fewer ranks here",
    errno.ENOMEM: "start fewer ranks here, or raise the limit on memory (ulimit -v)",
    errno.EACCES: "check its permissions, or name another one",
    errno.EPERM: "check its permissions, or name another one",
    errno.EROFS: "name a place on a writable file system",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOTDIR: "a part of its path is a file: name another place",
    errno.EISDIR: "it is a folder: name a file",
    errno.EEXIST: "it exists already: name another one",
    errno.ELOOP: "its symbolic links form a loop: name another one",
    errno.ENOENT: "check that it exists",
}


def disk_hint(error: OSError, place: Path) -> str:
    """Return advice for a disk error at the path `place`, without a final full stop.

    Returns "" if there is no advice for this error.
    """
    if error.errno == errno.ENOSPC:
        # "No space left on device" may also mean that no inodes are left.
        with suppress(OSError):
            found = os.statvfs(next(f for f in (place, *place.absolute().parents) if f.exists()))
            if found.f_files and not found.f_favail:
                return "its file system can hold no more files (no inodes left): remove some there"
    return OS_ERROR_HINTS.get(error.errno or 0, "")


def os_error_sentence(error: OSError, place: Path | None = None) -> str:
    """Return the message of an OSError as a sentence, with advice.

    Args:
        error: The error.
        place: The path to name if the error itself has none.
    """
    named = (error.filename, error.filename2) if error.filename is not None else (place,)
    files = [str(name)[:200] for name in named if name is not None]
    what = f"{' to '.join(files)}: " if files else ""
    hint = disk_hint(error, Path(*files[:1]))
    why = error.strerror or str(error) or type(error).__name__
    return f"{what}{why}" + (f"; {hint}." if hint else ". Check that this file can be used.")
