"""`shardwise timeline FILE`: shows where the time of a run's steps went."""

from __future__ import annotations

import json
from pathlib import Path

import click

from shardwise.errors import ConfigError
from shardwise.messages.printable import plain_console, printable

SHOWN = 5
"""Steps that are shown one by one, where not all are asked for."""


@click.command(short_help="Say where the time of a run's steps went.")
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--steps", "every", is_flag=True, help="show every step, not only the longest")
@click.option("--json", "as_json", is_flag=True, help="print JSON, in seconds")
@click.option(
    "--merge",
    type=click.Path(path_type=Path),
    metavar="WHOLE.json",
    help="write the events of all FILES as one, for Perfetto",
)
def timeline(files: tuple[Path, ...], every: bool, as_json: bool, merge: Path | None) -> int:
    """Say where the time of a run's steps went, per rank, and who was slowest.

    FILES are what `shardwise run --timeline FILE` wrote; those of other hosts, FILE with a host's
    name in it, are read too where they are beside it.
    """
    from shardwise.tools.timeline import reading, tables
    from shardwise.tools.timeline.slowest import counted
    from shardwise.tools.timeline.steps import steps_of

    events = reading.read(files)
    if merge is not None:
        reading.merge(events, merge)
    found = {rank: own for rank, own in steps_of(events).items() if own}
    if not found:
        raise ConfigError(f"{files[0]} has no step of an engine: did one end while it was written?")
    steps = counted(found)
    if as_json:
        click.echo(json.dumps(tables.as_json(steps, found), indent=1))
        return 0
    console = plain_console()
    console.print(tables.per_rank(steps))
    console.print()
    all_steps = [step for own in found.values() for step in own]
    shown = all_steps if every else tables.longest(steps, SHOWN)
    console.print(tables.per_step(shown))
    if len(shown) < len(all_steps):
        console.print(f"(the {SHOWN} longest; --steps shows all)")
    console.print("\nPer step:", soft_wrap=True)
    for line in tables.legend():
        console.print(line, style="dim", soft_wrap=True)
    console.print()
    for line in tables.words(steps):
        console.print(printable(line), soft_wrap=True)
    return 0
