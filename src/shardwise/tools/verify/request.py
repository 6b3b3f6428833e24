"""VerifyRequest: the arguments of `shardwise verify`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.tools.verify.placements import RunPlacement
from shardwise.tools.verify.runs import ScriptCommand


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """The script to verify, the placements to verify, and the options of the report.

    Attributes:
        script: The script.
        placements: Placements to compare with the reference.
        steps: Number of steps per run.
        out: Folder for the report.
        against: A different script to use as the reference. By default, the reference is `script`
            on a single rank with --zero 0.
        causes: Whether to search for the cause of a difference.
        precision: Precision of the runs.
    """

    script: ScriptCommand
    placements: Sequence[RunPlacement]
    steps: int
    out: Path
    against: ScriptCommand | None = None
    causes: bool = True
    precision: str = "fp32"
    accepts_rounding: bool = False
    """Whether the verdict "equal within rounding" gives exit code 0."""

    @property
    def max_size(self) -> int:
        """The largest number of ranks of any placement."""
        return max((each.size or 1 for each in self.placements), default=1)

    @property
    def reference(self) -> RunPlacement | None:
        """The reference's placement, or None for `against`, which runs without a launcher."""
        return None if self.against is not None else self.placements[0].reference()
