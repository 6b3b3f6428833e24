"""Writes the reference of the command: each flag with its meaning, default, unit and an example.

Flags, meanings and defaults are read from the command line itself. EXAMPLES adds a unit and an
example; a flag without one, or an example that the command does not accept, stops the build.
"""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import click

from shardwise import config
from shardwise.cli import main as cli
from shardwise.errors import ShardwiseError
from shardwise.launch.flags import GROUPS, Command

COMMANDS = {
    "run": "Train on any number of workers.",
    "doctor": "Check the hosts and the network of a run before it starts.",
    "scale": "Measure a script at several numbers of workers.",
    "scale-up": "Add workers to a run that was started with `--survive`.",
    "verify": "Prove that a script gives the same result on several workers.",
    "pipeline-plan": "Find the best cuts of a model into pipeline stages.",
    "plan": "List the placements that fit on given hardware, with memory and time.",
    "simulate": "Estimate the time that failures cost.",
    "timeline": "Show where the time of a recorded run went.",
    "checkpoint": "Show, compare, verify, accept, import or export a checkpoint.",
    "zero-to-fp32": "Write a DeepSpeed checkpoint as one file.",
    "deepspeed": "Run a command line of DeepSpeed's launcher.",
}
"""The commands in the order of the page, and a sentence about each."""

SCRIPT = "train.py"

