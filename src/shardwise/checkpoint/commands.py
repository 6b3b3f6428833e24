"""Implements `shardwise checkpoint` and `shardwise zero-to-fp32`.

torch is imported only when a command runs, so that `--help` is fast.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwise.checkpoint.atomic_folders import DOCUMENT
from shardwise.checkpoint.console import print_line, report_errors, waiting
from shardwise.checkpoint.format_commands import (
    diff,
    export,
    fingerprint,
    import_,
    is_own,
    show,
    verify_foreign,
)
from shardwise.errors import CheckpointError
from shardwise.messages.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shardwise.checkpoint.deepspeed.save import Save
    from shardwise.checkpoint.tools import TensorLine

NOT_WHOLE = 1
"""Exit code of `verify` if a checkpoint fails verification."""


@click.group(
    short_help="Show, compare, verify, import or export a checkpoint.",
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
)
@click.pass_context
def checkpoint(ctx: click.Context) -> None:
    """Show, compare, verify, import or export a checkpoint.

    PATH is a checkpoint of Shardwise (the folder of one step, or a folder of several, the newest of
    which is used) or of another library: DeepSpeed, torch DCP (FSDP2, torchtitan), Transformers,
    PEFT, Lightning, Accelerate, a safetensors file or a file of torch.save. accept takes only
    checkpoints of Shardwise, and inspect takes only those of Shardwise and DeepSpeed.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(click.UsageError.exit_code)


_PATH = click.argument("path", type=click.Path(path_type=Path))


@checkpoint.command(short_help="Show the contents of a checkpoint.")
@_PATH
@report_errors
def inspect(path: Path) -> int:
    """Show the step, the optimizers and every tensor of a checkpoint."""
    from rich.console import Console

    from shardwise.checkpoint.tools import OpenedCheckpoint, summary

    console = Console()
    if (save := _open_deepspeed(path)) is not None:
        return _inspect_save(console, save)
    with OpenedCheckpoint(path) as opened:
        for name, value in summary(opened).items():
            print_line(console, f"{name:>10}  {value}")
        lines = list(opened.lines())
        console.print(_table(lines))
        for kind in opened.sets:
            lines_of_set = [line for line in lines if line.kind == kind]
            size = sum(line.spec.nbytes for line in lines_of_set)
            print_line(console, f"{kind:>10}  {len(lines_of_set)} tensors, {size:,} bytes")
    return 0


@checkpoint.command(short_help="Read all files, and compare the checksums.")
@_PATH
@report_errors
def verify(path: Path) -> int:
    """Read all files and compare the checksums. The exit code is 1 if any file has changed.

    PATH may be a checkpoint of any format, with the checksums that its format has.
    """
    from rich.console import Console

    from shardwise.checkpoint.tools import OpenedCheckpoint

    console, wrong, count = Console(), [], 0
    if (save := _open_deepspeed(path)) is not None:
        return _verify_save(console, save)
    if path.exists() and not is_own(path):
        return verify_foreign(console, path)
    with OpenedCheckpoint(path) as opened:
        with waiting(console, "reading"):
            for line, good in opened.verify_tensors():
                count += 1
                if not good:
                    wrong.append(line)
        missing, changed = opened.missing_tensors(), opened.changed_files()
        for name in missing:
            print_line(console, f"missing     {name}")
        for name in changed:
            print_line(console, f"changed     {name}")
        if wrong:
            console.print(_table(wrong, "Changed tensors"))
        good = not wrong and not missing and not changed
        faults = f"{len(wrong)} wrong, {len(missing)} missing"
        faults += f", {len(changed)} other files changed" if changed else ""
        result = "all as written" if good else faults
        result += "" if opened.is_summed else f" ({DOCUMENT} has no checksum: an earlier version)"
        print_line(console, f"{opened.path}: {count} tensors, {result}")
    return 0 if good else NOT_WHOLE


