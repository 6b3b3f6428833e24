"""The request that the flags of `shardwise verify` make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.tools.verify.placements import RunPlacement
from shardwise.tools.verify.runs import ScriptCommand


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """The script to verify, the placements to try, and how to report.

    The reference is one rank of ZERO_0, or the script `against` if there is one. Each run makes
    `steps` steps. `causes` says whether to search for the cause of a difference.
    """

    script: ScriptCommand
    placements: Sequence[RunPlacement]
    steps: int
    out: Path
    against: ScriptCommand | None = None
    causes: bool = True
    precision: str = "fp32"
    accepts_rounding: bool = False
    """Whether a result that is equal within rounding ends with exit code 0."""

    @property
    def max_size(self) -> int:
        """The largest number of ranks of any placement."""
        return max((each.size or 1 for each in self.placements), default=1)

    @property
    def reference(self) -> RunPlacement | None:
        """The placement of the reference; None for `against`, which runs without a launcher."""
        return None if self.against is not None else self.placements[0].reference()
