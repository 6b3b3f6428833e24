"""A model as one plain safetensors file that the stock library reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

import safetensors.torch
from torch import Tensor, nn


def write_safetensors(model: nn.Module, path: str | PathLike[str]) -> None:
    """Write the state of `model` to `path`: beside it first, then renamed.

    Tied weights are written once; the metadata names the alias as safetensors' `save_model` does.
    """
    with written_aside(Path(path)) as aside:
        tensors, metadata = _plain_tensors(model)
        safetensors.torch.save_file(tensors, aside, metadata)


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
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
    """Tensors with memory of their own, by plain name, and the metadata with the aliases."""
    tensors: dict[str, Tensor] = {}
    metadata = {"format": "pt"}
    first_name: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    for key, value in sorted(model.state_dict().items()):
        if not isinstance(value, Tensor):
            continue
        name = key.replace("_orig_mod.", "")
        place = (value.data_ptr(), tuple(value.shape), tuple(value.stride()))
        if value.numel() and place in first_name:
            metadata[name] = first_name[place]
            continue
        first_name[place] = name
        tensors[name] = value.detach().cpu().contiguous().clone()
    return tensors, metadata
