"""Parses the `shardwise` command line, and calls the module that does the work."""

import difflib
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from shardwise import __version__, config
from shardwise.checkpoint.commands import checkpoint, zero_to_fp32
from shardwise.config import deepspeed
from shardwise.errors import LaunchError, ShardwiseError
from shardwise.launch import (
    allocations,
    command_line,
    console,
    deepspeed_flags,
    failure_report,
    program,
    resources,
    scale_up,
    start,
)
from shardwise.launch.flag_table import flags_of
from shardwise.launch.flags import Command
from shardwise.messages.other_libraries import hint as hint_at_other_library
from shardwise.messages.printable import printable, shortened
from shardwise.net.identity import described
from shardwise.net.launchers import detection as launcher_detection
from shardwise.net.launchers import slurm
from shardwise.tools.plan import flags as planning_flags
from shardwise.tools.simulate import flags as simulate_flags
from shardwise.tools.timeline.commands import timeline
from shardwise.tools.verify import flags as verify_flags

WRONG_USE = 2

RUN_TOP = """\
Train on N workers as on one:   shardwise run -n 4 --zero 2 train.py --epochs 3

shardwise run [flags] SCRIPT.py [its arguments]     also: -m MODULE, or any program
"""
DOCTOR_TOP = """\
Check the hosts and the network of a run:   shardwise doctor -H node1:2,node2:2

shardwise doctor [flags of the run]     also: srun shardwise doctor, mpirun -n 4 shardwise doctor
"""
SCALE_TOP = """\
Measure the speed-up of more workers:   shardwise scale -n 1,2,4,8 train.py --epochs 3

shardwise scale [flags] SCRIPT.py [its arguments]     the script needs no change
"""
PIPELINE_TOP = """\
Find good pipeline stages for a model:   shardwise pipeline-plan --pipeline 4 train.py --epochs 3

shardwise pipeline-plan [flags] SCRIPT.py [its arguments]     runs a few steps on one worker
"""
SCALE_UP_TOP = """\
Add workers to a run with --survive:   shardwise scale-up -n 2

shardwise scale-up [flags]     on the host of the run, while it trains
"""
NO_SCRIPT_TO_MEASURE = "No script given. Example: shardwise scale -n 1,2 train.py"
NO_SCRIPT_TO_TIME = "No script given. Example: shardwise pipeline-plan --pipeline 2 train.py"


