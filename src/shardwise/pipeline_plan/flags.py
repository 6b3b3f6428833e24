"""The flags of `shardwise split` that are its own."""

from collections.abc import Iterator

import click

from shardwise.config import values
from shardwise.launch.flags import Flag, Typed

STEPS = 8
"""Steps that are timed, where the user does not say."""


def own() -> Iterator[Flag]:
    """Into how many stages, and by what."""
    yield Flag(
        ["parts", "--pipeline"],
        group="split",
        shown="--pipeline P",
        type=Typed(values.whole(2, values.MOST_RANKS)),
        default=2,
        help="workers that share out the layers (default 2)",
    )
    yield Flag(
        ["micros", "--microbatches"],
        group="split",
        shown="--microbatches M",
        type=Typed(values.whole(1)),
        help="parts of a batch (default 4 P)",
    )
    yield Flag(
        ["--by"],
        group="split",
        shown="--by time|parameters",
        type=click.Choice(["time", "parameters"]),
        default="time",
        help="what the stages are to be alike in",
    )
    yield Flag(
        ["--steps"],
        group="split",
        shown="--steps S",
        type=Typed(values.whole(1)),
        default=STEPS,
        help=f"steps that are timed (default {STEPS})",
    )
