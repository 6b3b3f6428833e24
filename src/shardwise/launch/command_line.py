"""Builds command-line flags from the fields of Settings, and checks settings on a command line."""

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
"""click options for commands that pass all arguments after the script's name to the script."""


def check_settings(flags: dict[str, str]) -> None:
    """Raise an error for invalid settings before any rank starts, so that it is printed once."""
    if environment.current_folder() is None:
        raise LaunchError("The current folder no longer exists: change to another folder (cd).")
    # Resolve settings from all sources, as each rank will do later.
    environ = {**os.environ, config.FLAGS_VARIABLE: json.dumps(flags)}
    settings, _ = config.resolve(config.sources(environ, {}))
    settings.placement  # noqa: B018 raises for an illegal row
    config.check_contradictions(settings)


def mention_misplaced(words: Sequence[str], more: Collection[str] = ()) -> None:
    """Warn about shardwise flags after the script's name, where they are passed to the script.

    There is no warning if the script's source contains the flag, because the script then defines
    the flag itself.

    Args:
        words: The script and its arguments.
        more: Further flags of shardwise. Flags of settings are always included.
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
    """Return the arguments of `python -m` that run a program with `--adopt`.

    Raises LaunchError if a library or the program is missing, or if the program is not Python.

    Args:
        names: Libraries whose classes are replaced by shardwise's classes.
        words: The program and its arguments.
        module: True if the program is a module.
    """
    for name in names:
        # The replacements for DeepSpeed's classes do not need the deepspeed package.
        if name != "deepspeed" and find_spec(name) is None:
            raise LaunchError(
                f"--adopt {name} needs the package {name}: pip install 'shardwise[{name}]'"
            )
    program.command(words[0], tuple(words[1:]), module=module)  # raises if it does not exist
    if not module and not program.is_script(words[0]):
        raise LaunchError(f"--adopt needs a Python script, and {words[0]} is not one.")
    # The module replaces the classes first and then runs the program in the same process.
    return ("shardwise.adopt", ",".join(names), *(("-m",) if module else ()), *words)


def spelled(name: str, value: str) -> list[str]:
    """Format a setting as command-line arguments."""
    flag = config.flag(name)
    if name in config.FIELDS and not config.FIELDS[name].metadata["metavar"]:
        return [flag if value == "on" else f"--no-{flag[2:]}"]
    return [flag, value]


def as_text(value: str | bool) -> str:
    return value if isinstance(value, str) else "on" if value else "off"


def _setting_flag(field: "Field[Any]") -> Flag:
    """Return the command-line flag for a field of Settings."""
    name, about = config.flag(field.name), field.metadata
    common = {"group": about["group"], "rare": about["rare"], "default": None}
    common["listed"] = about["parse"] in values.OF_SEVERAL
    if not about["metavar"]:
        both, shown = f"{name}/--no-{name[2:]}", f"--[no-]{name[2:]}"
        default = f" (default {'on' if field.default else 'off'})"
        return Flag([field.name, both], shown=shown, help=about["help"] + default, **common)
    default = ""
    if field.default is not None and field.default != "auto":  # else the help text explains it
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
    """Return the flag --help-all, which also lists rare flags."""

    def show(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
        if wanted and isinstance(ctx.command, Command):
            formatter = ctx.make_formatter()
            ctx.command.write_help(formatter, all_flags=True)
            click.echo(formatter.getvalue(), nl=False)
            ctx.exit()

    # Eager, so that the help is printed even if other arguments are missing or invalid.
    return click.Option(
        ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=show
    )