class Commands(click.Group):
    """The group of subcommands. If the first word is not a subcommand, it suggests one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the subcommand that the first word names. Raises LaunchError if there is none."""
        word = args[0]
        if word not in self.commands and not word.startswith("-"):
            raise LaunchError(f"There is no command {word!r}. {self._suggest(args)}")
        return super().resolve_command(ctx, args)

    def _suggest(self, args: list[str]) -> str:
        """Return a suggestion for a command line whose first word is not a subcommand."""
        shown = sorted(name for name, command in self.commands.items() if not command.hidden)
        if near := difflib.get_close_matches(args[0], shown, n=1):
            return f"Did you mean: shardwise {near[0]}"
        if program.is_script(args[0]) or shutil.which(args[0]):
            return f"Did you mean: shardwise run {' '.join(args)}"
        return f"The commands are: {', '.join(shown)}."


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Return the exit code, which is 2 for errors before any rank starts."""
    # Do this first: if stdout or stderr is closed, the next file opened would get its descriptor.
    if closed := console.open_standard_streams():
        return _refuse(closed)
    try:
        code = _shardwise.main(arguments, prog_name="shardwise", standalone_mode=False)
        # Flush inside the `try`, so that a full disk or a closed pipe is reported here and not
        # while Python exits.
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.NoSuchOption as error:
        message = _no_such_flag(error, sys.argv[1:] if arguments is None else arguments)
    except click.ClickException as error:
        message = error.format_message()
    except ShardwiseError as error:
        message = str(error)
    except OSError as error:
        console.forget_unwritten()
        message = failure_report.os_error_sentence(error)
    except click.Abort:
        return 130
    else:
        return code or 0
    return _refuse(message)


def _refuse(message: str) -> int:
    """Print the error, escaped for terminals, and return the exit code."""
    if sys.stderr is not None:
        with suppress(OSError):  # stderr is closed: the exit code has to suffice
            print(f"shardwise: {shortened(printable(message))}", file=sys.stderr, flush=True)
    return WRONG_USE


def _no_such_flag(error: click.NoSuchOption, arguments: Sequence[str]) -> str:
    near = difflib.get_close_matches(error.option_name, error.possibilities or (), n=1)
    foreign = hint_at_other_library(error.option_name)
    if foreign and any(word.endswith(".py") for word in arguments):
        return (
            f"There is no flag {error.option_name}. If it is the script's own, write it after the "
            f"script's name. If it is another library's: {foreign}"
        )
    hint = foreign or (f"Did you mean {near[0]}?" if near else "See shardwise run --help.")
    return (
        f"There is no flag {error.option_name}. {hint} "
        "(The script's own arguments go after its name.)"
    )


def _run(words: tuple[str, ...], local_rank: bool = False, **given: Any) -> int:
    """Run the subcommand `run` with the flags in `given`.

    If `local_rank` is true, pass --local_rank to the script, as DeepSpeed's launcher does.
    """
    # Afterwards only the launcher's own flags are left in `given`.
    settings = {name: given.pop(name) for name in ("config", "deepspeed", *config.FIELDS)}
    settings = {
        name: command_line.as_text(value) for name, value in settings.items() if value is not None
    }
    command_line.check_settings(settings)
    adopted = given.pop("adopt", None)
    if not words:
        raise LaunchError("No script given. Example: shardwise run -n 2 train.py")
    command_line.mention_misplaced(words, OF_THE_SIZE if given.get("size") is None else ())
    if adopted is None:
        _mention_copies(words[0], given.get("size"))
    else:
        # From here on, the script runs inside the module shardwise.adopt.
        words = command_line.adopting(adopted, words, module=given["module"])
        given["module"] = True
    if local_rank:
        words = deepspeed_flags.with_local_rank(words, module=given["module"])
        given["module"] = True
    if "deepspeed" in settings:
        path, dry_run = settings["deepspeed"], given["dry_run"]
        job = deepspeed.parse(path)
        lines = deepspeed.lines(job, given["size"]) if dry_run else deepspeed.short_lines(job)
        for line in lines:
            click.echo(f"{path}: {line}", err=not dry_run)
    given["part_runner"] = None
    if given.pop("elastic_islands"):
        # Imported here, because most runs do not need it and it slows down the start.
        from shardwise.islands.elastic.run import RUNNER

        given["part_runner"] = RUNNER
    return start.run(start.LaunchRequest(words=words, settings=settings, **given))


def _mention_copies(script: str, size: int | None) -> None:
    """Warn if several workers would run a `script` that uses neither Shardwise nor Horovod.

    Each worker would run an independent copy, unless the script uses a different library.
    """
    text = program.text_of(script)
    if size is None or size == 1 or not text or program.names_us(text):
        return
    if (library := _adoptable(text)) is not None:
        click.echo(
            f"shardwise: {script} trains with {library} alone, so shardwise's flags have no "
            f"effect: write shardwise run --adopt {library}, or change its import "
            f"(docs/from_{library}.md).",
            err=True,
        )
    elif not program.joins_itself(script):
        click.echo(
            f"shardwise: {script} imports neither shardwise nor horovod. Unless one of its modules "
            f"calls sw.init, {size} independent copies run, and each does all of the work.",
            err=True,
        )


def _adoptable(text: str) -> str | None:
    """Return which library in a script's `text` --adopt can replace, or None."""
    if program.imports(text, "deepspeed"):
        return "deepspeed"
    if re.search(r"\bimport Accelerator\b|\baccelerate\.Accelerator\b", text):
        return "accelerate"
    if program.imports(text, "lightning", "pytorch_lightning", "lightning_fabric"):
        return "lightning"
    return "transformers" if re.search(r"\b(Seq2Seq)?Trainer\b", text) else None


