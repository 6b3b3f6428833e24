"""Flags and help of `shardwise scale`; the command line starts without importing what runs it."""

from collections.abc import Iterator

import click

from shardwise.config import values
from shardwise.launch.flags import Flag, Typed

TOP = """\
What more workers bring:   shardwise scale -n 1,2,4,8 train.py --epochs 3

shardwise scale [flags] SCRIPT.py [its arguments]     the script needs no change
"""
EMPTY = "What shall be measured? For example: shardwise scale -n 1,2 train.py"
"""The error without a script."""

WARMUP = 5
"""Default number of steps at the start of a run that are dropped."""


def own() -> Iterator[Flag]:
    """Yield the flags that select runs, their length, and the folder of the results."""
    yield Flag(
        ["sizes", "-n", "-np"],
        group="scale",
        shown="-n 1,2,4,8",
        listed=True,
        type=Typed(values.counts),
        default="1,2,4,8",
        help="numbers of workers",
    )
    yield Flag(
        ["kinds", "--kind"],
        group="scale",
        shown="--kind strong|weak|both",
        type=click.Choice(["strong", "weak", "both"]),
        default="strong",
        help="strong: the same total batch; weak: the same per worker",
    )
    yield Flag(
        ["--warmup"],
        group="scale",
        shown="--warmup K",
        type=Typed(values.whole(0)),
        default=WARMUP,
        help=f"steps of each run that are dropped (default {WARMUP})",
    )
    yield Flag(
        ["--steps"],
        group="scale",
        shown="--steps S",
        type=Typed(values.whole(1)),
        help="end a run after so many more; left out, when the script ends",
    )
    yield Flag(
        ["--out"],
        group="scale",
        shown="--out DIR",
        type=Typed(values.folder),
        help="for table, plots and page (default runs/scale-SCRIPT)",
    )
