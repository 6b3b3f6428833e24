"""Report is what an island tells the others beside the gradient sums of a step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwise.engine.step_statistics import any_of, packed_flags


class Report(NamedTuple):
    """What an island tells the others beside the sums of a step, 8 bytes each; what had a gradient
    follows, packed."""

    step: float
    """From 1 on; 0 says that there is none, and that no more follow."""
    weight: float
    shown: float
    """What users see of the weight."""
    loss: float
    backwards: float
    divisor: float
    several: float
    asked: float
    """The signal by which it was asked to end, or 0."""
    unsaved: float
    """Whether a save has failed."""
    finite: float
    options: float
    """A checksum of the optimizers' options."""
    weights: float
    """A checksum of the weights, where they are compared; else 0."""
    scale: float
    """The loss scale of the gradients."""
    updates: float
    """How many updates had changed the weights with which they were computed."""


def row_of(report: Report, used: list[bool]) -> list[float]:
    """A report as numbers, with the flags by parameter of what had a gradient."""
    return [*report, *packed_flags(used)]


def length(parameters: int) -> int:
    """Of how many numbers a report on so many parameters is."""
    return len(Report._fields) + len(packed_flags([False] * parameters))


def read(rows: Sequence[list[float]], parameters: int) -> tuple[list[Report], list[bool]]:
    """The reports of all islands, and which of so many parameters had a gradient on any."""
    count = len(Report._fields)
    reports = [Report(*row[:count]) for row in rows]
    return reports, any_of([row[count:] for row in rows], parameters)
