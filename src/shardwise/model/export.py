"""Whole tensors as one plain file that the stock libraries read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

PICKLED = (".pt", ".pth", ".bin")
"""Endings of files as torch.save writes them."""


def write_model(model: nn.Module, path: Path) -> None:
    """Write the state of `model` to `path`: as torch.save does where the ending is of `PICKLED`,
    else as safetensors, which hold no more than tensors."""
    write_tensors(*_plain(model), path)


def write_tensors(
    tensors: dict[str, Tensor], aliases: Mapping[str, str], rest: Mapping[str, Any], path: Path
) -> None:
    """Write `tensors`, each with memory of its own, and for each of `aliases` the tensor that it
    names; of `rest`, which are none, what the form of `path` can hold. Beside it first, then
    renamed; the folder is made.

    Safetensors have tied weights once, and the alias in the metadata as their `save_model` does.
    """
    with _written_aside(path) as aside:
        if path.suffix in PICKLED:
            twins = {alias: tensors[first] for alias, first in aliases.items()}
            torch.save({**tensors, **twins, **rest}, aside)
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


def _plain(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """Tensors with memory of their own, by plain name, the first name of each alias, and what else
    is in the state_dict."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    rest: dict[str, Any] = {}
    first_name: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    for key, value in sorted(model.state_dict().items()):
        name = key.replace("_orig_mod.", "")
        if not isinstance(value, Tensor):
            rest[name] = value
            continue
        place = (value.data_ptr(), tuple(value.shape), tuple(value.stride()))
        if value.numel() and place in first_name:
            aliases[name] = first_name[place]
            continue
        first_name[place] = name
        tensors[name] = value.detach().cpu().contiguous().clone()
    return tensors, aliases, rest
