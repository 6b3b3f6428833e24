"""What a verification is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.tools.verify.placements import Placement
from shardwise.tools.verify.runs import Script


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`script` under each of `placements`, for `steps` steps, beside the reference: one rank of
    ZERO_0, or the script `against`. `causes`: whether they are looked for."""

    script: Script
    placements: Sequence[Placement]
    steps: int
    out: Path
    against: Script | None = None
    causes: bool = True
    precision: str = "fp32"
    accepts_rounding: bool = False
    """Whether what is equal within rounding ends with exit code 0."""

    @property
    def most(self) -> int:
        """The largest number of ranks of all placements."""
        return max((each.size or 1 for each in self.placements), default=1)

    @property
    def reference(self) -> Placement | None:
        """How the reference is spread; None for a script that is run by itself."""
        return None if self.against is not None else self.placements[0].reference()