EXAMPLES: dict[str, tuple[str, str]] = {
    # flags of the launcher: unit, example
    "-n": ("workers", "-n 4"),
    "--nproc-per-node": ("workers", "--nproc-per-node 4"),
    "-H": ("", "-H node1:4,node2:4"),
    "--hostfile": ("", "--hostfile hosts"),
    "-x": ("", "-x HF_HOME=/data"),
    "--ssh": ("", "--ssh 'ssh -J gate'"),
    "--ssh-port": ("", "--ssh-port 2222"),
    "--python": ("", "--python /opt/venv/bin/python"),
    "--dry-run": ("", "--dry-run"),
    "--nnodes": ("hosts", "--nnodes 2:4"),
    "--rdzv-endpoint": ("", "--rdzv-endpoint node1:29500"),
    "--rdzv-id": ("", "--rdzv-id job7"),
    "--node-rank": ("", "--node-rank 0"),
    "-m": ("", "-m package.train"),
    "--adopt": ("", "--adopt accelerate"),
    "--port": ("", "--port 29500"),
    "--interface": ("", "--interface eth0"),
    "--config": ("", "--config run.toml"),
    "--deepspeed": ("", "--deepspeed ds.json"),
    "--restarts": ("restarts", "--restarts 10"),
    "--elastic-islands": ("", "--elastic-islands"),
    "--log-dir": ("", "--log-dir logs"),
    "--show": ("ranks", "--show 0,2-3"),
    "--host-timeout": ("seconds", "--host-timeout 30"),
    "--grace": ("seconds", "--grace 20"),
    # settings
    "--device": ("", "--device cpu"),
    "--transport": ("", "--transport gloo"),
    "--rendezvous": ("", "--rendezvous /shared/folder/"),
    "--zero": ("", "--zero 3"),
    "--shard": ("", "--shard gradients,optimizer"),
    "--offload-optimizer": ("", "--offload-optimizer cpu"),
    "--offload-params": ("", "--offload-params nvme:/scratch"),
    "--offload-gradients": ("", "--offload-gradients cpu"),
    "--shard-within": ("", "--shard-within host"),
    "--units": ("", "--units blocks.*,head"),
    "--tensor": ("workers", "--tensor 2"),
    "--sequence-parallel": ("", "--sequence-parallel"),
    "--expert": ("workers", "--expert 4"),
    "--context": ("workers", "--context 2"),
    "--context-method": ("", "--context-method gathered"),
    "--pipeline": ("stages", "--pipeline 4"),
    "--microbatches": ("micro-batches", "--microbatches 8"),
    "--schedule": ("", "--schedule zero-bubble"),
    "--stages": ("", "--stages blocks.4,blocks.9"),
    "--islands": ("islands", "--islands 2"),
    "--equal-every": ("steps", "--equal-every 50"),
    "--outer": ("", "--outer nesterov:0.7,0.9"),
    "--wire": ("", "--wire int8"),
    "--late": ("steps", "--late 5"),
    "--behind": ("steps", "--behind 1"),
    "--micro-batch-size": ("samples", "--micro-batch-size 8"),
    "--step-tokens": ("tokens", "--step-tokens 32768"),
    "--micro-batch-tokens": ("tokens", "--micro-batch-tokens 8192"),
    "--batch": ("", "--batch worker"),
    "--exact": ("micro-shards", "--exact 4"),
    "--bucket-mb": ("MB", "--bucket-mb 50"),
    "--overlap": ("", "--no-overlap"),
    "--activations": ("", "--activations recomputed"),
    "--offload-activations": ("", "--offload-activations cpu"),
    "--sync-batch-norm": ("", "--sync-batch-norm"),
    "--precision": ("", "--precision bf16-mixed"),
    "--reduce-dtype": ("", "--reduce-dtype param"),
    "--compile": ("", "--compile"),
    "--optimizer-state": ("", "--optimizer-state 8bit"),
    "--frozen-weights": ("", "--frozen-weights nf4"),
    "--chunked-loss": ("", "--chunked-loss"),
    "--nonfinite": ("", "--nonfinite skip"),
    "--survive": ("workers", "--survive 1"),
    "--save-failure": ("", "--save-failure continue"),
    "--trial": ("", "--trial"),
    "--seed": ("", "--seed 1"),
    "--reseed": ("", "--no-reseed"),
    "--timeout": ("seconds", "--timeout 600"),
    "--warn-after": ("seconds", "--warn-after 30"),
    "--ema-decay": ("", "--ema-decay 0.999"),
    "--guard": ("steps", "--guard 100"),
    "--guard-action": ("", "--guard-action restore"),
    "--guard-spikes": ("", "--guard-spikes skip"),
    "--guard-memory": ("", "--guard-memory"),
    "--timeline": ("", "--timeline run.json"),
    "--record": ("", "--record records"),
    "--record-tensors": ("", "--record-tensors records"),
    "--stop-after": ("steps", "--stop-after 100"),
    "--time-layers": ("", "--time-layers layers.json"),
    "--quiet": ("", "--quiet"),
    # flags of the other commands
    "--explain": ("", "--explain"),
    "--kind": ("", "--kind both"),
    "--warmup": ("steps", "--warmup 10"),
    "--steps": ("steps", "--steps 20"),
    "--out": ("", "--out runs/mine"),
    "--also": ("", '--also "-n 2 --tensor 2"'),
    "--against": ("", '--against "plain.py --epochs 1"'),
    "--causes": ("", "--no-causes"),
    "--stock": ("", "--stock"),
    "--junit": ("", "--junit verify.xml"),
    "--total-batch": ("", '--total-batch "--batch-size 64"'),
    "--time-limit": ("seconds", "--time-limit 900"),
    "--resume-at": ("steps", "--resume-at 10"),
    "--resume-with": ("", '--resume-with "train.py --resume last.pt"'),
    "--accept": ("", "--accept rounding"),
    "--json": ("", "--json result.json"),
    "--by": ("", "--by parameters"),
    "--on": ("hosts x devices", "--on 4x8xH100"),
    "--tokens": ("tokens", "--tokens 2e9"),
    "--within": ("days or hours", "--within 10d"),
    "--budget": ("dollars", "--budget 500"),
    "--calibrate": ("", "--calibrate"),
    "--hf": ("", "--hf config.json"),
    "--hardware": ("", "--hardware devices.toml"),
    "--disk": ("", "--disk /scratch"),
    "--page": ("", "--page runs/plan"),
    "--failures": ("", "--failures rsc1"),
    "--spares": ("workers", "--spares 1"),
    "--min-hosts": ("hosts", "--min-hosts 3"),
    "--reconnect": ("seconds", "--reconnect 2"),
    "--days": ("days", "--days 54"),
    "--step": ("seconds", "--step 10"),
    "--jitter": ("", "--jitter 0.02"),
    "--save-every": ("seconds, minutes or hours", "--save-every 30m"),
    "--save": ("seconds", "--save 10"),
    "--background": ("seconds", "--background 60"),
    "--detect": ("seconds", "--detect 300"),
    "--restart": ("seconds", "--restart 600"),
    "--parameters": ("parameters", "--parameters 8e9"),
    "--between": ("Mbit/s", "--between 1000"),
    "--trials": ("runs", "--trials 100"),
    "--merge": ("", "--merge whole.json"),
    "--average": ("", "--average"),
    "--tag": ("", "--tag global_step1000"),
    "--map": ("", "--map model.layers.{i}.=blocks.{i}."),
    "--weights": ("", "--weights state_dict_ema"),
    "--model-only": ("", "--model-only"),
    "--to": ("", "--to dcp"),
    "--dtype": ("", "--dtype bf16"),
    "--with-optimizer": ("", "--with-optimizer"),
    "--compare": ("", "--compare weights/latest/fingerprints.json"),
}
"""By the first name of a flag: its unit (empty if it has none), and an example of it."""

FOR_COMMAND: dict[tuple[str, str], tuple[str, str]] = {
    ("scale", "-n"): ("workers", "-n 1,2,4"),
    ("simulate", "--spares"): ("hosts", "--spares 50"),
    ("scale-up", "-n"): ("workers", "-n 2"),
    ("scale-up", "--run"): ("", "--run 4711"),
    ("plan", "--islands"): ("islands", "--islands 1"),
    ("simulate", "--on"): ("hosts x devices", "--on 2048x8xH100"),
    ("timeline", "--json"): ("", "--json"),
    ("timeline", "--steps"): ("", "--steps"),
}
"""Flags whose unit or example differs in one command."""

WITHOUT_EXAMPLE = {"deepspeed"}
"""Commands whose flags belong to another program, which documents them."""

_DEFAULT = re.compile(r"\s*\(default:? ([^()]*)\)|;\s*(?:default:|left out,) (.*)$")


