"""deepspeed.utils.zero_to_fp32: whole fp32 weights of a save, ours or DeepSpeed's own."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.checkpoint.atomic_folders import complete
from shardwise.checkpoint.deepspeed import as_checkpoint
from shardwise.checkpoint.export import write_tensors
from shardwise.checkpoint.tools import OpenedCheckpoint
from shardwise.errors import CheckpointError

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | PathLike[str], tag: str | None = None
) -> dict[str, Tensor]:
    """The weights that save_checkpoint wrote into `checkpoint_dir` under `tag` (default: the latest
    one), floating-point ones in fp32: masters where there are some. Needs no other worker. Raises
    CheckpointError where there is none."""
    home = Path(checkpoint_dir)
    latest = home / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    place = home if tag is None else home / tag
    if not place.is_dir():
        raise CheckpointError(f"{home} has no checkpoint with the tag {tag!r}.")
    return dict(_of_ours(place) if complete(place) else _of_deepspeed(place))


def _of_ours(place: Path) -> Iterator[tuple[str, Tensor]]:
    with OpenedCheckpoint(place) as opened:
        model, optimizer = opened.sets["model"], opened.sets.get("optimizer")
        aliases = {name: first for name, first in model.metadata.items() if first in model.specs}
        for name, first in {**{name: name for name in model.specs}, **aliases}.items():
            master = f"{first}.master"
            if optimizer is not None and master in optimizer.specs:
                yield name, optimizer.whole(master)
            else:
                yield name, _wide(model.whole(first))


def _of_deepspeed(place: Path) -> Iterator[tuple[str, Tensor]]:
    save = as_checkpoint.opened(place)
    tensors = save.fp32()
    found = {name: _wide(tensors.whole(name)) for name in tensors.specs}
    yield from found.items()
    yield from ((name, found[first]) for name, first in save.twins.items())


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load those weights into `model`, on the CPU, and return it."""
    model.cpu().load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag))
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | PathLike[str], output_file: str | PathLike[str], tag: str | None = None
) -> None:
    """Write those weights as one file: safetensors by its ending, else as torch.save does."""
    state, out = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), Path(output_file)
    if out.suffix == ".safetensors":
        write_tensors(state, {}, {}, out)
    else:
        torch.save(state, out)
