"""Counts the calls that all ranks make alike, so that a rank that makes others is noticed.

A rank that has left a loop before the others goes on with other calls; each step's exchange
compares them (engine/usage_checks.py says what differs).
"""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor

from shardwise.watch import process_status

DIGESTED = 16
"""Of so many batches that were shared out to train on the first rows are compared."""

Made = list[tuple[str, str, int]]
"""Calls as JSON has them: which, at which line of the user's, how often."""


class CommonCalls:
    """The calls since the last step that all ranks make alike: `draw`, `alike`, and `share` of what
    is trained on. Ranks compare them in each step's exchange, as one number, and first rows.

    What is shared out under `torch.no_grad()` is left out, since ranks may evaluate by themselves.
    """

    def __init__(self) -> None:
        self._made: Counter[tuple[str, str]] = Counter()
        self._left = DIGESTED
        self._counts_shares = True
        self._rows: float | Tensor = 0.0

    def note(self, call: str) -> None:
        """This rank makes `call` now."""
        self._made[call, process_status.users_line(sys._getframe(1))] += 1

    def note_batch(self, call: str, digest: Callable[[], float | Tensor]) -> None:
        """The same for a batch, of whose first row `digest` makes a number."""
        self.note(call)
        if self._left > 0:
            self._left -= 1
            self._rows = self._rows * 2 + digest()

    def number(self) -> float:
        """A checksum of how often each call was made."""
        counts = Counter[str]()
        for (call, _), times in self._made.items():
            if call != SHARE or self._counts_shares:
                counts[call] += times
        return float(zlib.crc32(repr(sorted(counts.items())).encode()))

    @property
    def rows(self) -> float | Tensor:
        """A number that tells the first rows of the batches from others."""
        return self._rows

    def made(self) -> tuple[Made, float]:
        """The calls, and the number of the rows, to tell the other ranks."""
        told = [(call, line, times) for (call, line), times in self._made.items()]
        return told, float(self._rows)

    def stop_digesting(self) -> None:
        """Look at no more rows: it was said that they differ."""
        self._left = 0

    def stop_counting_shares(self) -> None:
        """Leave shared batches out of the number, and look at no more rows: it was said that ranks
        have other numbers of them. All ranks do so at the same step."""
        self._counts_shares = False
        self.stop_digesting()

    def clear(self) -> None:
        """A step has compared them: begin anew."""
        self._made.clear()
        self._rows = 0.0


def nearly_alike(numbers: Sequence[float]) -> bool:
    """Whether numbers differ by rounding alone: the same model may compute a batch on hosts of two
    kinds."""
    return max(numbers) - min(numbers) <= 1e-5 * max(map(abs, numbers))


def apart_in_calls(told: Sequence[Made]) -> tuple[int, str] | None:
    """The first rank whose calls differ from rank 0's by more than batches that were shared out,
    and both in words; None where there is none."""
    counts = [_strict(made) for made in told]
    for rank, count in enumerate(counts):
        if count != counts[0]:
            return rank, f"rank 0 {_words(told[0])}, and rank {rank} {_words(told[rank])}"
    return None


def apart_in_shares(told: Sequence[Made]) -> str:
    """In words that ranks were given different numbers of batches."""
    counts = [sum(times for call, _, times in made if call == SHARE) for made in told]
    rank = next(rank for rank, count in enumerate(counts) if count != counts[0])
    return f"rank 0 {_words(told[0])}, and rank {rank} {_words(told[rank])}"


SHARE = "world.share"
"""The call that a rank may make alone, as long as it trains on the rows as the others do."""


def _strict(made: Made) -> Counter[str]:
    counts = Counter[str]()
    for call, _, times in made:
        if call != SHARE:
            counts[call] += times
    return counts


def _words(made: Made) -> str:
    said = [f"{call} {times} time(s) ({line})" for call, line, times in made[:4]]
    if len(made) > len(said):
        said.append(f"{len(made) - len(said)} more")
    return "called " + ", ".join(said) if said else "called none of them"
