"""Implements `shardwise timeline FILE`, which shows how a run's steps spent their time."""

from __future__ import annotations

import json
from pathlib import Path

import click

from shardwise.errors import ConfigError
from shardwise.messages.printable import plain_console, printable

SHOWN = 5
"""Number of steps to show individually without --steps."""


@click.command(short_help="Show where the time of a run's steps went.")
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--steps", "every", is_flag=True, help="show every step, not only the longest")
@click.option("--json", "as_json", is_flag=True, help="print JSON, in seconds")
@click.option(
    "--merge",
    type=click.Path(path_type=Path),
    metavar="WHOLE.json",
    help="write the events of all FILES to one file, for Perfetto",
)
def timeline(files: tuple[Path, ...], every: bool, as_json: bool, merge: Path | None) -> int:
    """Show where the time of a run's steps went, per rank, and which rank was slowest.

    FILES are written by `shardwise run --timeline FILE`. Files that other hosts of the same run
    wrote are also read if they are in the same folder.
    """
    # Import here, so that `shardwise --help` stays fast.
    from shardwise.tools.timeline import reading, tables
    from shardwise.tools.timeline.slowest import counted
    from shardwise.tools.timeline.steps import steps_of

    events = reading.read(files)
    if merge is not None:
        reading.merge(events, merge)
    all_of_rank = {rank: own for rank, own in steps_of(events).items() if own}
    if not all_of_rank:
        raise ConfigError(
            f"{files[0]} contains no complete step of an engine. Record at least one whole step."
        )
    steps = counted(all_of_rank)
    if as_json:
        click.echo(json.dumps(tables.as_json(steps, all_of_rank), indent=1))
        return 0
    console = plain_console()
    console.print(tables.per_rank(steps))
    console.print()
    all_steps = [step for own in all_of_rank.values() for step in own]
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
