"""Defines the command `shardwise simulate`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from shardwise.launch.flag_table import flags_of
from shardwise.launch.flags import Command

TOP = """\
What do failures cost?   shardwise simulate --on 2048x8xH100 --failures llama3 --days 54

shardwise simulate [flags]     needs no script and no device: you give the durations
"""


def command() -> Command:
    return Command(
        "simulate",
        top=TOP,
        callback=_simulate,
        params=list(flags_of("simulate")),
        context_settings={"max_content_width": 100},
        short_help="Show the effect of failures on a run of days.",
    )


def _simulate(json_file: Path | None, out: str, hardware: tuple[str, ...], **options: Any) -> int:
    request = import_module("shardwise.tools.simulate.report").SimulationRequest(
        hardware=hardware, **options
    )
    command_module = import_module("shardwise.tools.simulate.command")
    return command_module.run(request, Path(out), json_file)  # type: ignore[no-any-return]
