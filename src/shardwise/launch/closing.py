"""What a run says last: which rank failed and why, or who asked it to stop. Pure."""

import re
import signal
from collections.abc import Sequence

from shardwise.launch.report import Report
from shardwise.launch.verdict import Verdict

HINT = "Once more kills them at once."


def words(
    judged: Verdict, how: str, trace: str, *, size: int, where: str = "", host: str = ""
) -> str:
    """The closing words of a failed run, with the trace of the rank at fault last.

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


def copies(size: int) -> str:
    """The closing words of a run of `size` ranks, none of which joined the others."""
    return (
        f"\nshardwise: no rank called sw.init or hvd.init: unless a library joined them, {size} "
        "copies of the script have run, each by itself with all of the work. To train as one: "
        "world = sw.init() and an sw.Engine, or shardwise.horovod in a script of Horovod's.\n"
    )


def refusal(sentence: str, ranks: Sequence[int], size: int) -> str:
    """The closing words of a run in which `ranks`, of `size`, died of one `sentence`; the others
    were ended before they came to it."""
    who = "" if len(ranks) == size else f"rank {min(ranks)} of {size}: "
    return f"\nshardwise: {who}{sentence}\n"


def short(judged: Verdict, how: str, size: int, report: Report | None) -> tuple[str, str]:
    """The same in a few words: what happened to whom, and why."""
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


def saving(asked: signal.Signals) -> str:
    """The line when ranks that were asked to end save first."""
    return f"shardwise: {asked.name}: ranks save after this step first. {HINT}\n"


def stopping(asked: signal.Signals, size: int, *, again: bool, broken: str = "") -> str:
    """The line at the moment when someone wants the run to end, or its output is `broken`."""
    by = {signal.SIGINT: "Ctrl-C", signal.SIGPIPE: broken}
    reason = by.get(asked, asked.name)
    ranks = "the program" if size == 1 else f"{size} ranks"
    if again:
        return f"shardwise: {reason} again: killing {ranks}.\n"
    hint = f" {HINT}" if asked == signal.SIGINT else ""
    return f"shardwise: {reason}: stopping {ranks}.{hint}\n"


def lost(losses: Sequence[str]) -> str:
    """That hosts went out of reach, each with its reason; nothing where there are none."""
    return "".join(f"\nshardwise: {why}\n" for why in losses)
