"""Explains a rank that torch's watchdog of NCCL has ended, from what that wrote to stderr. Pure.

NCCL's calls do not stop the host, so no line of the script is in one that fails: a thread of torch
sees it and aborts the process (SIGABRT), which leaves no error file. What it wrote says which call
failed; the other ranks, and what they wrote, say more. Python's faulthandler writes after it where
each thread was, the main one last.
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
"""What the thread that watches the watchdog says before it ends the process."""

_GROUP = re.compile(r"\[PG ID \d+ PG GUID (?P<name>[^\s(]+)")
"""A process group, by the name that all of its ranks know; the ID is a count of this process."""

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
    """A call for which a rank has waited too long: its words, such as all-reduce number 7.

    Calls are counted in their process group, `group`; "" where that is not known.
    """

    call: str
    seconds: float
    group: str = ""

    def is_beside(self, other: Waited) -> bool:
        """Whether they are of two process groups, so that their numbers say nothing together."""
        return "" not in (self.group, other.group) and self.group != other.group


@dataclass(frozen=True)
class Failed:
    """Another failure of NCCL or of the device, as the watchdog told it: the first line, and
    those that follow."""

    why: str
    more: str = ""

    @property
    def is_loss(self) -> bool:
        """Whether another rank, or the way to it, was lost."""
        said = f"{self.why}\n{self.more}".lower()
        return any(sign in said for sign in _LOST)

    @property
    def is_of_device(self) -> bool:
        """Whether the device has failed, or what this rank gave it to do."""
        return "CUDA error" in self.why


def parse(tail: str) -> Waited | Failed | None:
    """What the watchdog has told of, in the last that a rank wrote to stderr; None if nothing."""
    late, ended = _TIMEOUT.search(tail), _ENDED.search(tail)
    if late is not None and (ended is None or late.start() < ended.end()):
        verb = _VERBS.get(late["kind"], late["kind"].strip("_").lower())
        group = _GROUP.search(tail, late.end())  # the watchdog's next line says it
        name = "" if group is None else group["name"]
        return Waited(f"{verb} number {late['number']}", int(late["ms"]) / 1000, name)
    if ended is None:
        stuck = _STUCK.search(tail)
        return (
            None
            if stuck is None
            else Failed(
                f"torch's watchdog of NCCL stood still for {stuck['seconds']} s, so that a call of "
                "CUDA or NCCL has not returned there"
            )
        )
    return Failed(re.sub(r"^\[.*?\] ", "", ended["why"]).rstrip(". "), ended["more"].strip())


def reports(tails: Mapping[int, str], times: Mapping[int, float], size: int) -> list[ErrorReport]:
    """The error reports of the ranks, of `size`, that the watchdog has ended: what they would have
    said. `tails` are the last that ranks wrote, `times` when they ended."""
    told = {rank: found for rank, text in tails.items() if (found := parse(text)) is not None}
    return [
        _report(rank, f"Rank {rank} of {size} {_words(rank, told)}", told[rank], times, tails)
        for rank in sorted(told)
    ]


def _words(rank: int, told: Mapping[int, Waited | Failed]) -> str:
    mine = told[rank]
    if isinstance(mine, Waited):
        return (
            f"waited {mine.seconds:.0f} s in {mine.call} over NCCL for a rank that did not come."
            f"{_others(rank, mine, told)} Every rank must make the same calls in the same order; "
            "--timeout sets how long to wait, --warn-after when the ranks' lines are shown."
        )
    if mine.is_loss:
        return (
            f"lost another rank, or the way to it, in a call of NCCL: {mine.why}. The cause is on "
            "the rank that went away, see its own output; or in the network: shardwise doctor "
            "looks at it."
        )
    if mine.is_of_device:
        return (
            f"failed on its GPU, which torch's watchdog of NCCL was the first to see: {mine.why}. "
            "The GPU tells of an error some calls later: with CUDA_LAUNCH_BLOCKING=1 the line "
            "that made it raises; where no line did (ECC, NVLink, Xid), the GPU is at fault."
        )
    return f"failed in a call of NCCL: {mine.why}. NCCL_DEBUG=INFO tells more."


def _others(rank: int, mine: Waited, told: Mapping[int, Waited | Failed]) -> str:
    """Where other ranks waited, if that was in another call."""
    apart = [
        f"rank {other} waited in {found.call}"
        + (" of another process group" if found.is_beside(mine) else "")
        for other, found in sorted(told.items())
        if other != rank
        and isinstance(found, Waited)
        and (found.call != mine.call or found.is_beside(mine))
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
    if isinstance(found, Waited) or not found.is_of_device:
        message = f"CollectiveError: {message}"
    text = f"{message} [{where}]" if where else message
    if isinstance(found, Failed) and found.more:
        text += f"\n\n{found.more}"
    return ErrorReport(
        rank=rank,
        time=times[rank],
        secondary=isinstance(found, Waited) or found.is_loss,
        message=message,
        text=text,
        where=where,
    )


def users_line(tail: str) -> str:
    """The innermost line of the user's own at which the main thread was; "" where no stack says."""
    *_, main = _THREAD.split(tail)
    for frame in _FRAME.finditer(main):
        if is_users(Path(frame["file"])):
            code = linecache.getline(frame["file"], int(frame["line"])).strip()
            place = f"{from_here(frame['file'])}:{frame['line']}"
            return f"{place}: {code}" if code else place
    return ""
