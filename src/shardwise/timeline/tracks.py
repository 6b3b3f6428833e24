"""The rows that a rank has in a timeline."""

from enum import IntEnum


class Row(IntEnum):
    """A row of events, by the number that its thread has in the file.

    What overlaps on a row of `LANES` goes to further rows, numbered from its own on.
    """

    STEPS = 1
    COMPUTE = 2
    DATA = 3
    CHECKPOINT = 4
    BACKGROUND = 5
    BESIDE = 6
    COMMUNICATION = 10
    TIERS = 40

    @property
    def title(self) -> str:
        """What stands beside it."""
        return _TITLES[self]


_TITLES = {
    Row.STEPS: "steps",
    Row.COMPUTE: "compute",
    Row.DATA: "data",
    Row.CHECKPOINT: "checkpoint",
    Row.BACKGROUND: "checkpoint, in the background",
    Row.BESIDE: "waits beside",
    Row.COMMUNICATION: "communication",
    Row.TIERS: "tiers",
}

LANES = (Row.COMMUNICATION, Row.TIERS)
"""Rows of events that overlap each other."""

WIDEST = 30
"""Rows that one of `LANES` may take; what overlaps more stands on the last of them."""

FURTHER_STEPS = 70
"""The row of the second engine's steps, on which those of further ones follow, `WIDEST` in all."""
