"""Detects ranks whose calls do not match: different collectives, sizes or dtypes.

Ranks that share memory compare the messages that open a call (shared_work.py). Over Gloo, a waiting
rank's watchdog asks the sender which messages it has sent (gloo_exchange.py).
"""

from __future__ import annotations

import torch

from shardwise.comm.socket_mesh import MeshMessage
from shardwise.errors import CollectiveError
from shardwise.watch.status_server import StatusServer

SAME_CALLS = "Every rank must make the same calls in the same order."

KINDS = (
    "barrier",
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "broadcast",
    "all-to-all",
    "exchange of rows",
    "common memory",
)
"""Names of the collectives over shared memory. Messages contain an index into this tuple."""

DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
"""Torch's dtypes. Messages contain an index into this list."""


def mismatch(mine: MeshMessage, theirs: MeshMessage) -> tuple[str, str] | None:
    """Describe both opening messages. Return None if they describe the same call."""
    if _claims(mine) == _claims(theirs):
        return None
    my_words, their_words = _in_words(mine), _in_words(theirs)
    if my_words == their_words:  # only `check`, a hash of the cuts or the source, differs
        their_words += ", cut otherwise or from another source"
    return my_words, their_words


def mismatch_error(
    status_server: StatusServer, call: int, here: str, there: str, size: int
) -> CollectiveError:
    """Return the error for call number `call` in a group of `size` ranks.

    `here` and `there` describe the two collectives and name their ranks. The message also shows,
    for each rank that responds, the line that it is currently executing.
    """
    return CollectiveError(
        f"Call {call} is {here} and {there}, of {size}. "
        f"{status_server.call_difference()}{SAME_CALLS}"
    )


def _claims(message: MeshMessage) -> tuple[int, ...]:
    return message.kind, message.dtype, message.numel, message.check


def _in_words(message: MeshMessage) -> str:
    dtype = str(DTYPES[message.dtype]).removeprefix("torch.")
    return f"{KINDS[message.kind]} of {message.numel} {dtype} values"
