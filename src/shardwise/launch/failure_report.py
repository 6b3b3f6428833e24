"""Finds the rank that caused a failure, and says how the run ended in words.

`judge` picks the rank to blame, `described_exit` says what its exit code most likely means,
`closing_words` builds the last lines of a run. Nothing here starts or ends a process.
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
from shardwise.net.error_file import ErrorReport
from shardwise.net.progress import Progress
from shardwise.net.restarts import resume_point

_CHAINED = (
    "During handling of the above exception",
    "The above exception was the direct cause",
)
_LINES_WITHOUT_TRACE = 20

_LINES_OF_TRACE = 250
"""How far back from the end of its output a rank's last traceback may begin: two stacks of
faulthandler, which have 100 lines each, and some more."""

_CRASH = "Fatal Python error:"

_STACK = re.compile(r"^(?:Current thread|Thread) 0x.*\n(?:  .*\n?)*\n*", re.MULTILINE)
"""The stack of one thread, as faulthandler writes it."""

_MODULES = re.compile(r"^Extension modules: .*\n?", re.MULTILINE)

_TRACE = re.compile(
    r"^[^|\n]*?((?:  \+ Exception Group )?Traceback \(most recent call last\):"
    r"|Fatal Python error:)",
    re.MULTILINE,
)
"""The start of a traceback, maybe behind an unfinished progress bar; not inside a group's own."""


@dataclass(frozen=True, kw_only=True)
class ExitStatus:
    """How a rank ended.

    `code` is as subprocess has it (negative for a signal), `time` in seconds since the epoch,
    `stopped` when the launcher had asked it to end by then.
    """

    rank: int
    code: int
    time: float
    stopped: bool = False


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The rank to blame and the exit code of the run.

    `waiting` is a rank that could not go on because of `rank`, None where that failed itself.
    `late`: `rank` did not come, nor say anything until it was ended; else it had ended well, but
    too early.
    """

    rank: int
    exit_code: int
    waiting: int | None = None
    late: bool = False


def judge(ends: Sequence[ExitStatus], reports: Mapping[int, ErrorReport]) -> Verdict | None:
    """Judge a run whose ranks have all ended; None when all ended well.

    The cause is the first failure that is not merely about another rank. Where there is none
    but a rank ended by itself with code 0, that rank left too early; where none did but those that
    waited name one that said nothing, it is that one.
    """
    failures = [end for end in ends if end.code != 0 and _failed_by_itself(end, reports)]
    if not failures:
        return None
    first = min(failures, key=lambda end: _moment(end, reports))
    if _is_secondary(first, reports):
        left = [end for end in ends if end.code == 0 and not end.stopped]
        if left:
            early = min(left, key=lambda end: end.time)
            return Verdict(rank=early.rank, exit_code=1, waiting=first.rank)
        late = _silent_rank(ends, failures, reports)
        if late is not None:
            return late
    return Verdict(rank=first.rank, exit_code=_exit_code(first))


def _silent_rank(
    ends: Sequence[ExitStatus], failures: Sequence[ExitStatus], reports: Mapping[int, ErrorReport]
) -> Verdict | None:
    """Blame the rank that the first of the waiting ones names, and that had to be ended.

    Where none is named, that is the only one that said nothing.
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
    """Whether the cause of a failure is among `ends`: not all of them lost another rank."""
    return any(not _is_secondary(end, reports) for end in ends)


def is_consequence(judged: Verdict, reports: Mapping[int, ErrorReport]) -> bool:
    """Whether all that failed had only lost others, so that the cause lies elsewhere."""
    found = reports.get(judged.rank if judged.waiting is None else judged.waiting)
    return found is not None and found.secondary


def common_refusal(ends: Sequence[ExitStatus], reports: Mapping[int, ErrorReport]) -> str:
    """Return the one refusal that all ranks have died of; "" where one of them ended otherwise.

    Those that were ended before they could say anything do not count.
    """
    own = [end.rank for end in ends if not end.stopped or end.rank in reports]
    found = {reports[rank].refusal if rank in reports else "" for rank in own}
    return found.pop() if len(found) == 1 else ""


def _failed_by_itself(end: ExitStatus, reports: Mapping[int, ErrorReport]) -> bool:
    """Whether a rank failed by itself, rather than because the launcher ended it."""
    return not end.stopped or end.rank in reports


def _is_secondary(end: ExitStatus, reports: Mapping[int, ErrorReport]) -> bool:
    return end.rank in reports and reports[end.rank].secondary


def _moment(end: ExitStatus, reports: Mapping[int, ErrorReport]) -> tuple[bool, float]:
    """The order of blame: causes before consequences, then by time."""
    time = reports[end.rank].time if end.rank in reports else end.time
    return _is_secondary(end, reports), time


def _exit_code(end: ExitStatus) -> int:
    if end.stopped:
        return 1
    return 128 - end.code if end.code < 0 else end.code


