"""Explains why torch's NCCL watchdog aborted a rank, based on the rank's output. Does no I/O.

NCCL calls do not block the host, so a failure does not raise an exception in the script. Instead, a
torch thread (the watchdog) detects the failure and aborts the process (SIGABRT), which leaves no
error file. The watchdog prints the call that failed. Python's faulthandler then prints the stack of
each thread, the main thread last. Taken together, the outputs of several ranks show which rank is
missing.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.messages.printable import from_here
from shardwise.net.error_file import ErrorReport, is_users

_TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+), "
    r"OpType=(?P<kind>\w+),.*?\) ran for (?P<ms>\d+) milliseconds"
)
_ENDED = re.compile(
    r"(?:Process group watchdog|NCCL watchdog) thread terminated with exception: (?P<why>[^\n]+)"
    r"(?P<more>(?:\n(?!Exception raised from|frame #)[^\n]+)*)"
)
_STUCK = re.compile(r"ProcessGroupNCCL's watchdog got stuck for (?P<seconds>\d+) seconds")
"""Matches the message of the thread that monitors the watchdog and aborts the process."""

_GROUP = re.compile(r"\[PG ID \d+ PG GUID (?P<name>[^\s(]+)")
"""Matches the name of a process group, which is the same on all its ranks, unlike the ID."""

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in ', re.MULTILINE)

_LOST = ("remote process exited", "ncclremoteerror", "connection closed", "connection reset")

_VERBS = {
    "ALLREDUCE": "all-reduce",
    "ALLGATHER": "all-gather",
    "_ALLGATHER_BASE": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "_REDUCE_SCATTER_BASE": "reduce-scatter",
    "BROADCAST": "broadcast",
    "ALLTOALL": "all-to-all",
    "ALLTOALL_BASE": "all-to-all",
}


@dataclass(frozen=True)
class Waited:
    """A collective in which a rank waited until the timeout.

    Args:
        call: The call in words, such as "all-reduce number 7". Each process group numbers its own
            calls.
        seconds: Time that the rank waited.
        group: Name of the process group, or "" if unknown.
    """

    call: str
    seconds: float
    group: str = ""

    def is_unrelated_to(self, other: Waited) -> bool:
        """Return whether the process groups differ, so that their call numbers are unrelated."""
        return "" not in (self.group, other.group) and self.group != other.group


@dataclass(frozen=True)
class Failed:
    """A failure of NCCL or the device other than a timeout.

    Args:
        why: First line of the message.
        more: The other lines.
    """

    why: str
    more: str = ""

    @property
    def is_loss(self) -> bool:
        """True if another rank, or the connection to it, was lost."""
        said = f"{self.why}\n{self.more}".lower()
        return any(sign in said for sign in _LOST)

    @property
    def is_of_device(self) -> bool:
        """True if the device or a kernel of this rank failed."""
        return "CUDA error" in self.why


def parse(tail: str) -> Waited | Failed | None:
    """Return the failure that the watchdog reported in `tail`, a rank's last output, or None."""
    late, ended = _TIMEOUT.search(tail), _ENDED.search(tail)
    # After a timeout, the watchdog reports the timeout, and then that it terminates because of it.
    if late is not None and (ended is None or late.start() < ended.end()):
        verb = _VERBS.get(late["kind"], late["kind"].strip("_").lower())
        group = _GROUP.search(tail, late.end())  # the watchdog's next line contains it
        name = "" if group is None else group["name"]
        return Waited(f"{verb} number {late['number']}", int(late["ms"]) / 1000, name)
    if ended is None:
        # If the watchdog itself hangs, it reports nothing, but the thread that monitors it does.
        stuck = _STUCK.search(tail)
        return (
            None
            if stuck is None
            else Failed(
                f"torch's NCCL watchdog was stuck for {stuck['seconds']} s in a call of CUDA or "
                "NCCL that did not return"
            )
        )
    return Failed(re.sub(r"^\[.*?\] ", "", ended["why"]).rstrip(". "), ended["more"].strip())


def reports(tails: Mapping[int, str], times: Mapping[int, float], size: int) -> list[ErrorReport]:
    """Return error reports for the ranks that the watchdog aborted.

    Args:
        tails: Last lines of each rank's output, by rank.
        times: Exit time of each rank, in seconds since the epoch, by rank.
        size: Number of ranks.
    """
    told = {rank: found for rank, text in tails.items() if (found := parse(text)) is not None}
    return [
        _report(rank, f"Rank {rank} of {size} {_words(rank, told)}", told[rank], times, tails)
        for rank in sorted(told)
    ]


def _words(rank: int, told: Mapping[int, Waited | Failed]) -> str:
    mine = told[rank]
    if isinstance(mine, Waited):
        return (
            f"waited {mine.seconds:.0f} s in {mine.call} over NCCL for a rank that did not arrive."
            f"{_others(rank, mine, told)} Every rank must make the same calls in the same order. "
            "--timeout sets how long to wait, --warn-after when to show the ranks' lines."
        )
    if mine.is_loss:
        return (
            f"lost another rank, or the connection to it, in a call of NCCL: {mine.why}. The cause "
            "is on the lost rank (see its own output), or in the network (run shardwise doctor)."
        )
    if mine.is_of_device:
        return (
            f"failed on its GPU, and torch's NCCL watchdog was the first to notice: {mine.why}. "
            "The GPU reports an error only some calls later. With CUDA_LAUNCH_BLOCKING=1 the line "
            "at fault raises the error; if no line does (ECC, NVLink, Xid), the GPU is at fault."
        )
    return f"failed in a call of NCCL: {mine.why}. Set NCCL_DEBUG=INFO to find out more."


def _others(rank: int, mine: Waited, told: Mapping[int, Waited | Failed]) -> str:
    """Describe which other ranks waited in different calls, or return "" if none did."""
    apart = [
        f"rank {other} waited in {found.call}"
        + (" of another process group" if found.is_unrelated_to(mine) else "")
        for other, found in sorted(told.items())
        if other != rank
        and isinstance(found, Waited)
        and (found.call != mine.call or found.is_unrelated_to(mine))
    ]
    return f" Meanwhile {', '.join(apart)}." if apart else ""


def _report(
    rank: int,
    message: str,
    found: Waited | Failed,
    times: Mapping[int, float],
    tails: Mapping[int, str],
) -> ErrorReport:
    where = users_line(tails[rank])
    # A device error is not the fault of the collective that happened to notice it.
    if isinstance(found, Waited) or not found.is_of_device:
        message = f"CollectiveError: {message}"
    text = f"{message} [{where}]" if where else message
    if isinstance(found, Failed) and found.more:
        text += f"\n\n{found.more}"
    return ErrorReport(
        rank=rank,
        time=times[rank],
        # In both cases the cause is on another rank.
        secondary=isinstance(found, Waited) or found.is_loss,
        message=message,
        text=text,
        where=where,
    )


def users_line(tail: str) -> str:
    """Return the innermost line of user code on the main thread's stack, or "" if unknown."""
    # faulthandler writes the main thread last.
    *_, main = _THREAD.split(tail)
    for frame in _FRAME.finditer(main):
        if is_users(Path(frame["file"])):
            code = linecache.getline(frame["file"], int(frame["line"])).strip()
            place = f"{from_here(frame['file'])}:{frame['line']}"
            return f"{place}: {code}" if code else place
    return ""
