"""Defines the launcher's own flags of `shardwise run`, and refuses those that have no effect.

Flags of settings are made by cli.py from the settings themselves."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import click

from shardwise.config import flag as flag_of
from shardwise.config import values
from shardwise.errors import ConfigError, LaunchError

GROUPS = {
    "scale": "Scale",
    "pipeline_plan": "Pipeline plan",
    "plan": "Plan",
    "verify": "Verify",
    "simulate": "Simulate",
    "where": "Where",
    "spread": "Spread",
    "islands": "Islands",
    "precision": "Precision",
    "recover": "Recover",
    "watch": "Watch",
}
"""The headings of the help; every setting and every flag of the launcher belongs to one."""


class Flag(click.Option):
    """A flag with its place in the help: a group, the words of its left column, and whether it is
    rare, so that only `--help-all` shows it; `listed` where its one value is a list."""

    def __init__(
        self,
        names: list[str],
        *,
        group: str,
        shown: str,
        rare: bool = False,
        listed: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(names, **options)
        self.group = group
        self.shown = shown
        self.rare = rare
        self.listed = listed


class Typed(click.ParamType):  # type: ignore[type-arg]
    """What a flag takes, as settings' texts become types (see config/values.py)."""

    def __init__(self, parse: values.Parse[Any]) -> None:
        self.name = "value"
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value in its type. Raises ConfigError, which names the flag."""
        del ctx
        try:
            return self._parse(values.as_text(value, self._parse))
        except ValueError as wanted:
            shown = param.shown.split()[0] if isinstance(param, Flag) else param and param.name
            raise ConfigError(f"{shown} takes {wanted}, not {value!r}.") from None


ADOPTED = ("accelerate", "deepspeed", "transformers", "lightning")
"""The libraries whose classes `--adopt` puts ours in the place of, as adopt.py does it."""


def adopted(text: str) -> tuple[str, ...]:
    """Names of libraries whose scripts run unchanged."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or any(name not in ADOPTED for name in names):
        raise ValueError("names out of " + ", ".join(ADOPTED))
    return names


def refuse_twice(order: Iterable[click.Parameter]) -> None:
    """Raise ConfigError for a list that comes twice in `order`: both may be meant.

    Of other flags the last one holds, so that `shardwise run --zero 2 "$@"` can be overridden.
    """
    seen: set[click.Parameter] = set()
    for each in order:
        if isinstance(each, Flag) and each in seen and each.listed:
            name = each.shown.split()[0]
            raise ConfigError(f"{name} is given twice: give one list, with commas.")
        seen.add(each)


class Command(click.Command):
    """A command whose help fits on one screen: examples in `top`, then its flags in groups."""

    def __init__(self, name: str, *, top: str, **options: Any) -> None:
        super().__init__(name, **options)
        self.top = top

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the arguments apart. Raises LaunchError for a list that is given twice."""
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        refuse_twice(order)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what `--help` shows: the flags that are not rare."""
        self.write_help(formatter, all_flags=False)
        formatter.write(f"\nRare flags too:   shardwise {self.name} --help-all\n")

    def write_help(self, formatter: click.HelpFormatter, *, all_flags: bool) -> None:
        """Write the examples and the flags."""
        formatter.write(self.top)
        flags = [
            flag for flag in self.params if isinstance(flag, Flag) and (all_flags or not flag.rare)
        ]
        width = max(len(flag.shown) for flag in flags)
        groups = {flag.group for flag in flags}
        for group, title in GROUPS.items():
            if group not in groups:
                continue
            formatter.write(f"\n{title}\n")
            for flag in flags:
                if flag.group == group:
                    formatter.write(f"  {flag.shown:<{width}}  {flag.help}\n")


def own() -> Iterator[Flag]:
    """The flags of the launcher itself."""
    yield Flag(
        ["size", "-n", "-np"],
        group="where",
        shown="-n N",
        type=Typed(values.whole(1, values.MOST_RANKS)),
        help="ranks in all; left out, one for each GPU or slot, else 1",
    )
    yield Flag(
        ["per_host", "--nproc-per-node", "--nproc_per_node"],
        group="where",
        shown="--nproc-per-node N",
        rare=True,
        type=Typed(values.whole(1, values.MOST_ON_A_HOST)),
        help="ranks on each host",
    )
    yield from _host_flags()
    yield from _elastic_flags()
    yield Flag(
        ["module", "-m"],
        group="where",
        shown="-m MODULE",
        is_flag=True,
        help="run a module, as python -m does",
    )
    yield Flag(
        ["--adopt"],
        group="where",
        shown="--adopt NAMES",
        listed=True,
        type=Typed(adopted),
        help=f"ours for {', '.join(ADOPTED)}",
    )
    yield Flag(
        ["--port"],
        group="where",
        shown="--port PORT",
        rare=True,
        type=Typed(values.whole(0, 65535)),
        help="where rank 0 listens, and each host of elastic islands; left out, one that is free",
    )
    yield Flag(
        ["--interface"],
        group="where",
        shown="--interface NAME",
        rare=True,
        help="between hosts; left out, the one that leads to rank 0",
    )
    yield Flag(
        ["--config"],
        group="where",
        shown="--config FILE",
        help="a TOML file of settings; weaker than flags and environment",
    )
    yield Flag(
        ["--deepspeed"],
        group="where",
        shown="--deepspeed JSON",
        rare=True,
        help="a DeepSpeed JSON as settings; weaker than all of these",
    )
    yield from _recover_flags()
    yield from _watch_flags()


