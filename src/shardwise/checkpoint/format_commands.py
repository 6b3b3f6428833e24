"""Implements `shardwise checkpoint show|diff|import|export|fingerprint` for all formats.

torch is imported only when a command runs, so that `--help` is fast.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwise.checkpoint.atomic_folders import DOCUMENT
from shardwise.checkpoint.console import print_line, report_errors, waiting
from shardwise.errors import CheckpointError
from shardwise.messages.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shardwise.checkpoint.formats.rules import Change
    from shardwise.checkpoint.formats.saved import Checkpoint, Leaf

DIFFERENT = 1
"""Exit code of `diff` and `fingerprint --compare` if two checkpoints differ, and of `verify` if a
checkpoint is damaged."""

_PATH = click.argument("path", type=click.Path(path_type=Path))
_MAP = click.option(
    "--map",
    "rules",
    metavar="RULE",
    multiple=True,
    help='rename, split, fuse or transpose tensors: "OLD=NEW" or a built-in map (repeatable)',
)
_WEIGHTS = click.option(
    "--weights", metavar="NAME", help="use the averaged weights that the source has under this name"
)
_DRY_RUN = click.option(
    "--dry-run", is_flag=True, help="print the new names and shapes, and write nothing"
)


def is_own(path: Path) -> bool:
    """Return whether `path` is or contains a checkpoint in Shardwise's own format.

    The checkpoint's checkpoint.json may be missing.
    """
    from shardwise.checkpoint.atomic_folders import complete, lacks_document

    return os.path.lexists(path / DOCUMENT) or lacks_document(path) or bool(complete(path))


@click.command(short_help="Show the contents of a checkpoint of any format.")
@_PATH
@report_errors
def show(path: Path) -> int:
    """Show the format, the step, the optimizers and every tensor of a checkpoint of any format."""
    from rich.console import Console

    from shardwise.checkpoint.formats.comparing import tensors_of
    from shardwise.checkpoint.formats.recognise import open_checkpoint

    console = Console()
    with open_checkpoint(path) as checkpoint:
        lines = {"format": checkpoint.format, "path": str(checkpoint.path)}
        lines["step"] = "not stored" if checkpoint.step is None else str(checkpoint.step)
        lines["optimizers"] = _optimizer_line(checkpoint)
        if checkpoint.schedulers:
            lines["schedulers"] = ", ".join(checkpoint.schedulers)
        if checkpoint.averages:
            lines["averages"] = ", ".join(checkpoint.averages)
        lines |= checkpoint.facts
        width = max(map(len, lines))
        for name, value in lines.items():
            print_line(console, f"{name:>{width}}  {value}")
        found = tensors_of(checkpoint)
        console.print(_tensor_table(found, checkpoint.aliases))
        for kind, belongs in (("model", False), ("optimizer", True)):
            own = [
                leaf.spec
                for name, leaf in found.items()
                if name.startswith("optimizer: ") == belongs
            ]
            size = sum(spec.nbytes for spec in own)
            print_line(console, f"{kind:>{width}}  {len(own)} tensors, {size:,} bytes")
        for note in checkpoint.notes:
            print_line(console, f"{'note':>{width}}  {note}")
    return 0


def _optimizer_line(checkpoint: Checkpoint) -> str:
    """Describe the optimizers in one line: their parameter groups and learning rates."""
    lines = []
    for one in checkpoint.optimizers:
        rates = [str(group.options.get("lr", "?")) for group in one.groups]
        count = sum(len(group.keys) for group in one.groups)
        by = "by position" if one.is_by_position else "by name"
        kind = f"{one.kind}: " if one.kind else ""
        lines.append(f"{kind}{count} parameters {by}, lr {', '.join(rates)}")
    return "; ".join(lines) or "none"


def _new_table(*columns: str) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE)
    for column in columns:
        right = column in ("bytes", "changed", "relative")
        table.add_column(column, overflow="fold", justify="right" if right else "left")
    return table


def _add(table: Table, *words: str) -> None:
    from rich.text import Text

    table.add_row(*(Text(printable(word)) for word in words))


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "-"


def _tensor_table(tensors: dict[str, Leaf], aliases: dict[str, str]) -> Table:
    table = _new_table("tensor", "dtype", "shape", "bytes")
    for name, leaf in tensors.items():
        spec = leaf.spec
        _add(table, name, spec.dtype, _shape(spec.shape), f"{spec.nbytes:,}")
    for alias, first in aliases.items():
        _add(table, alias, "", f"tied to {first}", "")
    return table


@click.command(short_help="Compare two checkpoints of any formats.")
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.option("--model-only", is_flag=True, help="leave out the optimizer state")
@_MAP
@report_errors
def diff(first: Path, second: Path, model_only: bool, rules: tuple[str, ...]) -> int:
    """Compare the tensors of FIRST and SECOND, by bits and by relative difference.

    Rules of --map are applied to FIRST. The exit code is 1 if a tensor differs.
    """
    from rich.console import Console

    from shardwise.checkpoint.formats.comparing import compare, tensors_of
    from shardwise.checkpoint.formats.recognise import open_checkpoint

    console, same, odd = Console(), 0, []
    with open_checkpoint(first) as one, open_checkpoint(second) as other:
        for checkpoint in (one, other):
            _apply_prefixes(checkpoint)
        _apply(one, rules)
        # Some formats store a tied weight under all its names, others only under the first one.
        tensors = [tensors_of(each, model_only=model_only, all_names=True) for each in (one, other)]
        with waiting(console, "comparing"):
            for difference in compare(*tensors):
                same += difference.is_same
                odd += [] if difference.is_same else [difference]
    if odd:
        table = _new_table("tensor", "first", "second", "changed", "relative")
        for d in odd:
            specs = (
                "missing" if s is None else f"{s.dtype} {_shape(s.shape)}"
                for s in (d.first, d.second)
            )
            is_compared = d.first and d.second and d.first.shape == d.second.shape
            counts = (f"{d.changed:,}", f"{d.relative:.3g}") if is_compared else ("", "")
            _add(table, d.name, *specs, *counts)
        console.print(table)
    print_line(console, f"{same} tensors are bit-identical, {len(odd)} differ")
    return DIFFERENT if odd else 0


@click.command("import", short_help="Write a checkpoint of any format as one of Shardwise's.")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@_MAP
@_WEIGHTS
@click.option("--model-only", is_flag=True, help="leave out the optimizer state")
@_DRY_RUN
@report_errors
def import_(
    source: Path,
    out: Path,
    rules: tuple[str, ...],
    weights: str | None,
    model_only: bool,
    dry_run: bool,
) -> int:
    """Write the checkpoint SOURCE into the folder OUT, as OUT/step-N.

    Continue from it with engine.resume(OUT). What SOURCE lacks is printed. Built-in maps are
    llama-meta-to-hf, llama-hf-to-meta, llama-megatron-to-hf, llama-nanotron-to-hf,
    gpt2-hf-to-linear, gpt2-linear-to-hf, qkv-split, qkv-fuse, gate-up-split, gate-up-fuse,
    experts-fuse and experts-split.
    """
    from shardwise.checkpoint.formats import importing

    with _opened(source, rules, weights, model_only=model_only) as (checkpoint, changes):
        if dry_run:
            return _print_changes(checkpoint, changes)
        job = importing.prepare(checkpoint, model_only=model_only)
        with _progress("importing", job.nbytes) as advance:
            done = importing.write(job, out, advance)
    for note in done.notes:
        click.echo(printable(f"note: {note}"))
    click.echo(printable(f"{done.path}: {done.tensors} tensors, {done.nbytes:,} bytes"))
    return 0


@click.command(short_help="Write a checkpoint for another library.")
@_PATH
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--to",
    metavar="FORMAT",
    help="transformers, safetensors, pt, dcp, accelerate or lightning (default: from OUT's name)",
)
@click.option("--dtype", metavar="DTYPE", help="convert weights to fp32, bf16 or fp16")
@click.option("--with-optimizer", is_flag=True, help="also write optimizer state (pt, dcp)")
@click.option("--average", is_flag=True, help="write the moving average of the weights instead")
@_MAP
@_DRY_RUN
@report_errors
def export(
    path: Path,
    out: Path,
    to: str | None,
    dtype: str | None,
    with_optimizer: bool,
    average: bool,
    rules: tuple[str, ...],
    dry_run: bool,
) -> int:
    """Write the model in PATH to OUT, a file or folder that another library loads.

    transformers is a folder for from_pretrained, and is the default if OUT is the name of a folder.
    safetensors and pt are files. dcp is a folder for torch.distributed.checkpoint. accelerate is a
    folder for load_state, and lightning is a file for fit(ckpt_path=...). Both of them include the
    optimizer state.
    """
    from shardwise.checkpoint.deepspeed.folders import find
    from shardwise.checkpoint.formats import exporting

    if dtype is not None and dtype not in exporting.DTYPES:
        raise CheckpointError(
            f"--dtype {dtype}: write one of {', '.join(exporting.DTYPES)}, or leave it out."
        )
    if average and not is_own(path):
        what = "a DeepSpeed checkpoint" if find(path) else "not a Shardwise checkpoint"
        raise CheckpointError(
            f"{path} is {what}, which has no moving average. Leave out --average."
        )
    weights = "average" if average else None
    format = to or exporting.format_of(out)
    with_optimizer |= format in exporting.OF_TRAINING
    with _opened(path, rules, weights, named_only=not with_optimizer) as (checkpoint, changes):
        if dry_run:
            return _print_changes(checkpoint, changes)
        if checkpoint.format == "DeepSpeed" and dtype is None:
            dtype = "fp32"  # as its zero_to_fp32.py, from the master weights
        wanted = exporting.DTYPES[dtype] if dtype is not None else None
        job = exporting.Export(checkpoint, out, wanted, with_optimizer)
        job = exporting.check(job, format)
        with _progress("exporting", exporting.numel(job)) as advance:
            count = exporting.write(job, format, advance)
    for note in checkpoint.notes if with_optimizer else ():
        click.echo(printable(f"note: {note}"))
    converted = f" in {dtype}" if dtype is not None else ""
    click.echo(printable(f"{out}: {count} tensors{converted}"))
    return 0


@click.command(short_help="Print or compare the fingerprints of a model's tensors.")
@_PATH
@click.option(
    "--compare",
    "against",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="compare with a fingerprints.json, or with a checkpoint of any format",
)
@report_errors
def fingerprint(path: Path, against: Path | None) -> int:
    """Print the fingerprint of each of the model's tensors: dtype, shape and CRC-32, as JSON.

    With --compare, the exit code is 1 if a tensor differs or is missing.
    """
    found = _fingerprints(path)
    if against is None:
        click.echo(json.dumps(found, indent=1))
        return 0
    wanted = _fingerprints(against)
    odd = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
    for name in odd:
        first, second = (prints.get(name, "missing") for prints in (found, wanted))
        click.echo(printable(f"{name}: {first}, but {second} in {against}"))
    click.echo(printable(f"{len(found.keys() - set(odd))} tensors are equal, {len(odd)} differ"))
    return DIFFERENT if odd else 0


def _fingerprints(path: Path) -> dict[str, str]:
    """Read the fingerprints in a JSON file, or compute them for a checkpoint's model."""
    from shardwise.checkpoint.file_system import read_whole
    from shardwise.checkpoint.formats.comparing import fingerprints_of
    from shardwise.checkpoint.formats.recognise import open_checkpoint

    if path.suffix != ".json":
        with open_checkpoint(path) as checkpoint:
            return fingerprints_of(checkpoint.model, checkpoint.aliases)
    try:
        fields = json.loads(read_whole(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a file of fingerprints ({error}).") from error
    if not isinstance(fields, dict) or not all(isinstance(v, str) for v in fields.values()):
        raise CheckpointError(f"{path} is not a file of fingerprints: a map of text to text.")
    return fields


def verify_foreign(console: Console, path: Path) -> int:
    """Check the files of another library's checkpoint, and return the exit code."""
    from shardwise.checkpoint.formats.recognise import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        with waiting(console, "reading"):
            faults = list(checkpoint.damages(0, 1))
        for fault in faults:
            print_line(console, f"changed     {fault}")
        count = len(checkpoint.model.specs)
        result = f"{len(faults)} changed" if faults else "all as written"
        has_sums = checkpoint.has_checksums
        result += "" if has_sums else " (the format has no checksums: only headers and lengths)"
        print_line(console, f"{checkpoint.path}: {checkpoint.format}: {count} tensors, {result}")
    return DIFFERENT if faults else 0


# -- shared by the commands --------------------------------------------------------------------


@contextmanager
def _opened(
    path: Path,
    rules: Sequence[str],
    weights: str | None,
    *,
    model_only: bool = False,
    named_only: bool = False,
) -> Iterator[tuple[Checkpoint, list[Change]]]:
    """Context manager that opens a checkpoint and applies the user's map to it.

    Args:
        rules: The rules of the map.
        weights: Name of the averaged weights to use as the model, or None for the trained weights.
        model_only: Leave out all optimizers.
        named_only: Leave out optimizers whose parameters are identified by position.
    """
    from shardwise.checkpoint.formats.recognise import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        if weights is not None:
            if weights not in checkpoint.averages:
                known = ", ".join(checkpoint.averages) or "none"
                raise CheckpointError(
                    f"{checkpoint.path} has no averaged weights {weights!r}. It has {known}."
                )
            checkpoint.use(weights)
        if model_only:
            checkpoint.optimizers = []
        if named_only:
            kept = [one for one in checkpoint.optimizers if not one.is_by_position]
            checkpoint.optimizers = kept
        _apply_prefixes(checkpoint)
        yield checkpoint, _apply(checkpoint, rules)


def _apply_prefixes(checkpoint: Checkpoint) -> None:
    """Remove the prefixes that wrappers such as DistributedDataParallel add to names."""
    from shardwise.checkpoint.formats.importing import plain_prefixes
    from shardwise.checkpoint.formats.rules import apply

    apply(checkpoint, plain_prefixes(checkpoint))


def _apply(checkpoint: Checkpoint, texts: Sequence[str]) -> list[Change]:
    from shardwise.checkpoint.formats.rules import apply, rules_of

    return apply(checkpoint, rules_of(texts, checkpoint))


def _print_changes(checkpoint: Checkpoint, changes: Sequence[Change]) -> int:
    """Print the effect of a map on each tensor. Return the exit code."""
    from rich.console import Console

    table = _new_table("source", "result", "shape", "change")
    for change in changes:
        shapes = (_shape(checkpoint.model.specs[name].shape) for name in change.new)
        action = change.rule.action if change.rule is not None else ""
        renamed = "rename" if change.old != change.new else ""
        _add(
            table,
            "\n".join(change.old),
            "\n".join(change.new),
            "\n".join(shapes),
            action or renamed,
        )
    console = Console()
    console.print(table)
    print_line(console, f"{len(checkpoint.model.specs)} tensors; nothing was written")
    return 0


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Context manager that shows a progress bar, and yields a function that advances it."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda more: progress.advance(task, more)
