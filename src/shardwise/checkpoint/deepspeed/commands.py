"""Runs `shardwise zero-to-fp32 FOLDER OUT`, and `shardwise checkpoint` on saves of DeepSpeed.

Nothing of torch is imported before a command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwise.errors import CheckpointError
from shardwise.messages.printable import printable

if TYPE_CHECKING:
    from shardwise.checkpoint.deepspeed.save import Save

_PATH = click.Path(path_type=Path)


@click.command("zero-to-fp32", short_help="Write a DeepSpeed checkpoint's weights as one file.")
@click.argument("folder", type=_PATH)
@click.argument("out", type=_PATH)
@click.option("--tag", "-t", metavar="TAG", help="the save; left out, the one that `latest` names")
def zero_to_fp32(folder: Path, out: Path, tag: str | None) -> int:
    """Write the weights that DeepSpeed saved in FOLDER as one file in fp32, without DeepSpeed.

    OUT ends in .safetensors, .pt, .pth or .bin, or is a folder, for model.safetensors in it. To
    train on from FOLDER nothing needs to be converted: engine.load("FOLDER").
    """
    try:
        return convert(folder if tag is None else folder / tag, out)
    except CheckpointError as error:
        raise click.ClickException(printable(error)) from error


def convert(folder: Path, out: Path) -> int:
    """Write the weights of the save in `folder`, and say what they are. Raises CheckpointError."""
    from rich.console import Console
    from rich.progress import Progress

    from shardwise.checkpoint.deepspeed.as_checkpoint import opened
    from shardwise.checkpoint.deepspeed.convert import numel, place_of, write_fp32

    place = place_of(out)
    save = opened(folder)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("writing", total=numel(save))
        count = write_fp32(save, place, lambda more: progress.advance(task, more))
    click.echo(printable(f"{place}: {count} tensors in fp32, of {described(save)}"))
    return 0


def described(save: Save) -> str:
    """In words, what a save is."""
    ranks = "1 rank" if save.ranks == 1 else f"{save.ranks} ranks"
    return f"DeepSpeed {save.version}, ZeRO stage {save.stage} on {ranks}, step {save.steps}"


def damaged(save: Save) -> list[str]:
    """In words, which files of a save are not what was written."""
    from shardwise.checkpoint.deepspeed import inert

    return [fault for path in save.files.all if (fault := inert.damage(path)) is not None]
