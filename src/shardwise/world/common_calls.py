"""Counts the calls that all ranks must make, to detect ranks that make different calls.

For example, a rank that leaves a loop early makes fewer calls than the others. The ranks compare
their counts in the exchange of each step, and engine/usage_checks.py reports a difference.
"""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor

from shardwise.watch import process_status

DIGESTED = 16
"""Number of training batches passed to `share` whose first rows are compared."""

CallCounts = list[tuple[str, str, int]]
"""(call, the user's line, number of times), as JSON values."""


class CommonCalls:
    """Counts the calls since the last step that all ranks must make: `draw`, `alike` and `share`.

    In the exchange of each step, ranks compare one number for the calls, and one for the first rows
    of shared batches. Calls of `share` under `torch.no_grad()` are not counted, because a rank may
    evaluate without the others.
    """

    def __init__(self) -> None:
        self._made: Counter[tuple[str, str]] = Counter()
        self._left = DIGESTED
        self._counts_shares = True
        self._rows: float | Tensor = 0.0

    def note(self, call: str) -> None:
        """Count a call of the function named `call`, with the script line that makes it."""
        # The line is only used in the message, because ranks may call from different lines.
        self._made[call, process_status.users_line(sys._getframe(1))] += 1

    def note_batch(self, call: str, digest: Callable[[], float | Tensor]) -> None:
        """Count a `call` that passes a batch. `digest` returns a number for its first row."""
        self.note(call)
        if self._left > 0:
            self._left -= 1
            # Double the previous value, so that the order of batches matters. On an accelerator
            # this stays a tensor, so the host does not synchronise.
            self._rows = self._rows * 2 + digest()

    def number(self) -> float:
        """Return a checksum of the call counts."""
        if not self._made:
            return NO_CALLS
        counts = Counter[str]()
        for (call, _), times in self._made.items():
            if call != SHARE or self._counts_shares:
                counts[call] += times
        # Sort, because ranks may make calls in different orders. A 32-bit number is exact in the
        # exchange's fp64 vector.
        return float(zlib.crc32(repr(sorted(counts.items())).encode()))

    @property
    def rows(self) -> float | Tensor:
        """Digest of the shared batches' first rows."""
        return self._rows

    def report(self) -> tuple[CallCounts, float]:
        """Return the call counts, with their script lines, and the digest of the rows."""
        counts = [(call, line, times) for (call, line), times in self._made.items()]
        return counts, float(self._rows)

    def stop_digesting(self) -> None:
        """Stop comparing rows, because a warning has already reported that they differ."""
        self._left = 0

    def stop_counting_shares(self) -> None:
        """Stop counting shared batches, because a warning has already reported that they differ.

        All ranks must call this at the same step. Otherwise their checksums would differ.
        """
        self._counts_shares = False
        self.stop_digesting()

    def kept(self) -> tuple[Counter[tuple[str, str]], float | Tensor]:
        """Return a copy of the counts and the row digest, which `go_back` restores."""
        return self._made.copy(), self._rows

    def go_back(self, kept: tuple[Counter[tuple[str, str]], float | Tensor]) -> None:
        """Restore the counts and the row digest from `kept`, because the step is repeated."""
        made, self._rows = kept
        self._made = made.copy()

    def clear(self) -> None:
        """Reset the counts after a step has compared them."""
        self._made.clear()
        self._rows = 0.0


NO_CALLS = float(zlib.crc32(b"[]"))
"""The checksum of `CommonCalls.number` if a step makes no calls."""


def nearly_alike(numbers: Sequence[float]) -> bool:
    """Return whether `numbers` differ by no more than rounding errors."""
    # A model may have computed the batches, on hosts with different processors.
    return max(numbers) - min(numbers) <= 1e-5 * max(map(abs, numbers))


def find_call_difference(calls_of_ranks: Sequence[CallCounts]) -> tuple[int, str] | None:
    """Find the first rank whose calls differ from rank 0's, ignoring `share`.

    Returns the rank and a description, or None if no rank differs.
    """
    counts = []
    for calls in calls_of_ranks:
        times_of = Counter[str]()
        for call, _, times in calls:
            # Ignore `share`, which only causes a warning.
            if call != SHARE:
                times_of[call] += times
        counts.append(times_of)
    for rank, count in enumerate(counts):
        if count != counts[0]:
            return rank, _difference(calls_of_ranks, rank)
    return None


def describe_share_difference(calls_of_ranks: Sequence[CallCounts]) -> str:
    """Describe how the number of batches passed to `share` differs between ranks."""
    counts = [sum(times for call, _, times in calls if call == SHARE) for calls in calls_of_ranks]
    rank = next(rank for rank, count in enumerate(counts) if count != counts[0])
    return _difference(calls_of_ranks, rank)


SHARE = "world.share"
"""The only call that a rank may make alone without an error."""


def _difference(calls_of_ranks: Sequence[CallCounts], rank: int) -> str:
    first, other = _describe(calls_of_ranks[0]), _describe(calls_of_ranks[rank])
    return f"rank 0 {first}, and rank {rank} {other}"


def _describe(calls: CallCounts) -> str:
    shown = [f"{call} {times} time(s) ({line})" for call, line, times in calls[:4]]
    if len(calls) > len(shown):
        shown.append(f"{len(calls) - len(shown)} more")
    return "called " + ", ".join(shown) if shown else "called none of them"
