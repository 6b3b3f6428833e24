"""The table of flags: one row for each flag of a command, in the order of its help.

Flags of settings are not in it: `command_line.py` makes them from the fields of the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import click

from shardwise.config import values
from shardwise.config.outer_optimizer import FORMATS
from shardwise.launch.flags import ADOPTED, Flag, Typed, adopted


class FlagRow(NamedTuple):
    """A flag: how the help shows it, its help, and what it takes (text if there is no type)."""

    shown: str
    help: str
    type: click.ParamType[Any] | None
    names: list[str]
    options: dict[str, Any]


def row(
    shown: str,
    help: str,
    parse: values.Parse[Any] | click.ParamType[Any] | None = None,
    *,
    names: str = "",
    **options: Any,
) -> FlagRow:
    """Return a row. `names` are click's, if they are not the first word of `shown` alone."""
    takes = parse if parse is None or isinstance(parse, click.ParamType) else Typed(parse)
    return FlagRow(shown, help, takes, (names or shown.split()[0]).split(), options)


def flags_of(command: str) -> Iterator[Flag]:
    """Yield the command's own flags."""
    for group, rows in TABLE[command].items():
        for each in rows:
            yield Flag(
                each.names,
                group=group,
                shown=each.shown,
                help=each.help,
                type=each.type,
                **each.options,
            )


def amount(text: str) -> float:
    """A number above 0, such as 2e9."""
    return values.number(0, 1e30, above=True)(text)


def days(text: str) -> float:
    """Days: 10d, 12h or a number of days."""
    wanted = "days or hours, such as 10d or 12h"
    try:
        found = values.duration("d", units="dh")(text) / 86400
    except ValueError:
        raise ValueError(wanted) from None
    if not 0 < found <= 1e6:
        raise ValueError(wanted)
    return found


def above_zero(parse: Callable[[str], float]) -> Callable[[str], float]:
    """Return `parse` for durations that are not 0."""

    def parsed(text: str) -> float:
        seconds = parse(text)
        if seconds == 0:
            raise ValueError("a duration above 0")
        return seconds

    return parsed


def interval(text: str) -> float | None:
    """Seconds; None for the best interval."""
    return None if text.strip() == "best" else above_zero(values.duration("s"))(text)


SECONDS = values.duration("s")
PORT = values.whole(1, 65535)

JSON = row(
    "--json FILE",
    "write all of it there too; - is the standard output",
    values.file,
    names="--json json_file",
)

WHERE = (
    row(
        "-n N",
        "ranks in all; left out, one for each GPU or slot, else 1",
        values.whole(1, values.MOST_RANKS),
        names="size -n -np",
    ),
    row(
        "--nproc-per-node N",
        "ranks on each host",
        values.whole(1, values.MOST_ON_A_HOST),
        names="per_host --nproc-per-node --nproc_per_node",
        rare=True,
    ),
    row(
        "-H HOST:N,...",
        "hosts over ssh, and ranks on each: alice@node1:4,[fd00::2]:4",
        names="hosts -H --host --hosts",
        listed=True,
    ),
    row(
        "--hostfile FILE",
        "the same, a host on each line: node1 slots=4, or node1:4",
        names="hostfile --hostfile -hostfile --machinefile",
    ),
    row(
        "-x NAME[=VALUE]",
        "a variable for the ranks on all hosts; may be repeated",
        names="pass_on -x",
        rare=True,
        multiple=True,
    ),
    row("--ssh COMMAND", "how to reach hosts, such as 'ssh -J gate' (default ssh)", rare=True),
    row(
        "--ssh-port PORT",
        "where ssh listens on the hosts",
        PORT,
        names="--ssh-port --ssh_port",
        rare=True,
    ),
    row(
        "--python PATH", "the Python of the other hosts; left out, the path of this one", rare=True
    ),
    row("--dry-run", "say what would run where, and stop", rare=True, is_flag=True),
    row(
        "--nnodes N|MIN:MAX",
        "hosts, each of which starts this same command, as with torchrun",
        rare=True,
    ),
    row(
        "--rdzv-endpoint HOST:PORT",
        "where those hosts meet, which is one of them",
        names="--rdzv-endpoint --rdzv_endpoint",
        rare=True,
    ),
    row(
        "--rdzv-id NAME",
        "tells runs apart that meet at the same place",
        names="--rdzv-id --rdzv_id",
        rare=True,
    ),
    row(
        "--node-rank I",
        "which of those hosts this is; left out, in the order of their coming",
        values.whole(0, values.MOST_RANKS),
        names="--node-rank --node_rank",
        rare=True,
    ),
    row("-m MODULE", "run a module, as python -m does", names="module -m", is_flag=True),
    row("--adopt NAMES", f"ours for {', '.join(ADOPTED)}", adopted, listed=True),
    row(
        "--port PORT",
        "where rank 0 listens, and each host of elastic islands; left out, one that is free",
        values.whole(0, 65535),
        rare=True,
    ),
    row("--interface NAME", "between hosts; left out, the one that leads to rank 0", rare=True),
    row("--config FILE", "a TOML file of settings; weaker than flags and environment"),
    row("--deepspeed JSON", "a DeepSpeed JSON as settings; weaker than all of these", rare=True),
)