def last_traceback(tail: str) -> str:
    """Cut the last traceback and those it is chained to from a rank's output; else some lines."""
    text = tail.rstrip()
    starts = [match.start(1) for match in _TRACE.finditer(text)]
    if not starts:
        return "\n".join(text.splitlines()[-_LINES_WITHOUT_TRACE:])
    start = starts.pop()
    while starts and any(words in text[starts[-1] : start] for words in _CHAINED):
        start = starts.pop()
    return text[start:]


def last_words(tail: str) -> str:
    """Cut the last traceback from what a rank without an error report has written; of a crash the
    stacks of the current and of the main thread; else some lines."""
    before, crash, after = tail.rpartition(_CRASH)
    text = before + crash + (_two_stacks(after) if crash else after)
    return last_traceback("\n".join(text.rstrip().splitlines()[-_LINES_OF_TRACE:]))


def _two_stacks(text: str) -> str:
    """faulthandler's dump without the stacks of threads that are neither the current nor, as the
    last one is, the main one."""
    stacks = [match[0] for match in _STACK.finditer(text)]
    others = [stack for stack in stacks[:-1] if not stack.startswith("Current")]
    for stack in others:
        text = text.replace(stack, "", 1)
    text = _MODULES.sub("", text).rstrip()
    return f"{text}\n\n({len(others)} other threads are left out.)" if others else text


_KILL_HINT = "Once more kills them at once."


