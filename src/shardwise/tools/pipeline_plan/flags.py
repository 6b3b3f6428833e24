"""Flags and help of `shardwise pipeline-plan`; needs neither torch nor rich to start."""

from collections.abc import Iterator

import click

from shardwise.config import values
from shardwise.launch.flags import Flag, Typed

TOP = """\
Where to cut a model into stages:   shardwise pipeline-plan --pipeline 4 train.py --epochs 3

shardwise pipeline-plan [flags] SCRIPT.py [its arguments]     runs a few steps on one worker
"""
EMPTY = "Which model? For example: shardwise pipeline-plan --pipeline 2 train.py"
"""The error without a script."""

STEPS = 8
"""Default number of steps that are timed."""


def own() -> Iterator[Flag]:
    """Yield the flags that set the number of stages, and what they are balanced by."""
    yield Flag(
        ["stages", "--pipeline"],
        group="pipeline_plan",
        shown="--pipeline P",
        type=Typed(values.whole(2, values.MOST_RANKS)),
        default=2,
        help="pipeline stages, one for each worker (default 2)",
    )
    yield Flag(
        ["micros", "--microbatches"],
        group="pipeline_plan",
        shown="--microbatches M",
        type=Typed(values.whole(1)),
        help="micro-batches of a batch (default 4 P)",
    )
    yield Flag(
        ["--by"],
        group="pipeline_plan",
        shown="--by time|parameters",
        type=click.Choice(["time", "parameters"]),
        default="time",
        help="what the stages are balanced by",
    )
    yield Flag(
        ["--steps"],
        group="pipeline_plan",
        shown="--steps S",
        type=Typed(values.whole(1)),
        default=STEPS,
        help=f"steps that are timed (default {STEPS})",
    )