def pages_text() -> str:
    """Return the Markdown of all commands. Raises ValueError if a flag has no valid example."""
    parts = []
    for name, sentence in COMMANDS.items():
        parts.append(f"## shardwise {name}\n\n{sentence}\n")
        command = cli._shardwise.commands[name]
        if isinstance(command, click.Group):
            parts += [_section(f"{name} {each}", inner) for each, inner in command.commands.items()]
        else:
            parts.append(_section(name, command))
    return "\n".join(parts)


def _section(name: str, command: click.Command) -> str:
    """Return the usage of a command, and its flags as tables."""
    usage = command.top if isinstance(command, Command) else _usage(name, command)
    text = [f"```text\n{usage.rstrip()}\n```\n"]
    flags = [each for each in command.params if isinstance(each, click.Option) and each.help]
    known = {} if name == "run" else _flags_of_run()
    own = [each for each in flags if not _is_shared(each, known)]
    shared = [f"`{each.opts[0]}`" for each in flags if _is_shared(each, known)]
    if name in WITHOUT_EXAMPLE:
        text.append(_table(["flag", "meaning"], [[_code(_shown(f)), _cell(f.help)] for f in own]))
    else:
        for title, rows in _tables(name, command, own):
            text.append(f"### {title}\n" if name == "run" else "")
            text.append(_table(["flag", "meaning", "default", "unit", "example"], rows))
    if shared:
        text.append(f"It also takes these flags of `shardwise run`: {', '.join(shared)}.\n")
    return "\n".join(text)


def _tables(name: str, command: click.Command, flags: list[click.Option]) -> Iterator[Any]:
    """Yield a title and rows for each group of flags; settings after flags of the launcher."""
    groups = dict.fromkeys(getattr(flag, "group", None) for flag in flags)
    for is_setting in (False, True):
        for group in sorted(groups, key=[*GROUPS, None].index):
            of_group = [
                flag
                for flag in flags
                if getattr(flag, "group", None) == group
                and ((flag.name in config.FIELDS) == is_setting or name != "run")
            ]
            if rows := [_row(name, command, flag) for flag in of_group]:
                kind = "Settings" if is_setting else "Launcher"
                yield f"{kind}: {GROUPS[group].lower()}" if name == "run" else "", rows
        if name != "run":
            return


def _row(name: str, command: click.Command, flag: click.Option) -> list[str]:
    unit, example = _example(name, flag)
    _check(name, command, example)
    meaning, default = _meaning_and_default(flag)
    return [_code(_shown(flag)), _cell(meaning), _cell(default), unit, _code(example)]


def _example(name: str, flag: click.Option) -> tuple[str, str]:
    """Return the unit and the example of a flag."""
    first = flag.opts[0]
    if found := FOR_COMMAND.get((name.split()[0], first)) or EXAMPLES.get(first):
        return found
    raise ValueError(f"shardwise {name} {first} has no example: add one to EXAMPLES")


def _check(name: str, command: click.Command, example: str) -> None:
    """Parse an example as the command does. Raises ValueError if it is not accepted."""
    positional = [each for each in command.params if isinstance(each, click.Argument)]
    words = shlex.split(example) + [SCRIPT] * len(positional)
    for each in command.params:
        if isinstance(each, click.Option) and each.required and each.opts[0] not in words:
            words = shlex.split(_example(name, each)[1]) + words
    try:
        command.make_context(name, words)
    except (click.ClickException, ShardwiseError) as error:
        raise ValueError(f"shardwise {name} {example}: {error}") from None


def _meaning_and_default(flag: click.Option) -> tuple[str, str]:
    """Split the help of a flag; its default is a field's, or what the help says."""
    found = _DEFAULT.search(flag.help or "")
    meaning = _DEFAULT.sub("", flag.help or "").strip()
    if found:
        return meaning, found[1] or found[2]
    if flag.is_flag:
        return meaning, "off"
    if flag.name in config.FIELDS:
        default = config.FIELDS[flag.name].default
        return meaning, "not set" if default is None else str(default)
    return meaning, str(flag.default) if isinstance(flag.default, (str, int, float)) else "not set"


def _flags_of_run() -> dict[str, str]:
    """Return the help of each flag of `shardwise run`, by its first name."""
    run = cli._shardwise.commands["run"]
    return {each.opts[0]: each.help or "" for each in run.params if isinstance(each, click.Option)}


def _is_shared(flag: click.Option, known: dict[str, str]) -> bool:
    """Return whether `shardwise run` has the same flag, with the same meaning."""
    return known.get(flag.opts[0]) == flag.help


def _shown(flag: click.Option) -> str:
    return getattr(flag, "shown", None) or " ".join([flag.opts[0], flag.metavar or ""]).strip()


def _usage(name: str, command: click.Command) -> str:
    parent = click.Context(cli._shardwise, info_name="shardwise")
    context = click.Context(command, info_name=name, parent=parent)
    return context.get_usage().removeprefix("Usage: ") + "\n\n" + (command.help or "")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def _cell(text: str | None) -> str:
    """Escape the characters that end a cell, or begin HTML or emphasis."""
    return (text or "").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