@checkpoint.command(short_help="Accept files that you edited on purpose.")
@_PATH
@report_errors
def accept(path: Path) -> int:
    """Accept deliberate edits of checkpoint.json and the small files next to it.

    Writes new checksums for these files. The checksums of tensors do not change.
    """
    from shardwise.checkpoint import document
    from shardwise.checkpoint.atomic_folders import newest

    folder = newest(path)
    try:
        fields = document.accept(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be changed: {error.strerror or error}.") from error
    click.echo(printable(f"{folder}: accepted as it is, at step {fields['step']}"))
    return 0


for _command in (show, diff, import_, export, fingerprint):
    checkpoint.add_command(_command)


def _open_deepspeed(path: Path) -> Save | None:
    """Return the DeepSpeed checkpoint at `path`, or None if there is none."""
    from shardwise.checkpoint.deepspeed.folders import find
    from shardwise.checkpoint.deepspeed.save import Save

    folder = find(path)
    return None if folder is None else Save(folder)


def _inspect_save(console: Console, save: Save) -> int:
    from shardwise.checkpoint.tools import TensorLine

    print_line(console, f"{'written by':>13}  {_describe(save)}")
    print_line(console, f"{'client_state':>13}  {', '.join(save.client_state) or 'nothing'}")
    specs = [save.model.specs[name] for name in sorted(save.model.specs)]
    console.print(_table(TensorLine("model", spec, "", "") for spec in specs))
    size = sum(spec.nbytes for spec in specs)
    print_line(console, f"{'model':>13}  {len(specs)} tensors, {size:,} bytes")
    return 0


def _verify_save(console: Console, save: Save) -> int:
    from shardwise.checkpoint.deepspeed import inert

    with waiting(console, "reading"):
        faults = [fault for path in save.files.all if (fault := inert.damage(path)) is not None]
    for fault in faults:
        print_line(console, f"changed     {fault}")
    result = f"{len(faults)} changed" if faults else "all as written"
    print_line(
        console,
        f"{save.files.folder}: {_describe(save)}: {len(save.files.all)} files, {result}",
    )
    return NOT_WHOLE if faults else 0


def _table(lines: Iterable[TensorLine], title: str | None = None) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE, title=title, title_justify="left")
    for column in ("set", "tensor", "dtype", "shape"):
        table.add_column(column, overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("CRC-32", no_wrap=True)
    for line in lines:
        spec = line.spec
        shape = " x ".join(map(str, spec.shape)) or "-"
        words = line.kind, spec.name, spec.dtype, shape, f"{spec.nbytes:,}", line.checksum or "-"
        table.add_row(*(Text(printable(word)) for word in words))
    return table


# -- DeepSpeed checkpoints --------------------------------------------------------------------


@click.command("zero-to-fp32", short_help="Write a DeepSpeed checkpoint's weights to one file.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--tag", "-t", metavar="TAG", help="tag to read (default: the one that `latest` names)"
)
def zero_to_fp32(folder: Path, out: Path, tag: str | None) -> int:
    """Write the weights of the DeepSpeed checkpoint in FOLDER to one fp32 file, without DeepSpeed.

    OUT is a file that ends in .safetensors, .pt, .pth or .bin, or a folder for model.safetensors.
    To continue training from FOLDER, no conversion is needed: engine.load("FOLDER").
    """
    try:
        return _convert(folder if tag is None else folder / tag, out)
    except CheckpointError as error:
        raise click.ClickException(printable(error)) from error


def _convert(folder: Path, out: Path) -> int:
    """Write the weights of the DeepSpeed checkpoint `folder` to `out`, and print a summary.

    Returns the exit code. Raises CheckpointError if the checkpoint cannot be read, or the file
    cannot be written.
    """
    from rich.console import Console
    from rich.progress import Progress

    from shardwise.checkpoint.deepspeed.as_checkpoint import opened
    from shardwise.checkpoint.deepspeed.convert import numel, place_of, write_fp32

    place = place_of(out)
    save = opened(folder)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("writing", total=numel(save))
        count = write_fp32(save, place, lambda more: progress.advance(task, more))
    click.echo(printable(f"{place}: {count} tensors in fp32, from {_describe(save)}"))
    return 0


def _describe(save: Save) -> str:
    ranks = "1 rank" if save.ranks == 1 else f"{save.ranks} ranks"
    return f"DeepSpeed {save.version}, ZeRO stage {save.stage} on {ranks}, step {save.steps}"
