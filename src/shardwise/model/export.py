"""Whole tensors as one plain file that the stock libraries read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from shardwise.errors import CheckpointError

ENDINGS = (".safetensors", ".pt")


def check_ending(path: Path) -> None:
    """Raise CheckpointError for a name that does not say in which form to write."""
    if path.suffix not in ENDINGS:
        raise CheckpointError(
            f"{path} ends in {path.suffix or 'nothing'}: an export ends in {' or '.join(ENDINGS)}."
        )


def write_model(model: nn.Module, path: Path) -> None:
    """Write the state of `model` to `path`, in the form that its ending says."""
    write_tensors(*_plain_tensors(model), path)


def write_tensors(tensors: dict[str, Tensor], aliases: Mapping[str, str], path: Path) -> None:
    """Write `tensors`, each with memory of its own, and for each of `aliases` the tensor that it
    names: beside `path` first, then renamed. The folder is made.

    Safetensors holds tied weights once, and the alias in its metadata as its `save_model` does.
    """
    with _written_aside(path) as aside:
        if path.suffix == ".pt":
            torch.save(tensors | {alias: tensors[first] for alias, first in aliases.items()}, aside)
        else:
            safetensors.torch.save_file(tensors, aside, {"format": "pt", **aliases})


@contextmanager
def _written_aside(path: Path) -> Iterator[Path]:
    """Gives the place of a file that becomes `path` once it is whole; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield aside
        aside.chmod(0o666 & ~_umask())  # safetensors writes for the owner alone
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _umask() -> int:
    """The process's mask for new files, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _plain_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors with memory of their own, by plain name, and the first name of each alias."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_name: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    for key, value in sorted(model.state_dict().items()):
        if not isinstance(value, Tensor):
            continue
        name = key.replace("_orig_mod.", "")
        place = (value.data_ptr(), tuple(value.shape), tuple(value.stride()))
        if value.numel() and place in first_name:
            aliases[name] = first_name[place]
            continue
        first_name[place] = name
        tensors[name] = value.detach().cpu().contiguous().clone()
    return tensors, aliases
