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
from shardwise.errors import CheckpointError, UsageError

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Return the weights that save_checkpoint wrote into `checkpoint_dir` under `tag` (default: the
    latest), in fp32: masters if it has some. Needs one process. Raises CheckpointError without a
    save, UsageError for the last two arguments."""
    _refuse_words(exclude_frozen_parameters=exclude_frozen_parameters, lazy_mode=lazy_mode)
    home = Path(checkpoint_dir)
    latest = home / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    place = home if tag is None else home / tag
    if not place.is_dir():
        raise CheckpointError(f"{home} has no checkpoint with the tag {tag!r}.")
    if complete(place):
        return dict(_of_ours(place))
    save = as_checkpoint.opened(place)  # DeepSpeed's own files
    tensors = save.fp32()
    found = {name: _wide(tensors.whole(name)) for name in tensors.specs}
    return found | {name: found[first] for name, first in save.twins.items()}


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


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load those weights into `model`, on the CPU, and return it. As in DeepSpeed, missing and
    additional names are no error."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.cpu().load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | PathLike[str],
    output_dir: str | PathLike[str],
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write those weights into the folder `output_dir`, as `pytorch_model.bin` or, with
    `safe_serialization`, `model.safetensors`.

    Raises UsageError for more than `max_shard_size`, and for excluding frozen parameters.
    """
    _refuse_words(exclude_frozen_parameters=exclude_frozen_parameters)
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    nbytes = sum(value.nbytes for value in state.values())
    most = float("inf")
    if max_shard_size is not None:
        try:
            most = float(max_shard_size[:-2]) * _UNITS[max_shard_size[-2:].upper()]
        except (KeyError, ValueError):
            raise UsageError(
                f"max_shard_size is a text like 5GB, not {max_shard_size!r}."
            ) from None
    if nbytes > most:
        raise UsageError(
            f"The weights of {checkpoint_dir} are {nbytes / 1e9:.1f} GB, and max_shard_size is "
            f"{max_shard_size}: one file is written here. Write max_shard_size=None, or split them "
            "with `shardwise checkpoint export`."
        )
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if safe_serialization:
        write_tensors(state, {}, {}, folder / "model.safetensors")
    else:
        torch.save(state, folder / "pytorch_model.bin")


_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def _refuse_words(**words: bool) -> None:
    for name, value in words.items():
        if value:
            raise UsageError(
                f"{name}=True is not followed here: all weights are read whole. Leave it out, and "
                "choose among the weights that are returned."
            )
