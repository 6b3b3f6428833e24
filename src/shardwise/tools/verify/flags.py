"""Defines the flags of `shardwise verify`, and builds a request from them."""

import os
import shlex
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from shardwise import config
from shardwise.errors import LaunchError
from shardwise.launch import command_line, program, resources
from shardwise.launch.flag_table import flags_of
from shardwise.launch.flags import Command
from shardwise.messages.printable import printable

TOP = """\
Check that it trains the same:   shardwise verify -n 4 --zero 3 train.py --epochs 3

shardwise verify [flags] SCRIPT.py [its arguments]     runs it on one worker, then on several
"""

TIME_LIMIT = 300.0
"""Seconds without a step after which a run of a stock script is stopped."""

LAUNCHER = {
    "hosts": "-H",
    "hostfile": "--hostfile",
    "pass_on": "-x",
    "per_host": "--nproc-per-node",
    "ssh": "--ssh",
    "ssh_port": "--ssh-port",
    "python": "--python",
    "interface": "--interface",
    "host_timeout": "--host-timeout",
}
"""Maps parameter names to the launcher flags that a placement may contain."""


def command() -> Command:
    """Build the `verify` command, with the options of `run` that `verify` does not set itself."""
    own_settings = {"record", "record_tensors", "stop_after", "trial", "time_layers"}
    shared = {"words", "module", "size", "config", "adopt", *LAUNCHER, *config.FIELDS}
    return Command(
        "verify",
        top=TOP,
        callback=_verify,
        params=[
            *flags_of("verify"),
            command_line.help_all(),
            *command_line.flags_named(shared - own_settings),
        ],
        context_settings=command_line.PROGRAM_LAST,
        short_help="Prove that a script trains as on one worker.",
    )


def _verify(
    words: tuple[str, ...],
    steps: int,
    also: tuple[str, ...],
    against: str | None,
    causes: bool,
    accept: str,
    stock: bool,
    junit: str | None,
    total_batch: str | None,
    time_limit: float | None,
    resume_at: int | None,
    resume_with: str | None,
    json_file: Path | None,
    out: str | None,
    module: bool,
    adopt: tuple[str, ...] | None,
    **run_flags: Any,
) -> int:
    """Run the `verify` command. `run_flags` are the flags of the first placement."""
    if not words:
        raise LaunchError("No script given. Example: shardwise verify -n 2 train.py")
    if stock:
        unused = {"--also": bool(also), "--against": against is not None, "--adopt": adopt}
        if name := next((flag for flag, is_set in unused.items() if is_set), None):
            raise LaunchError(f"{name} has no meaning with --stock: leave it out.")
        return _verify_stock(
            words,
            steps,
            accept,
            json_file,
            junit,
            out,
            module=module,
            causes=causes,
            total_batch=total_batch,
            time_limit=TIME_LIMIT if time_limit is None else time_limit,
            resume_at=resume_at,
            resume_with=resume_with,
            **run_flags,
        )
    of_stock: dict[str, Any] = {
        "--junit": junit,
        "--total-batch": total_batch,
        "--resume-at": resume_at,
    }
    of_stock |= {"--resume-with": resume_with, "--time-limit": time_limit}
    if name := next((flag for flag, value in of_stock.items() if value is not None), None):
        raise LaunchError(f"{name} needs --stock.")
    program.command(words[0], words[1:], module=module)  # raises if the program does not exist
    if not module and not program.is_script(words[0]):
        raise LaunchError(f"shardwise verify runs Python: a script or -m MODULE, not {words[0]}.")
    command_line.mention_misplaced(words)
    adopting = command_line.adopting(adopt, words, module=module) if adopt is not None else ()
    original = None if against is None else tuple(_words_of(against, "--against"))
    if original is not None:
        name = original[0] if original else ""
        if not program.is_script(name):
            raise LaunchError(f"--against takes a Python script and its arguments, not {name!r}.")
        program.command(name, original[1:], module=False)  # raises if the script does not exist
    # Import here, because these modules import torch, and `shardwise --help` must start without it.
    placements = import_module("shardwise.tools.verify.placements")
    first = _placement(run_flags)
    # --also describes only a placement. All placements use the first one's training settings
    # (precision, seed, batch), because they are compared with the same reference.
    shared = {k: v for k, v in first.settings.items() if k in placements.TRAINING}
    further = [placement_of(text) for text in also]
    spread = [first, *(p.with_settings(**{**shared, **p.settings}) for p in further)]
    request = import_module("shardwise.tools.verify.request")
    kind = import_module("shardwise.tools.verify.runs").ScriptCommand
    verify_request = request.VerifyRequest(
        script=kind(words=words, module=module, adopting=adopting),
        placements=spread,
        steps=steps,
        out=Path(out or f"runs/verify-{printable(Path(words[0]).stem)}"),
        against=None if original is None else kind(words=original),
        causes=causes,
        accepts_rounding=accept == "rounding",
        precision=shared.get("precision", "fp32"),
    )
    return import_module("shardwise.tools.verify.command").verify(verify_request, json_file)  # type: ignore[no-any-return]


