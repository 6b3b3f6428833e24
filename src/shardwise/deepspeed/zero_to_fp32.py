"""Implements deepspeed.utils.zero_to_fp32, which reads full fp32 weights from a checkpoint."""

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
    """Return the full weights of a checkpoint in fp32. Call it in a single process.

    Args:
        checkpoint_dir: The folder that was passed to save_checkpoint.
        tag: Name of the checkpoint (default: the latest).
        exclude_frozen_parameters, lazy_mode: Not supported.

    Returns:
        CPU tensors by name. They are the fp32 masters if the checkpoint contains them.

    Raises:
        CheckpointError: If there is no checkpoint.
        UsageError: If an unsupported argument is True.
    """
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
    """Load a checkpoint's full fp32 weights into a model. Call it in a single process.

    As in DeepSpeed, missing and unexpected names are not errors.

    Args:
        model: The model, which is moved to the CPU.
        checkpoint_dir: The folder that was passed to save_checkpoint.
        tag: Name of the checkpoint (default: the latest).

    Returns:
        The same model.
    """
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
    """Write a checkpoint's full fp32 weights to a single file. Call it in a single process.

    Args:
        checkpoint_dir: The folder that was passed to save_checkpoint.
        output_dir: Folder to write to. Created if necessary.
        max_shard_size: Maximum size of the file, such as "5GB", or None.
        safe_serialization: Write `model.safetensors` instead of `pytorch_model.bin`.
        tag: Name of the checkpoint (default: the latest).
        exclude_frozen_parameters: Not supported.

    Raises:
        UsageError: If the weights are larger than `max_shard_size`, or if an unsupported argument
            is True.
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
                f"max_shard_size must be a size such as 5GB, not {max_shard_size!r}."
            ) from None
    if nbytes > most:
        raise UsageError(
            f"The weights of {checkpoint_dir} have {nbytes / 1e9:.1f} GB, more than "
            f"max_shard_size={max_shard_size}, and they are written to one file. Write "
            "max_shard_size=None, or split them with `shardwise checkpoint export`."
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
                f"{name}=True is not supported: all weights are read. Leave it out, and select "
                "from the returned weights."
            )