def _host_flags() -> Iterator[Flag]:
    """The flags of runs on several hosts."""
    yield Flag(
        ["hosts", "-H", "--host", "--hosts"],
        group="where",
        shown="-H HOST:N,...",
        listed=True,
        help="hosts over ssh, and ranks on each: alice@node1:4,[fd00::2]:4",
    )
    yield Flag(
        ["hostfile", "--hostfile", "-hostfile", "--machinefile"],
        group="where",
        shown="--hostfile FILE",
        help="the same, a host on each line: node1 slots=4, or node1:4",
    )
    yield Flag(
        ["pass_on", "-x"],
        group="where",
        shown="-x NAME[=VALUE]",
        rare=True,
        multiple=True,
        help="a variable for the ranks on all hosts; may be repeated",
    )
    yield Flag(
        ["--ssh"],
        group="where",
        shown="--ssh COMMAND",
        rare=True,
        help="how to reach hosts, such as 'ssh -J gate' (default ssh)",
    )
    yield Flag(
        ["--ssh-port", "--ssh_port"],
        group="where",
        shown="--ssh-port PORT",
        rare=True,
        type=Typed(values.whole(1, 65535)),
        help="where ssh listens on the hosts",
    )
    yield Flag(
        ["--python"],
        group="where",
        shown="--python PATH",
        rare=True,
        help="the Python of the other hosts; left out, the path of this one",
    )
    yield Flag(
        ["--dry-run"],
        group="where",
        shown="--dry-run",
        rare=True,
        is_flag=True,
        help="say what would run where, and stop",
    )


def _elastic_flags() -> Iterator[Flag]:
    """The flags of runs that are started on each host by itself, as torchrun is."""
    yield Flag(
        ["--nnodes"],
        group="where",
        shown="--nnodes N|MIN:MAX",
        rare=True,
        help="hosts, each of which starts this same command, as with torchrun",
    )
    yield Flag(
        ["--rdzv-endpoint", "--rdzv_endpoint"],
        group="where",
        shown="--rdzv-endpoint HOST:PORT",
        rare=True,
        help="where those hosts meet, which is one of them",
    )
    yield Flag(
        ["--rdzv-id", "--rdzv_id"],
        group="where",
        shown="--rdzv-id NAME",
        rare=True,
        help="tells runs apart that meet at the same place",
    )
    yield Flag(
        ["--node-rank", "--node_rank"],
        group="where",
        shown="--node-rank I",
        rare=True,
        type=Typed(values.whole(0, values.MOST_RANKS)),
        help="which of those hosts this is; left out, in the order of their coming",
    )


def _recover_flags() -> Iterator[Flag]:
    """The flags of what happens after a failure."""
    yield Flag(
        ["restarts", "--restarts", "--max-restarts", "--max_restarts"],
        group="recover",
        shown="--restarts K",
        type=Typed(values.whole(0)),
        default=0,
        help="after a failure all ranks start again, so often at most",
    )
    yield Flag(
        ["--elastic-islands", "--elastic_islands"],
        group="recover",
        shown="--elastic-islands",
        is_flag=True,
        rare=True,
        help="an island that fails is left out, and starts again by itself (--islands N)",
    )


def _watch_flags() -> Iterator[Flag]:
    """The flags of what is shown, and of the end of a run."""
    yield Flag(
        ["--log-dir", "--log_dir"],
        group="watch",
        shown="--log-dir DIR",
        type=Typed(values.folder),
        help="keep what each rank says in a file of its own there",
    )
    yield Flag(
        ["shown", "--show"],
        group="watch",
        shown="--show RANKS",
        rare=True,
        listed=True,
        help="show only what these ranks say, such as 0,2-3",
    )
    yield Flag(
        ["--host-timeout", "--host_timeout"],
        group="watch",
        shown="--host-timeout SECONDS",
        rare=True,
        type=Typed(values.number(2, values.LONGEST)),
        help="silence after which a host is lost (default 10)",
    )
    yield Flag(
        ["--grace"],
        group="watch",
        shown="--grace SECONDS",
        rare=True,
        type=Typed(values.number(0, values.LONGEST)),
        help="between asking ranks to end and killing them (default 5)",
    )


_OF_HOSTS = ("ssh", "ssh_port", "python", "host_timeout")
_OF_OURS = ("grace", "port", *_OF_HOSTS)

ON_THIS_HOST = "a run on this host alone"
BY_SRUN = "the hosts of a Slurm job, which are srun's"
BY_TORCH = "a run with --nnodes, whose ranks torch's elastic agent starts"

NO_EFFECT = {
    ON_THIS_HOST: {
        **dict.fromkeys(_OF_HOSTS, "give hosts with -H or --hostfile"),
        "rdzv_id": "give --nnodes, the number of hosts",
        "rendezvous": "start ranks by mpirun or srun, which it is for",
    },
    BY_SRUN: dict.fromkeys(("grace", "rdzv_id", *_OF_HOSTS), "give hosts with -H or --hostfile"),
    BY_TORCH: {
        **dict.fromkeys(_OF_OURS, "give hosts with -H instead of --nnodes"),
        "rendezvous": "start ranks by mpirun or srun, which it is for",
    },
}
"""By way a run starts: what has no effect there, and what to do instead of leaving it out."""


def refuse_without_effect(way: str, given: Mapping[str, Any]) -> None:
    """Raise LaunchError for a flag in `given` (None where it was not) that has no effect."""
    for name, instead in NO_EFFECT[way].items():
        if given.get(name) is not None:
            raise LaunchError(
                f"{flag_of(name)} {given[name]} has no effect in {way}: leave it out, or {instead}."
            )


def started_by_others(where: str) -> LaunchError:
    """Return the error for `--elastic-islands` if another launcher starts the ranks."""
    return LaunchError(
        f"--elastic-islands is for ranks that we start, and {where} others start them: leave "
        "it out, or name the hosts with -H or --hostfile."
    )