def _verify_stock(
    words: tuple[str, ...],
    steps: int,
    accept: str,
    json_file: Path | None,
    junit: str | None,
    out: str | None,
    *,
    module: bool,
    causes: bool,
    total_batch: str | None,
    time_limit: float,
    resume_at: int | None,
    resume_with: str | None,
    **given: Any,
) -> int:
    """Verify a script that uses another library. `given` contains the flags of a placement.

    Raises LaunchError if a placement flag other than -n is set.
    """
    unused = sorted(n for n in ("config", *config.FIELDS, *LAUNCHER) if given.get(n))
    if unused:
        flag = LAUNCHER.get(unused[0], f"--{unused[0].replace('_', '-')}")
        raise LaunchError(
            f"--stock runs a script of another library as it is, so {flag} has no "
            "meaning: leave it out."
        )
    if resume_at is None and resume_with is not None:
        raise LaunchError("--resume-with needs --resume-at K, the step after which to stop.")
    if resume_at is not None and resume_at >= steps:
        raise LaunchError(
            f"--resume-at {resume_at} leaves no step to compare: give a step below --steps {steps}."
        )
    if resume_at is not None and total_batch is not None:
        raise LaunchError(
            "--total-batch is for the run of one process, and --resume-at makes none: leave one of "
            "them out."
        )
    check_can_draw = import_module("shardwise.tools.report.output").check_can_draw
    check_can_draw("shardwise verify")  # before the runs, which take minutes
    command, name = _stock_command(words, given["size"], module=module)
    if total_batch is not None:
        command = replace(command, alone=_words_of(total_batch, "--total-batch"))
    again = command
    if resume_with is not None:
        parts = _words_of(resume_with, "--resume-with")
        if not parts:
            raise LaunchError("--resume-with takes a command, or a script and its arguments.")
        # A script is started like the first one, and a whole command as it is.
        is_script = program.is_script(parts[0]) or parts[0] == "-m"
        again = replace(command, words=parts, size=command.size if is_script else None)
    stock = import_module("shardwise.tools.verify.stock.stock_command")
    request = stock.StockRequest(
        command=command,
        steps=steps,
        out=Path(out or f"runs/verify-{printable(name)}"),
        accepts_rounding=accept == "rounding",
        finds_causes=causes,
        time_limit=time_limit,
        resume_at=resume_at,
        again=again,
    )
    return stock.verify(  # type: ignore[no-any-return]
        request, json_file=json_file, junit=None if junit is None else Path(junit)
    )


def _stock_command(words: tuple[str, ...], size: int | None, *, module: bool) -> tuple[Any, str]:
    """Return the command that starts the ranks, and the name of its script without a suffix."""
    kind = import_module("shardwise.tools.verify.stock.stock_runs").StockCommand
    if len(words) == 1 and " " in words[0] and not Path(words[0]).exists():
        if size is not None:
            raise LaunchError("Give -n for a script, or a whole command that starts the ranks.")
        command = kind(words=_words_of(words[0], "--stock"))
        name = next((Path(w).stem for w in command.words if program.is_script(w)), "command")
        return command, name
    program.command(words[0], words[1:], module=module)  # raises if there is none
    if not module and not program.is_script(words[0]):
        raise LaunchError(
            f"--stock takes a script, -m MODULE, or a whole command in quotes, not {words[0]}. "
            f'Example: --stock "{" ".join(words)}"'
        )
    script = ("-m", *words) if module else words
    size = size or resources.gpu_count(os.environ) or 2
    return kind(words=script, size=size), Path(words[0]).stem


def placement_of(text: str) -> Any:
    """Parse flags of `shardwise run` into a placement.

    Raises LaunchError if `text` contains a script, --adopt, or anything other than flags.
    """
    flags = command().make_context("--also", _words_of(text, "--also")).params
    if flags["words"]:
        raise LaunchError(
            f"--also takes flags of shardwise run without a script, not {text!r}. "
            'Example: --also "-n 2 --zero 3"'
        )
    if flags["adopt"] is not None:
        raise LaunchError(
            f"--also {text!r} contains --adopt, which belongs to the script: give --adopt once, "
            "outside of --also."
        )
    return _placement(flags)


def _words_of(text: str, flag: str) -> list[str]:
    """Split a command line into words. Raises LaunchError if a quote is not closed.

    The error message names `flag`, the flag whose value is `text`.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise LaunchError(f"{flag} {text!r} cannot be split into words: {error}.") from None


def _placement(run_flags: dict[str, Any]) -> Any:
    """Build a placement from `run_flags`.

    By default, there is one worker per GPU, or two workers if there are no GPUs.
    """
    settings = {
        name: command_line.as_text(value)
        for name, value in run_flags.items()
        if value is not None and name in ("config", *config.FIELDS)
    }
    command_line.check_settings(settings)
    launcher: list[str] = []
    for name, flag in LAUNCHER.items():
        value = run_flags[name]
        several = value if isinstance(value, tuple) else () if value is None else (value,)
        launcher += [word for each in several for word in (flag, str(each))]
    size = run_flags["size"]
    if size is None and all(run_flags[name] is None for name in ("hosts", "hostfile", "per_host")):
        size = resources.gpu_count(os.environ) or 2
    kind = import_module("shardwise.tools.verify.placements").RunPlacement
    return kind(size=size, settings=settings, launcher=tuple(launcher))
