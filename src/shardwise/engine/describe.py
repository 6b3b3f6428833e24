"""Builds and prints the table of `engine.describe()`: units, buckets, bytes per rank and tier."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardwise.engine.build import States
from shardwise.engine.engine_spec import EngineSpec
from shardwise.layout.placement import STATES
from shardwise.messages.printable import in_bytes, printable
from shardwise.states.parameters.sharded_parameters import ShardedParameters

if TYPE_CHECKING:
    from rich.table import Table


@dataclass
class _Row:
    """A table row: one unit, or several consecutive units that are equal."""

    names: list[str]
    parameters: int = 0
    buckets: int = 0
    sizes: list[int] = field(default_factory=lambda: [0] * len(STATES))

    def take(self, other: _Row) -> None:
        self.parameters += other.parameters
        self.buckets += other.buckets
        self.sizes = [a + b for a, b in zip(self.sizes, other.sizes, strict=True)]

    def is_like(self, other: _Row) -> bool:
        count = len(self.names)
        # A merged row holds totals, so compare values per unit.
        mine = [self.parameters // count, *(size // count for size in self.sizes)]
        return mine == [other.parameters, *other.sizes]

    @property
    def cells(self) -> list[str]:
        name = self.names[0]
        if len(self.names) > 1:
            name += f" to {self.names[-1]} ({len(self.names)} units)"
        return [
            printable(name),
            f"{self.parameters:,}",
            f"{self.buckets:,}",
            *map(in_bytes, self.sizes),
        ]


def table_of(spec: EngineSpec, states: States, transport: str) -> Table:
    """Return a table of this rank's sizes, with one row per unit and a row of totals.

    Consecutive equal units share a row.
    """
    # Import here, because every rank imports this module at its start, and few print a table.
    from rich.table import Table

    rows = _rows(states)
    total = _Row(["all"])
    for row in rows:
        total.take(row)
    headings = ["unit", "parameters", "buckets"]
    for state in STATES:
        name = "optimizer state" if state == "optimizer" else state
        spread = "sharded" if spec.placement.is_sharded(state) else "replicated"
        headings.append(f"{name}\n{spread}\n{spec.placement.tier(state).kind}")
    extra = [f"{in_bytes(nbytes)} of {name}" for name, nbytes in states.extra_bytes().items()]
    table = Table(
        title=_title(spec, transport),
        title_justify="left",
        caption=f"and in addition: {', '.join(extra)}" if extra else None,
        caption_justify="left",
        show_footer=True,
    )
    for heading, sum_of in zip(headings, total.cells, strict=True):
        if heading == "unit":
            table.add_column(heading, footer=sum_of, overflow="fold")
        else:
            table.add_column(heading, footer=sum_of, justify="right", no_wrap=True)
    for row in _merge(rows):
        table.add_row(*row.cells)
    return table


def show(table: Table) -> None:
    """Print `table`. Lines wrap in a narrow terminal, so no number is cut off."""
    from rich.console import Console

    console = Console(markup=False)
    least = table.__rich_measure__(console, console.options).minimum
    # Widen the console: rich would otherwise shorten numbers with an ellipsis.
    console.width = max(console.width, least)
    console.print(table)


def _title(spec: EngineSpec, transport: str) -> str:
    ranks = (
        "one rank"
        if spec.world_group.size == 1
        else f"{spec.world_group.size} ranks over {transport}"
    )
    layers = "" if spec.pipeline is None else f", of the layers of rank {spec.world_group.rank}"
    several = f", {spec.hooks.count_in_words()}" if spec.hooks is not None else ""
    equal = f"; {spec.settings.equal_in_words}" if spec.hooks is not None else ""
    return f"{spec.placement.name} on {ranks}{several}; bytes per rank{layers}{equal}"


def _rows(states: States) -> list[_Row]:
    """Return one row per unit, or a single row for the whole model if parameters are replicated."""
    # If parameters are replicated, a bucket may span several units, so there is only one row.
    rows = {0: _Row(["the model"])}
    unit_of = dict.fromkeys((t.parameter for t in states.parameters.named), 0)
    if states.shown is not None and isinstance(states.parameters, ShardedParameters):
        sections = states.shown.sections
        rows = {n: _Row([section.name]) for n, section in enumerate(sections.sections)}
        unit_of = sections.unit_of
    for bucket in states.bytes_by_bucket():
        numel = sum(named.shape.numel() for named in bucket.named)
        # Buckets of 4-bit weights next to replicated parameters belong to the whole model.
        row = rows[unit_of.get(bucket.named[0].parameter, 0)]
        row.take(_Row([], numel, 1, [*bucket.sizes]))
    return [row for row in rows.values() if row.buckets]


def _merge(rows: list[_Row]) -> list[_Row]:
    merged: list[_Row] = []
    for row in rows:
        if merged and merged[-1].is_like(row):
            merged[-1].names += row.names
            merged[-1].take(row)
        else:
            merged.append(replace(row, names=[*row.names], sizes=[*row.sizes]))
    return merged