RECOVER = (
    row(
        "--restarts K",
        "after a failure all ranks start again, so often at most",
        values.whole(0),
        names="restarts --restarts --max-restarts --max_restarts",
        default=0,
    ),
    row(
        "--elastic-islands",
        "an island that fails is left out, and starts again by itself (--islands N)",
        names="--elastic-islands --elastic_islands",
        is_flag=True,
        rare=True,
    ),
)

WATCH = (
    row(
        "--log-dir DIR",
        "keep what each rank says in a file of its own there",
        values.folder,
        names="--log-dir --log_dir",
    ),
    row(
        "--show RANKS",
        "show only what these ranks say, such as 0,2-3",
        names="shown --show",
        rare=True,
        listed=True,
    ),
    row(
        "--host-timeout SECONDS",
        "silence after which a host is lost (default 10)",
        values.number(2, values.LONGEST),
        names="--host-timeout --host_timeout",
        rare=True,
    ),
    row(
        "--grace SECONDS",
        "between asking ranks to end and killing them (default 5)",
        values.number(0, values.LONGEST),
        rare=True,
    ),
)

DOCTOR = (row("--explain", "only say which variables told this process who it is", is_flag=True),)

PLAN = (
    row("--on CLUSTER", "8xH100, 4x8xH100 (hosts x devices), or here"),
    row("--tokens N", "tokens to train on, such as 2e9: gives days", amount),
    row("--within 10d", "mark what takes longer", days),
    row("--budget DOLLARS", "mark what costs more", amount),
    row("--calibrate", "measure this machine for a minute, for --on here", is_flag=True),
    row(
        "--hf CONFIG.json",
        "a model of transformers by its configuration, without a script",
        values.file,
    ),
    row("--hardware FILE", "devices and links of your own, as TOML", values.file),
    row("--disk DIR", "also try states on a disk, in this folder of the hosts", values.folder),
    row(
        "--explain",
        "which tensors, at which line, make the peak of the first placement",
        is_flag=True,
    ),
    JSON,
    row("--page DIR", "draw memory over the step there: plan.html and plan.png", values.folder),
)

VERIFY = (
    row(
        "--steps S",
        "steps that are compared (default 20); fewer where the script ends",
        values.whole(1),
        default=20,
    ),
    row('--also "FLAGS"', 'a further placement, such as --also "-n 2 --tensor 2"', multiple=True),
    row(
        '--against "PLAIN.py ARGS"',
        "the original script, without Shardwise, in place of -n 1 --zero 0",
    ),
    row(
        "--stock",
        "verify a script of another library, started by torchrun or by its own command",
        is_flag=True,
    ),
    row("--junit FILE", "with --stock: also write the result as a JUnit XML file", values.file),
    row(
        "--[no-]causes",
        "try out why a placement differs (default on)",
        names="--causes/--no-causes",
        default=True,
    ),
    row(
        "--accept bits|rounding",
        "rounding: exit with 0 for what is equal within rounding too",
        click.Choice(["bits", "rounding"]),
        default="bits",
    ),
    JSON,
    row("--out DIR", "for page, plot and logs (default runs/verify-SCRIPT)", values.folder),
)

SCALE = (
    row(
        "-n 1,2,4,8",
        "numbers of workers",
        values.counts,
        names="sizes -n -np",
        listed=True,
        default="1,2,4,8",
    ),
    row(
        "--kind strong|weak|both",
        "strong: the same total batch; weak: the same per worker",
        click.Choice(["strong", "weak", "both"]),
        names="kinds --kind",
        default="strong",
    ),
    row("--warmup K", "steps of each run that are dropped (default 5)", values.whole(0), default=5),
    row(
        "--steps S", "end a run after so many more; left out, when the script ends", values.whole(1)
    ),
    row("--out DIR", "for table, plots and page (default runs/scale-SCRIPT)", values.folder),
)

