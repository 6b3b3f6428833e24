"""Tells a rank its place in an island that may end, and come back, by itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from shardwise.net.environment import PREFIX

VARIABLE = PREFIX + "ISLAND"
"""Holds an IslandPlace as JSON, where islands are elastic."""


@dataclass(frozen=True, kw_only=True)
class IslandPlace:
    """Island number `island` of `count`, each of `size` ranks; `fd` is the rank's end of a socket
    to the launcher, which it inherits. `returns` says that the others have gone on without it."""

    island: int
    count: int
    size: int
    fd: int
    returns: bool

    @property
    def first(self) -> int:
        """The first rank of the island."""
        return self.island * self.size

    def variables(self) -> dict[str, str]:
        """What the rank's environment says of it."""
        return {VARIABLE: json.dumps(asdict(self))}


def read(environ: Mapping[str, str]) -> IslandPlace | None:
    """The place that `variables` wrote down; None where islands are not elastic."""
    text = environ.get(VARIABLE)
    return None if text is None else IslandPlace(**json.loads(text))


def ranks_here(island: range, first: int, count: int) -> range:
    """Those of an island's ranks that are on the host of the `count` ranks from `first` on."""
    start = max(island.start, first)
    return range(start, max(start, min(island.stop, first + count)))
