"""Describes an error that the guard has found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PARAMETER, OPTIMIZER, AVERAGE, BUFFER = "parameter", "optimizer state", "average", "buffer"
GRADIENT, OUTPUT = "gradient", "forward pass"

_MOST = 4
"""Maximum number of tensors that a message names."""


@dataclass(frozen=True)
class Finding:
    """One error that the guard has found.

    Args:
        step: Number of the step, from 1.
        kind: PARAMETER, OPTIMIZER, AVERAGE, BUFFER, GRADIENT or OUTPUT.
        names: Names of the affected tensors. If the error can only be located in memory that
            several tensors share, these are all the tensors in that memory.
        rank: The rank with the error, or None if it is unknown.
        evidence: How the guard detected it, in words.
    """

    step: int
    kind: str
    names: tuple[str, ...]
    rank: int | None
    evidence: str

    def plain(self) -> list[object]:
        """Convert the finding to a list of JSON values, for `of_plain`."""
        return [self.step, self.kind, list(self.names), self.rank, self.evidence]

    @classmethod
    def of_plain(cls, plain: Sequence[object]) -> Finding:
        """Create a finding from the list that `plain` returned."""
        step, kind, names, rank, evidence = plain
        assert isinstance(step, int) and isinstance(names, list)  # noqa: PT018
        assert rank is None or isinstance(rank, int)
        return cls(step, str(kind), tuple(names), rank, str(evidence))

    def __str__(self) -> str:
        shown = ", ".join(self.names[:_MOST])
        more = f" and {len(self.names) - _MOST} more" if len(self.names) > _MOST else ""
        where = "on an unknown rank" if self.rank is None else f"on rank {self.rank}"
        return f"step {self.step}: {self.kind} {shown}{more} is wrong {where}: {self.evidence}"
