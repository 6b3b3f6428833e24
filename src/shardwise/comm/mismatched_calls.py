"""Detects ranks in different collectives, or in one with other sizes or dtypes, at the same call.

Ranks that share memory compare the opening messages of a call (shared_work.py). Over Gloo the
watchdog of a rank that waits asks the other one what it has sent (gloo_exchange.py).
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
"""The collectives that ranks of a host make, by the number that opening messages have."""

DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
"""Torch's dtypes, by the number that opening messages have."""


def mismatch(mine: MeshMessage, theirs: MeshMessage) -> tuple[str, str] | None:
    """What two opening messages of one call say, in words; None where they say the same."""
    if _claims(mine) == _claims(theirs):
        return None
    said, heard = _in_words(mine), _in_words(theirs)
    if said == heard:
        heard += ", cut otherwise or from another source"
    return said, heard


def mismatch_error(
    status_server: StatusServer, call: int, here: str, there: str, size: int
) -> CollectiveError:
    """The error of call number `call` of a group of `size` ranks.

    `here` and `there` say which collective it is, and on which rank. Where other ranks can be
    asked, the lines of the user's program that they are at follow.
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
