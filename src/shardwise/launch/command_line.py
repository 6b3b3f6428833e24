"""Builds the flags of commands from the settings, and checks settings on a command line."""

import json
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import Field
from importlib.util import find_spec
from typing import Any

import click

from shardwise import config
from shardwise.config import values
from shardwise.errors import LaunchError
from shardwise.launch import program
from shardwise.launch.flag_table import flags_of
from shardwise.launch.flags import Command, Flag
from shardwise.net import environment

WIDTH = 100


PROGRAM_LAST = {"allow_interspersed_args": False, "max_content_width": WIDTH}
"""click's options for commands whose script takes all arguments after its name."""


def check_settings(flags: dict[str, str]) -> None:
    """Raise the errors in settings that every rank would raise, once and before any rank starts."""
    if environment.current_folder() is None:
        raise LaunchError("The current folder does not exist any more: change to another one (cd).")
    # Resolve all sources as each rank will do later.
    environ = {**os.environ, config.FLAGS_VARIABLE: json.dumps(flags)}
    settings, _ = config.resolve(config.sources(environ, {}))
    settings.placement  # noqa: B018 raises for an illegal row
    config.check_contradictions(settings)


def mention_misplaced(words: Sequence[str], more: Collection[str] = ()) -> None:
    """Warn of our flags among the script's arguments: flags of settings, and `more`.

    A flag is left out if the script's text names it, because then the script has that option too.
    """
    ours = {*(config.flag(name) for name in config.FIELDS), *more}
    text = program.text_of(words[0])
    misplaced = [
        word
        for word in words[1:]
        if (name := word.split("=")[0]) in ours
        and not re.search(rf"""["']{re.escape(name)}["'=]""", text)
    ]
    if misplaced:
        click.echo(
            f"shardwise: {' '.join(misplaced)} follows the script, so the script gets it. "
            "If it is meant for shardwise, put it before the script.",
            err=True,
        )


def adopting(names: Sequence[str], words: Sequence[str], *, module: bool) -> tuple[str, ...]:
    """Return the words of a module that runs `words` with the classes of `names` replaced by ours.

    Raises LaunchError if a library or the program is missing, or the program is not Python.
    """
    for name in names:
        # Our classes for DeepSpeed use nothing of its package.
        if name != "deepspeed" and find_spec(name) is None:
            raise LaunchError(
                f"--adopt {name} needs the package {name}: pip install 'shardwise[{name}]'"
            )
    program.command(words[0], tuple(words[1:]), module=module)  # raises if it does not exist
    if not module and not program.is_script(words[0]):
        raise LaunchError(f"--adopt needs a Python script, and {words[0]} is not one.")
    return ("shardwise.adopt", ",".join(names), *(("-m",) if module else ()), *words)


def spelled(name: str, value: str) -> list[str]:
    """Return a setting as words of a command line."""
    flag = config.flag(name)
    if name in config.FIELDS and not config.FIELDS[name].metadata["metavar"]:
        return [flag if value == "on" else f"--no-{flag[2:]}"]
    return [flag, value]


def as_text(value: str | bool) -> str:
    return value if isinstance(value, str) else "on" if value else "off"


def _setting_flag(field: "Field[Any]") -> Flag:
    """Return the flag of a field of Settings."""
    name, about = config.flag(field.name), field.metadata
    common = {"group": about["group"], "rare": about["rare"], "default": None}
    common["listed"] = about["parse"] in values.OF_SEVERAL
    if not about["metavar"]:
        both, shown = f"{name}/--no-{name[2:]}", f"--[no-]{name[2:]}"
        default = f" (default {'on' if field.default else 'off'})"
        return Flag([field.name, both], shown=shown, help=about["help"] + default, **common)
    default = ""
    if field.default is not None and field.default != "auto":  # else the help has it already
        value = f"{field.default:g}" if isinstance(field.default, float) else field.default
        default = f" (default {value})"
    shown = f"{name} {about['metavar']}"
    return Flag([field.name, name], shown=shown, help=about["help"] + default, **common)


def all_flags() -> list[click.Parameter]:
    words = click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)
    settings = (_setting_flag(field) for field in config.FIELDS.values())
    return [words, help_all(), *flags_of("run"), *settings]


def flags_named(names: Collection[str]) -> list[click.Parameter]:
    return [flag for flag in all_flags() if flag.name in names]


def help_all() -> click.Option:
    """Return the flag --help-all, which prints the help as soon as it is parsed."""

    def show(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
        if wanted and isinstance(ctx.command, Command):
            formatter = ctx.make_formatter()
            ctx.command.write_help(formatter, all_flags=True)
            click.echo(formatter.getvalue(), nl=False)
            ctx.exit()

    return click.Option(
        ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=show
    )
