"""Defines the command `shardwise simulate`: its flags, and the run that they describe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from shardwise.config import values
from shardwise.config.outer_optimizer import FORMATS
from shardwise.launch.flags import Command, Flag, Typed

TOP = """\
What failures leave of a run:   shardwise simulate --on 2048x8xH100 --failures llama3 --days 54

shardwise simulate [flags]     needs no script and no device: the durations are yours
"""
BEST = "best"
TRIALS = 20


def _above_zero(parse: Callable[[str], float]) -> Callable[[str], float]:
    def parsed(text: str) -> float:
        seconds = parse(text)
        if seconds == 0:
            raise ValueError("a duration above 0")
        return seconds

    return parsed


def _interval(text: str) -> float | None:
    """Seconds; None for the best one."""
    return None if text.strip() == BEST else _above_zero(values.duration("s"))(text)


def _cluster_flags() -> Iterator[Flag]:
    """What the run is on, and what fails there."""
    yield Flag(
        ["cluster", "--on"],
        group="simulate",
        shown="--on HOSTSxNxDEVICE",
        required=True,
        help="the hosts that the run takes, such as 2048x8xH100",
    )
    yield Flag(
        ["--failures"],
        group="simulate",
        shown="--failures NAME|FILE.toml",
        default="llama3",
        help="llama3 (default), rsc1, rsc2, none, or a file of yours",
    )
    yield Flag(
        ["--spares"],
        group="simulate",
        shown="--spares N",
        type=Typed(values.whole(0)),
        default=0,
        help="hosts that stand by (default 0)",
    )
    yield Flag(
        ["least", "--min-hosts"],
        group="simulate",
        shown="--min-hosts N",
        type=Typed(values.whole(1)),
        help="go on with so few, slower; left out, the run waits until all are there",
    )
    yield Flag(
        ["--hardware"],
        group="simulate",
        shown="--hardware FILE",
        multiple=True,
        help="devices of yours, a TOML file or a folder of them",
    )


def _run_flags() -> Iterator[Flag]:
    """How long all takes."""
    yield Flag(
        ["--days"],
        group="simulate",
        shown="--days D",
        type=Typed(_above_zero(values.duration("d"))),
        default="30",
        help="days of steps that the training takes where nothing is lost (default 30)",
    )
    yield Flag(
        ["--step"],
        group="simulate",
        shown="--step S",
        type=Typed(_above_zero(values.duration("s"))),
        default="10",
        help="seconds of a step (default 10)",
    )
    yield Flag(
        ["--jitter"],
        group="simulate",
        shown="--jitter F",
        type=Typed(values.number(0.0, 1.0)),
        default=0.0,
        help="how steps of a device differ: standard deviation / mean (default 0)",
    )
    yield Flag(
        ["--save-every"],
        group="simulate",
        shown="--save-every T|best",
        type=Typed(_interval),
        default=BEST,
        help="between checkpoints, such as 30m (default: the best one is looked for)",
    )
    yield Flag(
        ["--save"],
        group="simulate",
        shown="--save S",
        type=Typed(values.duration("s")),
        default="10",
        help="seconds for which a save holds all up (default 10)",
    )
    yield Flag(
        ["--background"],
        group="simulate",
        shown="--background S",
        type=Typed(values.duration("s")),
        default="0",
        help="seconds after that until a checkpoint is complete (default 0)",
    )
    yield Flag(
        ["--detect"],
        group="simulate",
        shown="--detect S",
        type=Typed(values.duration("s")),
        help="a failure is noticed after S at most; left out, as the file says",
    )
    yield Flag(
        ["--restart"],
        group="simulate",
        shown="--restart S",
        type=Typed(values.duration("s")),
        default="300",
        help="from a start to the first step, loading included (default 300)",
    )


def _island_flags() -> Iterator[Flag]:
    """Islands, and the links between them."""
    yield Flag(
        ["--islands"],
        group="simulate",
        shown="--islands N|host",
        type=Typed(values.islands),
        default="1",
        help="hosts, or the devices of one, in N groups that step by themselves",
    )
    yield Flag(
        ["--equal-every"],
        group="simulate",
        shown="--equal-every H",
        type=Typed(values.whole(1)),
        help="steps between two boundaries, at which islands are made equal (default 30)",
    )
    yield Flag(
        ["--parameters"],
        group="simulate",
        shown="--parameters P",
        type=Typed(values.number(0, 1e15, above=True)),
        help="of the model, such as 8e9: what a boundary sends",
    )
    yield Flag(
        ["--between"],
        group="simulate",
        shown="--between MBITS",
        type=Typed(values.number(0, 1e9, above=True)),
        help="Mbit/s of the link of each island to the others; left out, a boundary takes no time",
    )
    yield Flag(
        ["--wire"],
        group="simulate",
        shown="--wire W",
        type=Typed(values.one_of(*FORMATS)),
        help=f"what is sent as: {', '.join(FORMATS)} (default {FORMATS[0]})",
    )
    yield Flag(
        ["--late"],
        group="simulate",
        shown="--late T",
        type=Typed(values.whole(0)),
        help="used T steps after it was sent: steps go on meanwhile (default 0)",
    )


def _report_flags() -> Iterator[Flag]:
    """How often it is tried, and where the report goes."""
    yield Flag(
        ["--trials"],
        group="simulate",
        shown="--trials N",
        type=Typed(values.whole(2, 10_000)),
        default=TRIALS,
        help=f"simulated runs (default {TRIALS})",
    )
    yield Flag(
        ["--seed"],
        group="simulate",
        shown="--seed N",
        type=Typed(values.whole(0, values.LARGEST_SEED)),
        default=0,
        help="of the random numbers (default 0)",
    )
    yield Flag(
        ["--json", "json_file"],
        group="simulate",
        shown="--json FILE",
        type=Typed(values.file),
        help="write all of it there too; - is the standard output",
    )
    yield Flag(
        ["--out"],
        group="simulate",
        shown="--out DIR",
        type=Typed(values.folder),
        default="runs/simulate",
        help="for page and plot (default runs/simulate)",
    )


def command() -> Command:
    """The command `simulate`."""
    return Command(
        "simulate",
        top=TOP,
        callback=_simulate,
        params=[*_cluster_flags(), *_run_flags(), *_island_flags(), *_report_flags()],
        context_settings={"max_content_width": 100},
        short_help="Show what failures leave of a run of days.",
    )


def _simulate(json_file: Path | None, out: str, hardware: tuple[str, ...], **given: Any) -> int:
    asked = import_module("shardwise.tools.simulate.report").Asked(hardware=hardware, **given)
    made = import_module("shardwise.tools.simulate.command")
    return made.run(asked, Path(out), json_file)  # type: ignore[no-any-return]