PIPELINE_PLAN = (
    row(
        "--pipeline P",
        "pipeline stages, one for each worker (default 2)",
        values.whole(2, values.MOST_RANKS),
        names="stages --pipeline",
        default=2,
    ),
    row(
        "--microbatches M",
        "micro-batches of a batch (default 4 P)",
        values.whole(1),
        names="micros --microbatches",
    ),
    row(
        "--by time|parameters",
        "what the stages are balanced by",
        click.Choice(["time", "parameters"]),
        default="time",
    ),
    row("--steps S", "steps that are timed (default 8)", values.whole(1), default=8),
)

SIMULATE = (
    row(
        "--on HOSTSxNxDEVICE",
        "the hosts that the run takes, such as 2048x8xH100",
        names="cluster --on",
        required=True,
    ),
    row(
        "--failures NAME|FILE.toml",
        "llama3 (default), rsc1, rsc2, none, or a file of yours",
        default="llama3",
    ),
    row("--spares N", "hosts that stand by (default 0)", values.whole(0), default=0),
    row(
        "--min-hosts N",
        "go on with so few, slower; left out, the run waits until all are there",
        values.whole(1),
        names="least --min-hosts",
    ),
    row("--hardware FILE", "devices of yours, a TOML file or a folder of them", multiple=True),
    row(
        "--days D",
        "days of steps that the training takes where nothing is lost (default 30)",
        above_zero(values.duration("d")),
        default="30",
    ),
    row("--step S", "seconds of a step (default 10)", above_zero(SECONDS), default="10"),
    row(
        "--jitter F",
        "how steps of a device differ: standard deviation / mean (default 0)",
        values.number(0.0, 1.0),
        default=0.0,
    ),
    row(
        "--save-every T|best",
        "between checkpoints, such as 30m (default: the best one is looked for)",
        interval,
        default="best",
    ),
    row("--save S", "seconds for which a save holds all up (default 10)", SECONDS, default="10"),
    row(
        "--background S",
        "seconds after that until a checkpoint is complete (default 0)",
        SECONDS,
        default="0",
    ),
    row("--detect S", "a failure is noticed after S at most; left out, as the file says", SECONDS),
    row(
        "--restart S",
        "from a start to the first step, loading included (default 300)",
        SECONDS,
        default="300",
    ),
    row(
        "--islands N|host",
        "hosts, or the devices of one, in N groups that step by themselves",
        values.islands,
        default="1",
    ),
    row(
        "--equal-every H",
        "steps between two boundaries, at which islands are made equal (default 30)",
        values.whole(1),
    ),
    row(
        "--parameters P",
        "of the model, such as 8e9: what a boundary sends",
        values.number(0, 1e15, above=True),
    ),
    row(
        "--between MBITS",
        "Mbit/s of the link of each island to the others; left out, a boundary takes no time",
        values.number(0, 1e9, above=True),
    ),
    row(
        "--wire W",
        f"what is sent as: {', '.join(FORMATS)} (default {FORMATS[0]})",
        values.one_of(*FORMATS),
    ),
    row(
        "--late T",
        "used T steps after it was sent: steps go on meanwhile (default 0)",
        values.whole(0),
    ),
    row("--trials N", "simulated runs (default 20)", values.whole(2, 10_000), default=20),
    row(
        "--seed N",
        "of the random numbers (default 0)",
        values.whole(0, values.LARGEST_SEED),
        default=0,
    ),
    JSON,
    row(
        "--out DIR",
        "for page and plot (default runs/simulate)",
        values.folder,
        default="runs/simulate",
    ),
)

TABLE: dict[str, dict[str, tuple[FlagRow, ...]]] = {
    "run": {"where": WHERE, "recover": RECOVER, "watch": WATCH},
    "doctor": {"where": DOCTOR},
    "plan": {"plan": PLAN},
    "verify": {"verify": VERIFY},
    "scale": {"scale": SCALE},
    "pipeline-plan": {"pipeline_plan": PIPELINE_PLAN},
    "simulate": {"simulate": SIMULATE},
}
"""By command and group of its help, the rows of its own flags."""
