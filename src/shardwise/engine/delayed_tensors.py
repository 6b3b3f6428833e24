"""Names what a checkpoint holds of gradients that islands use some steps later.

set outer       NAME.sum-I       the sums over all islands that wait, the oldest first
set island-K    NAME.residual    what the wire has lost of the sums of island K so far
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardwise.checkpoint import json_values
from shardwise.checkpoint.extra_sets import Places
from shardwise.checkpoint.tensor_spans import ISLAND, OUTER
from shardwise.engine.island_report import Report, read, row_of
from shardwise.engine.island_tensors import BesideTensors
from shardwise.islands.delayed_sums import DelayedSums, Flight
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.storage.storage import MemoryStorage, Span, Storage

FIELD = "behind"
"""The key under which numbers stand in a checkpoint."""


class DelayedTensors(BesideTensors):
    """What this rank has of `delayed` sums; they are waited for when they are asked for."""

    def __init__(
        self, parameters: Parameters, delayed: DelayedSums, places: Mapping[str, Places]
    ) -> None:
        super().__init__(parameters, places)
        self._delayed = delayed

    def _each(self) -> Iterator[tuple[str, str, int, Storage]]:
        for index, residual in enumerate(self._delayed.residuals):
            yield ISLAND, "residual", index, residual
        for number, flight in enumerate(self._delayed.flights):
            self._delayed.land(flight)
            for index, total in enumerate(flight.sums):
                assert isinstance(total, Tensor)
                yield OUTER, f"sum-{number}", index, MemoryStorage(total)

    def _part(self, index: int) -> Span:
        return self._delayed.parts[index]

    def _whole(self, index: int, part: Tensor) -> Tensor:
        return self._delayed.whole(index, part)

    def numbers(self, islands: int) -> dict[str, Any]:
        """How many `islands` there are, and of each step that waits what they reported, and the
        names of what had a gradient."""
        waiting = [self._waiting(flight) for flight in self._delayed.flights]
        return {"islands": islands, "updates": self._delayed.updates, "waiting": waiting}

    def _waiting(self, flight: Flight) -> dict[str, Any]:
        named = self._parameters.named
        reports, used = read(self._delayed.reported(flight), len(named))
        return {
            "step": flight.step,
            "reports": json_values.encode([report._asdict() for report in reports]),
            "used": [each.name for each, flag in zip(named, used, strict=True) if flag],
        }

    def take_numbers(self, saved: Mapping[str, Any]) -> None:
        """Go on with `saved` numbers; the sums are to be filled in."""
        self._delayed.updates = saved["updates"]
        for each in saved["waiting"]:
            used = [named.name in each["used"] for named in self._parameters.named]
            reports = [
                Report(**{name: float(report[name]) for name in Report._fields})
                for report in json_values.decode(each["reports"])
            ]
            self._delayed.expect(each["step"], [row_of(report, used) for report in reports])


def joined(several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of the ranks that share out the layers, as one."""
    waiting = [
        dict(each[0]) | {"used": [name for part in each for name in part["used"]]}
        for each in zip(*(numbers["waiting"] for numbers in several), strict=True)
    ]
    return dict(several[0]) | {"waiting": waiting}
