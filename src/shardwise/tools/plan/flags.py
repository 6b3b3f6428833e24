"""Defines and checks the flags of `shardwise plan`. It does not import torch, so it starts fast."""

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from shardwise.errors import LaunchError
from shardwise.launch import command_line, program
from shardwise.launch.flag_table import flags_of
from shardwise.launch.flags import Command
from shardwise.tools.report.output import check_can_draw

TOP = """\
Will it fit, and how long will it take?   shardwise plan --on 8xH100 train.py --epochs 3

shardwise plan [flags] SCRIPT.py [its arguments]     observes one step, without its memory
"""
EMPTY = "No script given. Example: shardwise plan --on 8xH100 train.py"
"""The error message if no script is given."""

MODEL = "shardwise.tools.plan.hf_model"
"""The module that `--hf` runs: it trains a transformers model from its config.json."""


def command() -> Command:
    """Build the `plan` command.

    It has the options of `shardwise run` that are not part of a placement, because `plan` chooses
    the placement itself.
    """
    shared = {
        "words",
        "module",
        "precision",
        "optimizer_state",
        "frozen_weights",
        "chunked_loss",
        "units",
        "seed",
        "adopt",
        "islands",
        "context",
    }
    return Command(
        "plan",
        top=TOP,
        callback=_plan,
        params=[
            *flags_of("plan"),
            command_line.help_all(),
            *command_line.flags_named(shared),
        ],
        context_settings=command_line.PROGRAM_LAST,
        short_help="Predict memory and time of a script's placements.",
    )


def _plan(
    words: tuple[str, ...],
    on: str | None,
    tokens: float | None,
    within: float | None,
    budget: float | None,
    calibrate: bool,
    explain: bool,
    hf: Path | None,
    json_file: Path | None,
    page: str | None,
    hardware: Path | None,
    disk: str | None,
    adopt: tuple[str, ...] | None,
    module: bool,
    **run_settings: Any,
) -> int:
    """Run the `plan` command. `run_settings` are the options shared with `shardwise run`."""
    settings = {
        name: command_line.as_text(value)
        for name, value in run_settings.items()
        if value is not None
    }
    command_line.check_settings(settings)
    _refuse_islands(settings.pop("islands", "1"))
    context = int(settings.pop("context", "0"))
    if calibrate:
        file = import_module("shardwise.tools.plan.plan_command").show_calibration()
        click.echo(f"measured: {file}; next: shardwise plan --on here train.py", err=True)
        if on is None and not words:
            return 0
    if on is None:
        raise LaunchError("No cluster given. Example: shardwise plan --on 8xH100 train.py")
    if tokens is None and (within is not None or budget is not None):
        raise LaunchError(
            "--within and --budget need --tokens N, the number of tokens to train on."
        )
    _check_outputs(json_file, page)
    if hf is not None:
        _check_configuration(hf)
        # The other words become arguments of hf_model, such as --batch-size.
        words, module = (MODEL, str(hf), *words), True
    if not words:
        raise LaunchError(EMPTY)
    program.command(words[0], words[1:], module=module)  # raises if the program does not exist
    if not module and not program.is_script(words[0]):
        raise LaunchError(f"shardwise plan observes Python: a script or -m MODULE, not {words[0]}.")
    if adopt is not None:
        command_line.adopting(adopt, words, module=module)  # raises if adopting is impossible
    command_line.mention_misplaced(words)
    flags = [word for name, value in settings.items() for word in command_line.spelled(name, value)]
    # This imports torch, which is slow. It runs after all checks, so that a wrong flag is reported
    # immediately.
    target = import_module("shardwise.tools.plan.plan_command")
    script = target.Script(
        (*(["-m"] if module else []), *words), tuple(flags), ",".join(adopt or ())
    )
    request = target.PlanRequest(
        script=script,
        on=on,
        tokens=tokens,
        within=within,
        budget=budget,
        hardware=() if hardware is None else (hardware,),
        disk=disk or "",
        context=context if context > 1 else 0,
        explain=explain,
        json_file=json_file,
        page=None if page is None else Path(page),
    )
    return target.show_plan(request)  # type: ignore[no-any-return]


def _check_outputs(json_file: Path | None, page: str | None) -> None:
    """Raise LaunchError if the output files cannot be written. Runs before the observation."""
    if json_file is not None and json_file.is_dir():
        raise LaunchError(f"--json {json_file} is a folder: name a file in it.")
    if json_file is not None and not json_file.parent.is_dir():
        raise LaunchError(
            f"--json {json_file}: no such folder: {json_file.parent}. Create it first."
        )
    if page is None:
        return
    if Path(page).exists() and not Path(page).is_dir():
        raise LaunchError(f"--page {page} is a file: name a folder for the page and its pictures.")
    check_can_draw("shardwise plan --page")


def _check_configuration(file: Path) -> None:
    """Raise LaunchError if `file` is not a transformers config.json."""
    if not file.is_file():
        raise LaunchError(f"--hf {file}: no such file. --hf takes a config.json of transformers.")
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise LaunchError(
            f"--hf {file} is not JSON ({error}). --hf takes a config.json of transformers."
        ) from None
    if not isinstance(content, dict) or "model_type" not in content:
        raise LaunchError(
            f"--hf {file} has no model_type, so it is not a configuration of transformers. Use the "
            "config.json in the folder of a model's weights."
        )
    if find_spec("transformers") is None:
        raise LaunchError(
            "--hf needs transformers, which is not installed: pip install 'shardwise[transformers]'"
        )


def _refuse_islands(islands: str) -> None:
    """Raise LaunchError if `--islands` asks for more than one island."""
    if islands == "1":
        return
    raise LaunchError(
        f"shardwise plan does not support --islands {islands}. Plan one island, with its devices "
        "for --on and its part of the batch. In every row each rank also keeps its part of an "
        "anchor: with n data-parallel ranks, 4 / n bytes per parameter (8 / n with nesterov, and "
        "4 / n more each with a lossy --wire and --late). For the time of boundaries and failures "
        "see shardwise simulate --islands."
    )