def closing_words(
    judged: Verdict, how: str, trace: str, *, size: int, where: str = "", host: str = ""
) -> str:
    """Build the closing words of a failed run, with the traceback of the rank at fault last.

    `how` says how the blamed rank ended, `where` at which line of the user's the one that waited
    for it was, `host` where it ran if there are several. A run of one rank that ended by itself
    has said all.
    """
    by_itself = how.startswith("exit code")
    if size == 1:
        return "" if by_itself else f"\nshardwise: the program was ended by {how}.\n"
    who = f"rank {judged.rank} of {size}" + (f" on {host}" if host else "")
    if judged.late:
        return (
            f"\nshardwise: {who} did not come, nor say anything until it was ended. Rank "
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
    last = f" Its last words:\n\n{trace}" if trace else ""
    return f"\nshardwise: {head}.{last}\n"


def unjoined_copies(size: int) -> str:
    """The closing words of a run of `size` ranks, none of which joined the others."""
    return (
        f"\nshardwise: no rank called sw.init or hvd.init: unless a library joined them, {size} "
        "copies of the program have run, each by itself with all of the work. To train as one: "
        "world = sw.init() and an sw.Engine, or shardwise.horovod in a script of Horovod's.\n"
    )


def refusal_words(sentence: str, ranks: Sequence[int], size: int) -> str:
    """The closing words of a run in which `ranks`, of `size`, died of one `sentence`; the others
    were ended before they came to it."""
    who = "" if len(ranks) == size else f"rank {min(ranks)} of {size}: "
    return f"\nshardwise: {who}{sentence}\n"


def in_few_words(
    judged: Verdict, how: str, size: int, report: ErrorReport | None
) -> tuple[str, str]:
    """Say in a few words what happened to whom, and why."""
    who = "the program" if size == 1 else f"rank {judged.rank} of {size}"
    if judged.late:
        return f"{who} did not come", report.message.partition("\n")[0] if report else ""
    if judged.waiting is not None:
        return f"{who} ended", "while the others were still training"
    if report is not None:
        return f"{who} failed", report.message.partition("\n")[0]
    return (f"{who} failed" if how.startswith("exit code") else f"{who} was ended"), (
        re.split(r"[,:] ", how)[0]
    )


def saving_line(asked: signal.Signals) -> str:
    """The line when ranks that were asked to end save first."""
    return f"shardwise: {asked.name}: ranks save after this step first. {_KILL_HINT}\n"


def unsaved_line(asked: signal.Signals, progress: Progress | None) -> str:
    """The closing words of a run that someone ended without a save; "" if it has lost no step."""
    if progress is None or not progress.step or progress.kept >= progress.step:
        return ""
    by = "Ctrl-C" if asked == signal.SIGINT else asked.name
    hint = " To save before the end, send SIGTERM instead." if asked == signal.SIGINT else ""
    return (
        f"shardwise: {by} ended the run at step {progress.step} without a save. A new start "
        f"continues {resume_point(progress)}.{hint if progress.saves_when_asked else ''}\n"
    )


def stopping_line(asked: signal.Signals, size: int, *, again: bool, broken: str = "") -> str:
    """Build the line for when someone wants the run to end, or its output is `broken`."""
    by = {signal.SIGINT: "Ctrl-C", signal.SIGPIPE: broken}
    reason = by.get(asked, asked.name)
    ranks = "the program" if size == 1 else f"{size} ranks"
    if again:
        return f"shardwise: {reason} again: killing {ranks}.\n"
    hint = f" {_KILL_HINT}" if asked == signal.SIGINT else ""
    return f"shardwise: {reason}: stopping {ranks}.{hint}\n"


def lost_hosts(losses: Sequence[str]) -> str:
    """List the hosts that went out of reach, each with its reason; "" where there are none."""
    return "".join(f"\nshardwise: {why}\n" for why in losses)


GIGABYTE = 10**9

UNCAUGHT = "exit code 1"
"""The end of a Python process by an error that nobody caught."""

_SIGNAL_CAUSES = {
    signal.SIGSEGV: "a crash in native code: a driver, an extension, or memory used after its end",
    signal.SIGABRT: "native code gave up; what it said stands above",
    signal.SIGFPE: "a crash in native code: an integer division by zero",
    signal.SIGILL: "an instruction that this CPU does not have: a package built for another one",
    signal.SIGTERM: "something outside asked it to end: a scheduler's limit, or a person",
    signal.SIGINT: "it was interrupted",
    signal.SIGHUP: "its terminal was closed",
    signal.SIGPIPE: "what read its output was gone",
    signal.SIGXCPU: "it used up its limit of CPU time (ulimit -t)",
    signal.SIGXFSZ: "a file grew beyond its limit (ulimit -f)",
}


def described_exit(code: int, *, before: HostMemory, now: HostMemory, peak: int) -> str:
    """Say how a process ended and what it most likely means: `code` is negative for a signal.

    `before` and `now` are the host's memory at the start and after, `peak` the process's largest
    resident set in bytes.
    """
    if code >= 0:
        return f"exit code {code}{_shell_signal(code)}"
    name = signal_name(-code)
    if -code == signal.SIGKILL:
        return f"{name}, {_killed(before, now, peak)}"
    if -code == signal.SIGBUS:
        return f"{name}: {_bus_error()}"
    words = _SIGNAL_CAUSES.get(signal.Signals(-code)) if name.startswith("SIG") else None
    return f"{name}: {words}" if words else name


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _shell_signal(code: int) -> str:
    if code <= 128 or not signal_name(code - 128).startswith("SIG"):
        return ""
    return f" (a shell's word for {signal_name(code - 128)})"


def _killed(before: HostMemory, now: HostMemory, peak: int) -> str:
    if before.kills is not None and now.kills is not None and now.kills > before.kills:
        who = "by the out-of-memory killer: the kernel has counted it"
    else:
        who = "most likely by the out-of-memory killer (if nobody typed kill -9)"
    used = f"Its memory had reached {_gigabytes(peak)}"
    if now.total is not None and now.available is not None:
        total, free = _gigabytes(now.total), _gigabytes(now.available)
        used += f"; the host has {total}, of which {free} are free now"
    return (
        f"{who}. {used}. Against a lack of memory: a smaller --micro-batch-size, "
        "a higher --zero, fewer ranks on this host, or fewer DataLoader workers"
    )


def _bus_error() -> str:
    free = ""
    if Path("/dev/shm").is_dir():
        usage = shutil.disk_usage("/dev/shm")
        free = f" ({_gigabytes(usage.free)} of {_gigabytes(usage.total)} free now)"
    return (
        f"shared memory may be full: /dev/shm{free}, through which DataLoader workers hand over "
        "batches. Make it larger (docker run --shm-size) or use fewer workers"
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
    errno.EROFS: "name a place on a file system that may be written to",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOTDIR: "a part of its path is a file: name another place",
    errno.EISDIR: "it is a folder: name a file",
    errno.EEXIST: "it is there already: name another one",
    errno.ELOOP: "its links lead to each other: name another one",
    errno.ENOENT: "check that it exists",
}


def disk_hint(error: OSError, place: Path) -> str:
    """What to do about an error of the disk at `place`, without a full stop; "" if nothing is
    known. "No space left" may also mean that a file system holds no more files."""
    if error.errno == errno.ENOSPC:
        with suppress(OSError):
            found = os.statvfs(next(f for f in (place, *place.absolute().parents) if f.exists()))
            if found.f_files and not found.f_favail:
                return "its file system holds no more files (no inodes are left): remove some there"
    return OS_ERROR_HINTS.get(error.errno or 0, "")


def os_error_sentence(error: OSError, place: Path | None = None) -> str:
    """Say what the operating system refused, and what to do about it.

    `place` is the file concerned where the error itself may name none.
    """
    named = (error.filename, error.filename2) if error.filename is not None else (place,)
    files = [str(name)[:200] for name in named if name is not None]
    what = f"{' to '.join(files)}: " if files else ""
    hint = disk_hint(error, Path(*files[:1]))
    why = error.strerror or str(error) or type(error).__name__
    return f"{what}{why}" + (f"; {hint}." if hint else ". Check that this place can be used.")