def _deepspeed(words: tuple[str, ...], **given: Any) -> int:
    """Run the subcommand `deepspeed`: translate the flags of DeepSpeed's launcher for `run`."""
    if not words:
        raise LaunchError("No script given. Example: shardwise deepspeed --num_gpus 2 train.py")
    settings = {name: given.pop(name, None) for name in config.FIELDS}
    flags = deepspeed_flags.run_words(deepspeed_flags.parse(given, words))
    for name, value in settings.items():
        if value is not None:
            flags += command_line.spelled(name, command_line.as_text(value))
    if deepspeed_flags.adopts(words, given):
        flags += ["--adopt", deepspeed_flags.DEEPSPEED]
    if not settings["quiet"]:
        click.echo(f"shardwise: {deepspeed_flags.line_of([*flags, *words])}", err=True)
    # Parse the translated flags with `run` itself, so that its defaults and checks apply.
    params = _run_command().make_context("run", [*flags, *words]).params
    return _run(**params, local_rank=not given["no_local_rank"])


def _doctor(explain: bool, **given: Any) -> int:
    """Run the subcommand `doctor`.

    If a launcher started this process, check the host as one rank of that launcher's run.
    Otherwise, start a run and check its ranks.
    """
    identity = launcher_detection.identify()
    if explain:
        click.echo(described(identity, os.environ))
        if allocation := allocations.find(os.environ):
            names = ", ".join(str(host) for host in allocation.hosts)
            click.echo(f"hosts of {allocation}: {names}")
        return 0
    # Imported only here and by name, because doctor imports torch, which takes seconds.
    if identity.launcher != "python":
        return import_module("shardwise.tools.doctor.__main__").main()  # type: ignore[no-any-return]
    sizes = (given[name] for name in ("size", "per_host", "hosts", "hostfile", "nnodes"))
    has_hosts = slurm.needs_srun(os.environ) or allocations.find(os.environ) is not None
    if all(value is None for value in sizes) and not has_hosts:
        # Start at least two ranks, because a single rank has no network to check.
        given["size"] = resources.gpu_count(os.environ) or 2
    return _run(("shardwise.tools.doctor",), module=True, **given)


def _scale(
    words: tuple[str, ...],
    sizes: tuple[int, ...],
    kinds: str,
    warmup: int,
    steps: int | None,
    out: str | None,
    module: bool,
    hosts: str | None,
    hostfile: str | None,
    **given: Any,
) -> int:
    """Run the subcommand `scale`. `given` holds the settings of the measured runs."""
    passed = _settings_of_measured_runs(words, given, NO_SCRIPT_TO_MEASURE, module=module)
    for name, value in (("-H", hosts), ("--hostfile", hostfile)):
        passed += [] if value is None else [name, value]
    plan = import_module("shardwise.tools.scale.runs").ScalingPlan(
        words=words,
        flags=(*passed, *(["-m"] if module else [])),
        sizes=sizes,
        kinds=KINDS[kinds],
        warmup=warmup,
        steps=steps,
        out=Path(out or f"runs/scale-{printable(Path(words[0]).stem)}"),
    )
    return import_module("shardwise.tools.scale.measure").measure(plan)  # type: ignore[no-any-return]


def _pipeline_plan(
    words: tuple[str, ...], stages: int, micros: int | None, steps: int, by: str, **given: Any
) -> int:
    """Run the subcommand `pipeline-plan`. `given` holds the settings of the measured run."""
    passed = _settings_of_measured_runs(words, given, NO_SCRIPT_TO_TIME, module=False)
    command = import_module("shardwise.tools.pipeline_plan.command")
    request = command.PipelinePlanRequest(
        words, tuple(passed), stages, micros or 4 * stages, steps, by
    )
    return command.show_plan(request)  # type: ignore[no-any-return]


def _split(**given: Any) -> int:
    """Run `pipeline-plan` when it is called by its former name, `split`."""
    click.echo("shardwise: `shardwise split` is now called `shardwise pipeline-plan`.", err=True)
    return _pipeline_plan(**given)


def _settings_of_measured_runs(
    words: tuple[str, ...], given: dict[str, Any], no_script: str, *, module: bool
) -> list[str]:
    """Return the settings in `given` as command-line arguments.

    Raises LaunchError if `words` is empty (with the message `no_script`), or if the program does
    not exist.
    """
    settings = {
        name: command_line.as_text(value) for name, value in given.items() if value is not None
    }
    command_line.check_settings(settings)
    if not words:
        raise LaunchError(no_script)
    program.command(words[0], words[1:], module=module)  # raises if it does not exist
    command_line.mention_misplaced(words)
    return [word for name, value in settings.items() for word in command_line.spelled(name, value)]


