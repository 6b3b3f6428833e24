"""The flags of `shardwise verify` that are its own."""

from collections.abc import Iterator

import click

from shardwise.config import values
from shardwise.launch.flags import Flag, Typed

STEPS = 20
"""Steps that are compared, where the user does not say."""


def own() -> Iterator[Flag]:
    """How long, with what the runs are compared, and where the report goes."""
    yield Flag(
        ["--steps"],
        group="verify",
        shown="--steps S",
        type=Typed(values.whole(1)),
        default=STEPS,
        help=f"steps that are compared (default {STEPS}); fewer where the script ends",
    )
    yield Flag(
        ["--also"],
        group="verify",
        shown='--also "FLAGS"',
        multiple=True,
        help='a further placement, such as --also "-n 2 --tensor 2"',
    )
    yield Flag(
        ["--against"],
        group="verify",
        shown='--against "PLAIN.py ARGS"',
        help="the original script, without Shardwise, in place of -n 1 --zero 0",
    )
    yield Flag(
        ["--causes/--no-causes"],
        group="verify",
        shown="--[no-]causes",
        default=True,
        help="try out why a placement differs (default on)",
    )
    yield Flag(
        ["--accept"],
        group="verify",
        shown="--accept bits|rounding",
        type=click.Choice(["bits", "rounding"]),
        default="bits",
        help="rounding: exit with 0 for what is equal within rounding too",
    )
    yield Flag(
        ["--json", "json_file"],
        group="verify",
        shown="--json FILE",
        type=Typed(values.file),
        help="write all of it there too; - is the standard output",
    )
    yield Flag(
        ["--out"],
        group="verify",
        shown="--out DIR",
        type=Typed(values.folder),
        help="for page, plot and logs (default runs/verify-SCRIPT)",
    )
