"""Defines each command's own flags, in the order in which `--help` lists them.

Flags of settings are not defined here, because `command_line.py` derives them from `Settings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import click

from shardwise.config import values
from shardwise.config.outer_optimizer import FORMATS
from shardwise.launch.flags import ADOPTED, Flag, Typed, parse_adopted


class FlagRow(NamedTuple):
    """A command-line flag.

    Args:
        shown: Left column in the help, such as "--port PORT".
        help: Right column in the help.
        type: Type of the value, or None for text.
        names: Names of the flag.
        options: Additional arguments of `Flag`.
    """

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
    """Return the row of a flag. `names` defaults to the first word of `shown`."""
    takes = parse if parse is None or isinstance(parse, click.ParamType) else Typed(parse)
    return FlagRow(shown, help, takes, (names or shown.split()[0]).split(), options)


def flags_of(command: str) -> Iterator[Flag]:
    """Yield the flags in TABLE for `command`. Flags of settings are not included."""
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
    """Parse a positive number, such as 2e9."""
    return values.number(0, 1e30, above=True)(text)


def days(text: str) -> float:
    """Parse a duration such as 10d, 12h or 10 (days), and return it in days."""
    wanted = "days or hours, such as 10d or 12h"
    try:
        found = values.duration("d", units="dh")(text) / 86400
    except ValueError:
        raise ValueError(wanted) from None
    if not 0 < found <= 1e6:
        raise ValueError(wanted)
    return found


def above_zero(parse: Callable[[str], float]) -> Callable[[str], float]:
    """Return a parser that works like `parse` but rejects 0."""

    def parsed(text: str) -> float:
        seconds = parse(text)
        if seconds == 0:
            raise ValueError("a duration above 0")
        return seconds

    return parsed


def interval(text: str) -> float | None:
    """Parse an interval, and return it in seconds, or None for "best"."""
    return None if text.strip() == "best" else above_zero(values.duration("s"))(text)


SECONDS = values.duration("s")
PORT = values.whole(1, 65535)

JSON = row(
    "--json FILE",
    "also write the results to this file, as JSON; - is the standard output",
    values.file,
    names="--json json_file",
)

WHERE = (
    row(
        "-n N",
        "total number of ranks (default: one per GPU or slot, else 1)",
        values.whole(1, values.MOST_RANKS),
        names="size -n -np",
    ),
    row(
        "--nproc-per-node N",
        "number of ranks on each host",
        values.whole(1, values.MOST_ON_A_HOST),
        names="per_host --nproc-per-node --nproc_per_node",
        rare=True,
    ),
    row(
        "-H HOST:N,...",
        "hosts to reach over ssh, with ranks: alice@node1:4,[fd00::2]:4",
        names="hosts -H --host --hosts",
        listed=True,
    ),
    row(
        "--hostfile FILE",
        "read hosts from a file, one per line: node1 slots=4 or node1:4",
        names="hostfile --hostfile -hostfile --machinefile",
    ),
    row(
        "-x NAME[=VALUE]",
        "set an environment variable for all ranks; repeatable",
        names="pass_on -x",
        rare=True,
        multiple=True,
    ),
    row("--ssh COMMAND", "command to reach hosts, such as 'ssh -J gate' (default ssh)", rare=True),
    row(
        "--ssh-port PORT",
        "port of the ssh server on the hosts (default: ssh's own)",
        PORT,
        names="--ssh-port --ssh_port",
        rare=True,
    ),
    row(
        "--python PATH",
        "Python interpreter on the other hosts (default: this one's path)",
        rare=True,
    ),
    row("--dry-run", "print the command of each host, and stop", rare=True, is_flag=True),
    row(
        "--nnodes N|MIN:MAX",
        "number of hosts that each start this same command, as with torchrun",
        rare=True,
    ),
    row(
        "--rdzv-endpoint HOST:PORT",
        "with --nnodes: meeting place, one of the hosts",
        names="--rdzv-endpoint --rdzv_endpoint",
        rare=True,
    ),
    row(
        "--rdzv-id NAME",
        "with --nnodes: name that distinguishes runs with the same endpoint",
        names="--rdzv-id --rdzv_id",
        rare=True,
    ),
    row(
        "--node-rank I",
        "with --nnodes: number of this host (default: in order of arrival)",
        values.whole(0, values.MOST_RANKS),
        names="--node-rank --node_rank",
        rare=True,
    ),
    row("-m MODULE", "run a module, as python -m does", names="module -m", is_flag=True),
    row("--adopt NAMES", f"run scripts of {', '.join(ADOPTED)}", parse_adopted, listed=True),
    row(
        "--port PORT",
        "port of rank 0, and of each host of elastic islands (default: a free one)",
        values.whole(0, 65535),
        rare=True,
    ),
    row(
        "--interface NAME",
        "network interface between hosts (default: the route to rank 0)",
        rare=True,
    ),
    row("--config FILE", "read settings from TOML; flags and environment override it"),
    row(
        "--deepspeed JSON", "read settings from a DeepSpeed JSON; all others override it", rare=True
    ),
)

RECOVER = (
    row(
        "--restarts K",
        "restart all ranks after a failure, at most K times (default 0)",
        values.whole(0),
        names="restarts --restarts --max-restarts --max_restarts",
        default=0,
    ),
    row(
        "--elastic-islands",
        "with --islands N: continue without a failed island, and restart it",
        names="--elastic-islands --elastic_islands",
        is_flag=True,
        rare=True,
    ),
)

SCALE_UP = (
    row(
        "-n K",
        "number of workers to add (default 1)",
        values.whole(1, values.MOST_ON_A_HOST),
        names="workers -n",
        default=1,
    ),
    row(
        "--run PID",
        "process id of the run's launcher (default: the only run that can grow)",
        values.whole(1),
        default=None,
    ),
)

WATCH = (
    row(
        "--log-dir DIR",
        "write the output of each rank to a file in this folder",
        values.folder,
        names="--log-dir --log_dir",
    ),
    row(
        "--show RANKS",
        "show only the output of these ranks, such as 0,2-3",
        names="shown --show",
        rare=True,
        listed=True,
    ),
    row(
        "--host-timeout SECONDS",
        "seconds of silence after which a host counts as lost (default 10)",
        values.number(2, values.LONGEST),
        names="--host-timeout --host_timeout",
        rare=True,
    ),
    row(
        "--grace SECONDS",
        "seconds between SIGTERM and SIGKILL when a run ends (default 5)",
        values.number(0, values.LONGEST),
        rare=True,
    ),
)

DOCTOR = (row("--explain", "only show how this process found its rank", is_flag=True),)

PLAN = (
    row("--on CLUSTER", "cluster: 8xH100, 4x8xH100 (hosts x devices), or here"),
    row("--tokens N", "tokens to train on, such as 2e9, to show days of training", amount),
    row("--within 10d", "mark placements that take longer", days),
    row("--budget DOLLARS", "mark placements that cost more", amount),
    row("--calibrate", "measure this machine for a minute, for --on here", is_flag=True),
    row(
        "--hf CONFIG.json",
        "plan a Transformers model from its configuration, without a script",
        values.file,
    ),
    row("--hardware FILE", "read your own devices and links from TOML", values.file),
    row("--disk DIR", "also consider states on disk, in this folder of the hosts", values.folder),
    row(
        "--explain",
        "show the tensors, with their lines, at the memory peak of the first placement",
        is_flag=True,
    ),
    JSON,
    row("--page DIR", "plot memory over the step there: plan.html and plan.png", values.folder),
)

VERIFY = (
    row(
        "--steps S",
        "number of steps to compare (default 20); fewer if the script ends",
        values.whole(1),
        default=20,
    ),
    row(
        '--also "FLAGS"',
        'add a placement, such as --also "-n 2 --tensor 2"; repeatable',
        multiple=True,
    ),
    row(
        '--against "PLAIN.py ARGS"',
        "compare with this script without Shardwise, not with -n 1 --zero 0",
    ),
    row(
        "--stock",
        "verify a script of another library, started by torchrun or by its own command",
        is_flag=True,
    ),
    row("--junit FILE", "with --stock: also write the result as a JUnit XML file", values.file),
    row(
        '--total-batch "ARGS"',
        "with --stock: add these arguments in one process, which then reads its own batches",
    ),
    row(
        "--time-limit SECONDS",
        "with --stock: stop a run that makes no step for this many seconds (default 300)",
        above_zero(SECONDS),
    ),
    row(
        "--resume-at K",
        "with --stock: stop the ranks after K steps, start them again, and compare with a run "
        "that was not stopped",
        values.whole(1),
    ),
    row(
        '--resume-with "COMMAND"',
        "with --resume-at: what to start again (default: the same command)",
    ),
    row(
        "--[no-]causes",
        "find out by further runs why a placement differs (default on)",
        names="--causes/--no-causes",
        default=True,
    ),
    row(
        "--accept bits|rounding",
        "rounding: also exit with 0 if results are equal within rounding (default bits)",
        click.Choice(["bits", "rounding"]),
        default="bits",
    ),
    JSON,
    row("--out DIR", "folder of page, plot and logs (default runs/verify-SCRIPT)", values.folder),
)

SCALE = (
    row(
        "-n 1,2,4,8",
        "numbers of workers to measure (default 1,2,4,8)",
        values.counts,
        names="sizes -n -np",
        listed=True,
        default="1,2,4,8",
    ),
    row(
        "--kind strong|weak|both",
        "strong: constant total batch; weak: constant batch per worker (default strong)",
        click.Choice(["strong", "weak", "both"]),
        names="kinds --kind",
        default="strong",
    ),
    row(
        "--warmup K",
        "drop the first K steps of each run (default 5)",
        values.whole(0),
        default=5,
    ),
    row(
        "--steps S",
        "end a run S steps after the warm-up (default: when the script ends)",
        values.whole(1),
    ),
    row("--out DIR", "folder of table, plots and page (default runs/scale-SCRIPT)", values.folder),
)

PIPELINE_PLAN = (
    row(
        "--pipeline P",
        "number of pipeline stages, one per worker (default 2)",
        values.whole(2, values.MOST_RANKS),
        names="stages --pipeline",
        default=2,
    ),
    row(
        "--microbatches M",
        "micro-batches per batch (default 4 x P)",
        values.whole(1),
        names="micros --microbatches",
    ),
    row(
        "--by time|parameters",
        "quantity to balance across stages (default time)",
        click.Choice(["time", "parameters"]),
        default="time",
    ),
    row("--steps S", "number of steps to time (default 8)", values.whole(1), default=8),
)

SIMULATE = (
    row(
        "--on HOSTSxNxDEVICE",
        "hosts and devices of the run, such as 2048x8xH100",
        names="cluster --on",
        required=True,
    ),
    row(
        "--failures NAME|FILE.toml",
        "failure rates: llama3, rsc1, rsc2, none, or a TOML file (default llama3)",
        default="llama3",
    ),
    row("--spares N", "number of spare hosts (default 0)", values.whole(0), default=0),
    row(
        "--min-hosts N",
        "continue with this few hosts (default: all, or 1 with --reconnect)",
        values.whole(1),
        names="least --min-hosts",
    ),
    row(
        "--reconnect S",
        "as with run --survive, continue without a lost host after S seconds",
        SECONDS,
    ),
    row(
        "--hardware FILE",
        "read your own devices from a TOML file or a folder of them; repeatable",
        multiple=True,
    ),
    row(
        "--days D",
        "days of training without any loss (default 30)",
        above_zero(values.duration("d")),
        default="30",
    ),
    row("--step S", "seconds per step (default 10)", above_zero(SECONDS), default="10"),
    row(
        "--jitter F",
        "standard deviation / mean of a device's step times (default 0)",
        values.number(0.0, 1.0),
        default=0.0,
    ),
    row(
        "--save-every T|best",
        "time between checkpoints, such as 30m (default best: search for the best one)",
        interval,
        default="best",
    ),
    row("--save S", "seconds that a save stops training (default 10)", SECONDS, default="10"),
    row(
        "--background S",
        "further seconds until the checkpoint is complete (default 0)",
        SECONDS,
        default="0",
    ),
    row("--detect S", "seconds to detect a failure, at most (default: from --failures)", SECONDS),
    row(
        "--restart S",
        "seconds from a start to the first step, loading included (default 300)",
        SECONDS,
        default="300",
    ),
    row(
        "--islands N|host",
        "groups of devices that step on their own; host: one per host (default 1)",
        values.islands,
        default="1",
    ),
    row(
        "--equal-every H",
        "synchronise parameters across islands every H steps (default 30)",
        values.whole(1),
    ),
    row(
        "--parameters P",
        "parameters of the model, such as 8e9, which islands exchange",
        values.number(0, 1e15, above=True),
    ),
    row(
        "--between MBITS",
        "Mbit/s of each island's link to the others (default: infinitely fast)",
        values.number(0, 1e9, above=True),
    ),
    row(
        "--wire W",
        f"format that islands send values in: {', '.join(FORMATS)} (default {FORMATS[0]})",
        values.one_of(*FORMATS),
    ),
    row(
        "--late T",
        "apply differences T steps after sending them; steps continue (default 0)",
        values.whole(0),
    ),
    row("--trials N", "number of simulated runs (default 20)", values.whole(2, 10_000), default=20),
    row(
        "--seed N",
        "seed of the random numbers (default 0)",
        values.whole(0, values.LARGEST_SEED),
        default=0,
    ),
    JSON,
    row(
        "--out DIR",
        "folder of page and plot (default runs/simulate)",
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
    "scale-up": {"recover": SCALE_UP},
    "pipeline-plan": {"pipeline_plan": PIPELINE_PLAN},
    "simulate": {"simulate": SIMULATE},
}
"""The own flags of each command, by command and help group."""
