"""Defines flags and commands with grouped help, and rejects flags that have no effect."""

from collections.abc import Iterable, Mapping
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
"""Headings in the help, by group. Every setting and every flag belongs to one group."""


class Flag(click.Option):
    """A click option with its position in the help.

    Args:
        group: The flag's group in the help, a key of GROUPS.
        shown: Left column in the help, such as "--port PORT".
        rare: True if only `--help-all` lists the flag.
        listed: True if the value is a list. Passing the flag twice is then an error.
    """

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
    """A click parameter type whose values have the syntax of settings (see config/values.py)."""

    def __init__(self, parse: values.Parse[Any]) -> None:
        self.name = "value"
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse `value`. Raises ConfigError with the flag's name if it is invalid."""
        del ctx
        try:
            return self._parse(values.as_text(value, self._parse))
        except ValueError as wanted:
            shown = param.shown.split()[0] if isinstance(param, Flag) else param and param.name
            raise ConfigError(f"{shown} takes {wanted}, not {value!r}.") from None


ADOPTED = ("accelerate", "deepspeed", "transformers", "lightning")
"""Libraries whose classes `--adopt` replaces with shardwise's classes (see adopt.py)."""


def parse_adopted(text: str) -> tuple[str, ...]:
    """Parse the value of `--adopt`, a comma-separated list of libraries."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or any(name not in ADOPTED for name in names):
        raise ValueError("one or more of " + ", ".join(ADOPTED))
    return names


def refuse_twice(order: Iterable[click.Parameter]) -> None:
    """Raise ConfigError if a flag that takes a list is passed twice.

    The user may have meant to combine the lists. For any other flag, the last value is used, so
    that the arguments of a wrapper such as `shardwise run --zero 2 "$@"` can override its flags.

    Args:
        order: All flags on the command line, in order.
    """
    seen: set[click.Parameter] = set()
    for each in order:
        if isinstance(each, Flag) and each in seen and each.listed:
            name = each.shown.split()[0]
            raise ConfigError(f"{name} is given twice: give one list, separated by commas.")
        seen.add(each)


class Command(click.Command):
    """A click command whose help fits on one screen.

    The help consists of the examples in `top` and the flags, by group.
    """

    def __init__(self, name: str, *, top: str, **options: Any) -> None:
        super().__init__(name, **options)
        self.top = top

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises ConfigError if a flag that takes a list is passed twice."""
        # click discards all but the last of repeated flags, so parse an extra time to see them all.
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        refuse_twice(order)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the text of `--help`, which omits rare flags."""
        self.write_help(formatter, all_flags=False)
        formatter.write(f"\nRare flags too:   shardwise {self.name} --help-all\n")

    def write_help(self, formatter: click.HelpFormatter, *, all_flags: bool) -> None:
        """Write the examples and the flags. Rare flags are included only if `all_flags` is true."""
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


_OF_HOSTS = ("ssh", "ssh_port", "python", "host_timeout")
_OF_OURS = ("grace", "port", *_OF_HOSTS)

ON_THIS_HOST = "a run on this host alone"
BY_SRUN = "a Slurm job, whose ranks srun starts"
BY_NODES = "a run that is started on each host, and needs no ssh"
BY_TORCH = "a run with --nnodes, whose ranks torch's elastic agent starts"

NO_EFFECT = {
    ON_THIS_HOST: {
        **dict.fromkeys(_OF_HOSTS, "give hosts with -H or --hostfile"),
        "rdzv_id": "give --nnodes, the number of hosts",
        "rendezvous": "start the ranks with mpirun or srun",
    },
    BY_SRUN: dict.fromkeys(("grace", "rdzv_id", *_OF_HOSTS), "give hosts with -H or --hostfile"),
    BY_NODES: {
        **dict.fromkeys(("ssh", "ssh_port", "python"), "start it once, with -H"),
        "rdzv_id": "use another port for each run",
        "rendezvous": "start the ranks with mpirun or srun",
    },
    BY_TORCH: {
        **dict.fromkeys(_OF_OURS, "give hosts with -H instead of --nnodes"),
        "rendezvous": "start the ranks with mpirun or srun",
    },
}
"""For each way to start a run, the flags that have no effect, and an alternative for each."""


def refuse_without_effect(way: str, given: Mapping[str, Any]) -> None:
    """Raise LaunchError if a flag in `given` has no effect for this kind of run.

    Args:
        way: How the run starts, a key of NO_EFFECT.
        given: Values of the flags by name. None if a flag was not passed.
    """
    # Raise instead of ignoring the flag, because the user expects an effect.
    for name, instead in NO_EFFECT[way].items():
        if given.get(name) is not None:
            raise LaunchError(
                f"{flag_of(name)} {given[name]} has no effect in {way}: leave it out, or {instead}."
            )


def started_by_others(where: str) -> LaunchError:
    """Return the error for using `--elastic-islands` if a different launcher starts the ranks."""
    return LaunchError(
        f"--elastic-islands needs ranks that shardwise run starts itself, and {where} another "
        "launcher starts them: leave it out, or name the hosts with -H or --hostfile."
    )