OF_THE_SIZE = {"-n", "-np", "--nproc-per-node", "--nproc_per_node"}
"""Flags for the number of ranks. If none precedes the script, it may be misplaced after it."""

KINDS = {"strong": ("strong",), "weak": ("weak",), "both": ("strong", "weak")}


def _run_command() -> Command:
    """Build the `run` subcommand. It passes everything after its first word to the program."""
    return Command(
        "run",
        top=RUN_TOP,
        callback=_run,
        params=command_line.all_flags(),
        context_settings=command_line.PROGRAM_LAST,
        short_help="Train on N workers exactly as on one.",
    )


def _deepspeed_command() -> Command:
    """Build the `deepspeed` subcommand, with DeepSpeed's launcher flags and our settings."""
    return Command(
        deepspeed_flags.DEEPSPEED,
        top=deepspeed_flags.TOP,
        callback=_deepspeed,
        params=[
            click.Argument(["words"], nargs=-1, type=click.UNPROCESSED),
            command_line.help_all(),
            *deepspeed_flags.options(),
            *command_line.flags_named(config.FIELDS),
        ],
        context_settings=command_line.PROGRAM_LAST,
        short_help="Run a script as DeepSpeed's launcher does.",
    )


def _doctor_command() -> Command:
    """Build the `doctor` subcommand, with the flags of `run` except those for the program."""
    return Command(
        "doctor",
        top=DOCTOR_TOP,
        callback=_doctor,
        params=[
            *flags_of("doctor"),
            *(f for f in command_line.all_flags() if f.name not in ("words", "module", "adopt")),
        ],
        context_settings={"max_content_width": command_line.WIDTH},
        short_help="Check the hosts and the network of a run.",
    )


def _scale_command() -> Command:
    """Build the `scale` subcommand, with the settings of `run` except those that `scale` sets."""
    own = {"record", "record_tensors", "stop_after", "batch", "trial"}
    shared = {"words", "module", "config", "hosts", "hostfile", *config.FIELDS} - own
    return Command(
        "scale",
        top=SCALE_TOP,
        callback=_scale,
        params=[*flags_of("scale"), command_line.help_all(), *command_line.flags_named(shared)],
        context_settings=command_line.PROGRAM_LAST,
        short_help="Measure a script on 1, 2, 4, ... workers.",
    )


def _scale_up(workers: int, run: int | None) -> int:
    """Run the subcommand `scale-up`."""
    ranks = scale_up.scale_up(workers, run)
    click.echo(f"started rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}")
    return 0


def _scale_up_command() -> Command:
    """Build the `scale-up` subcommand."""
    return Command(
        "scale-up",
        top=SCALE_UP_TOP,
        callback=_scale_up,
        params=[*flags_of("scale-up"), command_line.help_all()],
        short_help="Add workers to a run that trains.",
    )


def _pipeline_plan_command(name: str, callback: Callable[..., int], *, hidden: bool) -> Command:
    """Build the `pipeline-plan` subcommand, with the settings that affect layer time or memory."""
    shared = {"words", "units", "device", "precision", "activations", "micro_batch_size"}
    return Command(
        name,
        top=PIPELINE_TOP,
        callback=callback,
        params=[
            *flags_of("pipeline-plan"),
            command_line.help_all(),
            *command_line.flags_named(shared),
        ],
        context_settings=command_line.PROGRAM_LAST,
        short_help="Find good pipeline stages for a model.",
        hidden=hidden,
    )


@click.group(cls=Commands, invoke_without_command=True)
@click.version_option(__version__, message="shardwise %(version)s")
@click.pass_context
def _shardwise(ctx: click.Context) -> None:
    """Train a PyTorch model on many devices exactly as it trains on one."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for _command in (
    _run_command(),
    _deepspeed_command(),
    _doctor_command(),
    _scale_command(),
    _scale_up_command(),
    _pipeline_plan_command("pipeline-plan", _pipeline_plan, hidden=False),
    _pipeline_plan_command("split", _split, hidden=True),
    verify_flags.command(),
    planning_flags.command(),
    simulate_flags.command(),
    checkpoint,
    zero_to_fp32,
    timeline,
):
    _shardwise.add_command(_command)
