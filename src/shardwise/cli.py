"""The `shardwise` command. Thin: it reads the command line and calls what does the work."""

import difflib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field
from importlib.metadata import version
from typing import Any

import click

from shardwise import config
from shardwise.errors import ConfigError, LaunchError
from shardwise.launch import gpus, program, supervisor

WRONG_USE = 2
WIDTH = 100

GROUPS = {
    "where": "Where",
    "spread": "Spread",
    "precision": "Precision",
    "recover": "Recover",
    "watch": "Watch",
}
"""The headings of the help; every setting and every flag of the launcher belongs to one."""


class Flag(click.Option):
    """A flag with its place in the help: a group, and the words of its left column."""

    def __init__(self, names: list[str], *, group: str, shown: str, **options: Any) -> None:
        super().__init__(names, **options)
        self.group = group
        self.shown = shown


class Command(click.Command):
    """A command whose help is one screen: an example on top, then its flags in groups."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what `--help` shows."""
        formatter.write(
            "Train on N workers as on one:   shardwise run -n 4 --zero 2 train.py --epochs 3\n\n"
            "shardwise run [flags] SCRIPT.py [its arguments]     also: -m MODULE, or any program\n"
        )
        flags = [flag for flag in self.params if isinstance(flag, Flag)]
        width = max(len(flag.shown) for flag in flags)
        for group, title in GROUPS.items():
            formatter.write(f"\n{title}\n")
            for flag in flags:
                if flag.group == group:
                    formatter.write(f"  {flag.shown:<{width}}  {flag.help}\n")


class Commands(click.Group):
    """The group of commands, which guesses what was meant by a word that is none of them."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that `args` begin with."""
        word = args[0]
        if word not in self.commands and not word.startswith("-"):
            near = difflib.get_close_matches(word, self.commands, n=1)
            meant = f"shardwise {near[0]}" if near else f"shardwise run {' '.join(args)}"
            raise LaunchError(f"There is no command {word!r}. Did you mean: {meant}")
        return super().resolve_command(ctx, args)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, 2 for what is wrong before any start."""
    try:
        code = _shardwise.main(arguments, prog_name="shardwise", standalone_mode=False)
    except click.NoSuchOption as error:
        message = _no_such_flag(error)
    except click.ClickException as error:
        message = error.format_message()
    except (LaunchError, ConfigError) as error:
        message = str(error)
    except click.Abort:
        return 130
    else:
        return code or 0
    print(f"shardwise: {message}", file=sys.stderr)
    return WRONG_USE


def _no_such_flag(error: click.NoSuchOption) -> str:
    near = difflib.get_close_matches(error.option_name, error.possibilities or (), n=1)
    hint = f"Did you mean {near[0]}?" if near else "See shardwise run --help."
    return (
        f"There is no flag {error.option_name}. {hint} "
        "(The script's own arguments go after its name.)"
    )


def _run(
    words: tuple[str, ...], size: int | None, module: bool, port: int, grace: float, **given: Any
) -> int:
    """The command `run`, with the flags that the user gave in `given`."""
    flags = {name: _as_text(value) for name, value in given.items() if value is not None}
    _check(flags)
    if not words:
        raise LaunchError("What shall be run? For example: shardwise run -n 2 train.py")
    if size is None:
        size = 1 if flags.get("device") == "cpu" else max(1, gpus.count(os.environ))
    if size < 1:
        raise LaunchError(f"-n {size}: a run has at least one rank; write -n 1 or more.")
    command = program.command(words[0], words[1:], module=module)
    _mention_misplaced(words[1:])
    job = supervisor.Job(command=command, size=size, flags=flags, port=port, grace=grace)
    return supervisor.run(job)


def _mention_misplaced(arguments: Sequence[str]) -> None:
    """Say, in case it was not meant, which of our flags stand among the script's arguments."""
    ours = {config.flag(name) for name in config.FIELDS}
    misplaced = [word for word in arguments if word.split("=")[0] in ours]
    if misplaced:
        click.echo(
            f"shardwise: {' '.join(misplaced)} stands after the script and goes to it. "
            "If it is meant for shardwise, put it before the script.",
            err=True,
        )


def _check(flags: dict[str, str]) -> None:
    """Refuse here, once and before any rank starts, what every rank would refuse."""
    environ = {**os.environ, config.FLAGS_VARIABLE: json.dumps(flags)}
    settings, _ = config.resolve(config.sources(environ, {}))
    settings.placement  # noqa: B018 an illegal row raises


def _as_text(value: str | bool) -> str:
    return value if isinstance(value, str) else "on" if value else "off"


def _own_flags() -> Iterator[Flag]:
    """The flags of the launcher itself."""
    yield Flag(
        ["size", "-n", "-np", "--nproc-per-node", "--nproc_per_node"],
        group="where",
        shown="-n N, --nproc-per-node N",
        type=int,
        help="ranks on this host; left out, one for each visible GPU, else 1",
    )
    yield Flag(
        ["module", "-m"],
        group="where",
        shown="-m MODULE",
        is_flag=True,
        help="run a module, as python -m does",
    )
    yield Flag(
        ["--port"],
        group="where",
        shown="--port PORT",
        type=click.IntRange(0, 65535),
        default=0,
        help="where rank 0 listens; left out, a port that is free",
    )
    yield Flag(
        ["--config"],
        group="where",
        shown="--config FILE",
        help="a TOML file of these settings; weaker than flags and environment",
    )
    yield Flag(
        ["--grace"],
        group="watch",
        shown="--grace SECONDS",
        type=click.FloatRange(min=0),
        default=5.0,
        help="between asking ranks to end and killing them (default 5)",
    )


def _setting_flag(field: "Field[Any]") -> Flag:
    """The flag that a field of Settings asks for."""
    name, about = config.flag(field.name), field.metadata
    common = {"group": about["group"], "default": None}
    if about["metavar"]:
        shown, default = f"{name} {about['metavar']}", _default(field)
        return Flag([field.name, name], shown=shown, help=about["help"] + default, **common)
    both, shown = f"{name}/--no-{name[2:]}", f"--[no-]{name[2:]}"
    default = f" (default {'on' if field.default else 'off'})"
    return Flag([field.name, both], shown=shown, help=about["help"] + default, **common)


def _default(field: "Field[Any]") -> str:
    """The default of a setting, where the help does not say it already."""
    if field.default is None or field.default == "auto":
        return ""
    value = f"{field.default:g}" if isinstance(field.default, float) else field.default
    return f" (default {value})"


def _flags() -> list[click.Parameter]:
    words = click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)
    return [words, *_own_flags(), *(_setting_flag(field) for field in config.FIELDS.values())]


def _command(name: str, callback: Callable[..., int], params: list[click.Parameter]) -> Command:
    """A command that leaves everything after its first word to the program that it runs."""
    return Command(
        name,
        callback=callback,
        params=params,
        context_settings={"allow_interspersed_args": False, "max_content_width": WIDTH},
        short_help="Train on N workers as on one.",
    )


@click.group(cls=Commands, invoke_without_command=True)
@click.version_option(version("shardwise"), message="shardwise %(version)s")
@click.pass_context
def _shardwise(ctx: click.Context) -> None:
    """Train a PyTorch model on many devices exactly as it trains on one."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


_shardwise.add_command(_command("run", _run, _flags()))
