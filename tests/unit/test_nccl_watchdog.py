"""The launcher's report about a rank that torch's NCCL watchdog has aborted."""

import signal
import threading
from pathlib import Path

import pytest

from shardwise.comm.nccl import Nccl
from shardwise.launch import failure_report, nccl_watchdog
from shardwise.launch.failure_report import ExitStatus, Verdict
from shardwise.launch.nccl_watchdog import Failed, Waited, parse, users_line

WORDS = Path(__file__).parents[1] / "system" / "scripts" / "nccl_watchdog.txt"


def late(rank: int = 0, number: int = 7, kind: str = "ALLREDUCE") -> str:
    """Return the output of torch 2.9 and later when a rank has waited for 600 seconds."""
    text = WORDS.read_text().replace("OpType=ALLREDUCE", f"OpType={kind}")
    return text.replace("SeqNum=7", f"SeqNum={number}").replace("Rank 0", f"Rank {rank}")


def ended(why: str) -> str:
    prefix = "[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated"
    return f"terminate called\n  what():  {prefix} with exception: {why}\nException raised from"


LOST = "NCCL error: remote process exited or there was a network error, NCCL version 2.27.5"
SYSTEM = "NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"
RESET = "ncclSystemError: System call failed.\nLast error:\nrecv: Connection reset by peer"
ASSERTED = "CUDA error: device-side assert triggered"
ADVICE = (
    "CUDA kernel errors might be asynchronously reported at some other API call.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1"
)

STUCK = (
    "[rank1]:[E1125 10:00:00.000000000 ProcessGroupNCCL.cpp:1870] [PG ID 0 PG GUID 0(default_pg) "
    "Rank 1] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in "
    "monitoring enqueued collectives."
)
NOT_RETURNED = (
    "torch's NCCL watchdog was stuck for 480 s in a call of CUDA or NCCL that did not return"
)


@pytest.mark.parametrize(
    ("tail", "found"),
    [
        ("", None),
        ("ValueError: all-reduce", None),
        (late(), Waited("all-reduce number 7", 600.027, "0")),
        (late(kind="_ALLGATHER_BASE"), Waited("all-gather number 7", 600.027, "0")),
        (late(kind="COALESCED"), Waited("coalesced number 7", 600.027, "0")),
        (late().partition("\n")[0], Waited("all-reduce number 7", 600.027)),
        (ended(LOST), Failed(LOST)),
        (ended(f"[Rank 0] {ASSERTED}\n{ADVICE}\n"), Failed(ASSERTED, ADVICE)),
        (ended(ASSERTED) + late(), Failed(ASSERTED)),
        (STUCK, Failed(NOT_RETURNED)),
        (late() + STUCK, Waited("all-reduce number 7", 600.027, "0")),
    ],
)
def test_parse(tail: str, found: Waited | Failed | None) -> None:
    assert parse(tail) == found


def said(tails: dict[int, str], size: int = 2) -> dict[int, str]:
    found = nccl_watchdog.reports(tails, dict.fromkeys(tails, 1.0), size)
    return {report.rank: report.message for report in found}


def test_report_of_timeout_names_call_and_advice() -> None:
    assert said({0: late(), 1: "nothing"}) == {
        0: "CollectiveError: Rank 0 of 2 waited 600 s in all-reduce number 7 over NCCL for a rank "
        "that did not arrive. Every rank must make the same calls in the same order. --timeout "
        "sets how long to wait, --warn-after when to show the ranks' lines."
    }


def test_report_names_different_calls_of_ranks() -> None:
    found = said({0: late(), 1: late(1, 9, "BROADCAST"), 2: late(2)}, 3)
    assert "did not arrive. Meanwhile rank 1 waited in broadcast number 9. Every" in found[0]
    assert "Meanwhile rank 0 waited in all-reduce number 7, rank 2 waited in all" in found[1]


