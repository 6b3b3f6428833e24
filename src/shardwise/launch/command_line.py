"""Builds the flags of commands from the settings, and checks what a command line says of them."""

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
"""How commands read their line where everything after the script is the script's."""


def check_settings(flags: dict[str, str]) -> None:
    """Raise here, once and before any rank starts, the errors in settings that every rank would
    raise."""
    if environment.current_folder() is None:
        raise LaunchError(
            "The folder that this was started in does not exist any more: go to another one (cd)."
        )
    environ = {**os.environ, config.FLAGS_VARIABLE: json.dumps(flags)}
    settings, _ = config.resolve(config.sources(environ, {}))
    settings.placement  # noqa: B018 an illegal row raises
    config.check_contradictions(settings)


def mention_misplaced(words: Sequence[str], more: Collection[str] = ()) -> None:
    """Warn of our flags among the script's arguments: those of settings, and `more`, but for
    options that the script itself names."""
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
            f"shardwise: {' '.join(misplaced)} stands after the script and goes to it. "
            "If it is meant for shardwise, put it before the script.",
            err=True,
        )


def adopting(names: Sequence[str], words: Sequence[str], *, module: bool) -> tuple[str, ...]:
    """The words of a module that runs `words` with our classes in the place of those of `names`.

    Raises LaunchError where there is nothing of that name, or it is no Python.
    """
    for name in names:
        if name != "deepspeed" and find_spec(name) is None:  # of DeepSpeed nothing is needed
            raise LaunchError(
                f"--adopt {name} needs the package {name}: pip install 'shardwise[{name}]'"
            )
    program.command(words[0], tuple(words[1:]), module=module)  # raises where there is none
    if not module and not program.is_script(words[0]):
        raise LaunchError(f"--adopt runs scripts of Python, and {words[0]} is none.")
    return ("shardwise.adopt", ",".join(names), *(("-m",) if module else ()), *words)


def spelled(name: str, value: str) -> list[str]:
    """A setting as words of a command line."""
    flag = config.flag(name)
    if name in config.FIELDS and not config.FIELDS[name].metadata["metavar"]:
        return [flag if value == "on" else f"--no-{flag[2:]}"]
    return [flag, value]


def as_text(value: str | bool) -> str:
    return value if isinstance(value, str) else "on" if value else "off"


def _setting_flag(field: "Field[Any]") -> Flag:
    """The flag of a field of Settings."""
    name, about = config.flag(field.name), field.metadata
    common = {"group": about["group"], "rare": about["rare"], "default": None}
    common["listed"] = about["parse"] in values.OF_SEVERAL
    if about["metavar"]:
        shown, default = f"{name} {about['metavar']}", _default(field)
        return Flag([field.name, name], shown=shown, help=about["help"] + default, **common)
    both, shown = f"{name}/--no-{name[2:]}", f"--[no-]{name[2:]}"
    default = f" (default {'on' if field.default else 'off'})"
    return Flag([field.name, both], shown=shown, help=about["help"] + default, **common)


def _default(field: "Field[Any]") -> str:
    """The default of a setting, unless the help says it already."""
    if field.default is None or field.default == "auto":
        return ""
    value = f"{field.default:g}" if isinstance(field.default, float) else field.default
    return f" (default {value})"


def all_flags() -> list[click.Parameter]:
    words = click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)
    settings = (_setting_flag(field) for field in config.FIELDS.values())
    return [words, help_all(), *flags_of("run"), *settings]


def flags_named(names: Collection[str]) -> list[click.Parameter]:
    return [flag for flag in all_flags() if flag.name in names]


def help_all() -> click.Option:
    """The flag --help-all, which acts as soon as it is parsed."""

    def show(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
        if wanted and isinstance(ctx.command, Command):
            formatter = ctx.make_formatter()
            ctx.command.write_help(formatter, all_flags=True)
            click.echo(formatter.getvalue(), nl=False)
            ctx.exit()

    return click.Option(
        ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=show
    )