def test_calls_of_two_process_groups_are_not_compared() -> None:
    beside = late(1).replace("PG ID 0 PG GUID 0(default_pg)", "PG ID 0 PG GUID 3(data)")
    found = said({0: late(), 1: beside, 2: late(2).replace("PG ID 0", "PG ID 4")}, 3)
    assert "Meanwhile rank 1 waited in all-reduce number 7 of another process group. E" in found[0]


STACKS = """Fatal Python error: Aborted

Thread 0x00007f2a (most recent call first):
  File "/home/me/reader.py", line 4 in read
  File "{threading}", line 975 in _bootstrap

Thread 0x00007f2b (most recent call first):
  File "{ours}", line 163 in read
  File "/home/me/train.py", line 31 in step
  File "/home/me/train.py", line 40 in <module>

Extension modules: numpy._core (total: 1)
"""


def test_finds_line_of_user_in_stacks() -> None:
    stacks = STACKS.format(threading=threading.__file__, ours=nccl_watchdog.__file__)
    assert users_line(late() + stacks) == "/home/me/train.py:31"
    assert users_line(late()) == ""


def test_report_of_lost_peer_points_to_peer() -> None:
    assert f"a call of NCCL: {LOST}. The cause is on the lost rank" in said({0: ended(LOST)})[0]
    assert f"Rank 0 of 2 failed in a call of NCCL: {SYSTEM}." in said({0: ended(SYSTEM)})[0]


@pytest.mark.parametrize(
    ("tail", "secondary"),
    [
        (late(), True),
        (ended(LOST), True),
        (ended(f"{SYSTEM}\n{RESET}"), True),
        (ended(SYSTEM), False),
        (ended(ASSERTED), False),
        (ended("CUDA error: an illegal memory access was encountered"), False),
        (ended("CUDA error: uncorrectable ECC error encountered"), False),
    ],
)
def test_only_timeout_or_loss_is_secondary(tail: str, secondary: bool) -> None:
    ends = [
        ExitStatus(rank=0, code=-signal.SIGABRT, time=1.0),
        ExitStatus(rank=1, code=-signal.SIGTERM, time=2.0, stopped=True),
    ]
    reports = {r.rank: r for r in nccl_watchdog.reports({0: tail}, {0: 1.0}, 2)}
    assert reports[0].secondary == secondary
    judged = failure_report.judge(ends, reports)
    assert judged is not None
    assert (judged.rank, judged.late) == (int(secondary), secondary)


def test_device_error_keeps_message_of_torch() -> None:
    [found] = nccl_watchdog.reports({0: ended(f"{ASSERTED}\n{ADVICE}")}, {0: 1.0}, 2)
    assert found.message.startswith("Rank 0 of 2 failed on its GPU")
    assert (
        f"{ASSERTED}. The GPU reports an error only some calls later. With CUDA_L" in found.message
    )
    assert found.text == f"{found.message}\n\n{ADVICE}"


def test_blames_silent_rank() -> None:
    ends = [
        ExitStatus(rank=0, code=-signal.SIGABRT, time=1.0),
        ExitStatus(rank=1, code=-signal.SIGTERM, time=2.0, stopped=True),
    ]
    reports = {r.rank: r for r in nccl_watchdog.reports({0: late()}, {0: 1.0}, 2)}
    assert failure_report.judge(ends, reports) == Verdict(rank=1, exit_code=1, waiting=0, late=True)


class Rows:
    """Rows of a collective. `seen` is the wait that was recorded while they were read."""

    def __init__(self, group: Nccl) -> None:
        self._group = group
        self.seen = None

    def cpu(self) -> str:
        wait = self._group.status_server.waits.longest()
        self.seen = wait and (wait.call, list(wait.missing()))
        return "the rows"


def test_reader_of_nccl_result_is_known_to_wait() -> None:
    import torch

    group = Nccl(1, 3, torch.device("cpu"))
    rows = Rows(group)
    assert group.read(rows) == "the rows"
    assert rows.seen is not None
    assert rows.seen[0] == "a collective over NCCL, or the GPU's work before it"
    assert group.status_server.waits.longest() is None
