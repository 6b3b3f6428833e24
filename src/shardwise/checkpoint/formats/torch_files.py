"""Reads files of torch.save: weights, training dicts of scripts and libraries, Lightning."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.deepspeed import inert
from shardwise.checkpoint.file_system import must_be_file
from shardwise.checkpoint.formats import training_dict
from shardwise.checkpoint.formats.saved import Checkpoint, MemoryReader, reading
from shardwise.errors import BrokenCheckpoint, CheckpointError

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")

WHAT = "torch.save"

_LIBRARIES = (
    (("pytorch-lightning_version",), "Lightning checkpoint"),
    (("state", "rng"), "Composer checkpoint"),
)
"""Keys of files whose other values are objects of a library, which are read as plain records."""


def open_checkpoint(path: Path) -> Checkpoint | None:
    """Open a file of torch.save. Returns None if `path` has another suffix, or is a folder."""
    if path.suffix not in SUFFIXES or path.is_dir():
        return None
    content, format = load(path)
    with reading(path, WHAT):
        tree, memory = as_tree(content, path)
        checkpoint = Checkpoint(format, path, **training_dict.interpret(tree, path, WHAT))
        checkpoint.aliases = find_aliases(checkpoint, memory)
    checkpoint.damages = lambda rank, size: damages([path][rank::size])
    return checkpoint


def load(path: Path) -> tuple[Any, str]:
    """Return the contents of a file and the name of its format. Runs no code from the file.

    Raises:
        CheckpointError: It contains objects of unknown classes.
        BrokenCheckpoint: It is damaged, or was not written by torch.save.
    """
    try:
        must_be_file(path)
        try:
            # Mapped memory, so that only the elements that are used are read from disk.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True), "torch.save"
        except (RuntimeError, ValueError):  # not a zip file, so written by torch before 1.6
            return torch.load(path, map_location="cpu", weights_only=True), "torch.save"
    except pickle.UnpicklingError as error:
        # Lightning and Composer store objects next to the tensors, which become plain records.
        if (found := _load_of_library(path)) is not None:
            return found
        raise CheckpointError(
            f"{path} is damaged, or contains more than tensors and plain values. Shardwise does "
            "not read those, because unpickling them could run code. Load the file in a program "
            "that trusts it, and save only its state_dict()."
        ) from error
    except BrokenCheckpoint:
        raise
    except Exception as error:  # torch raises many exception types for truncated files
        raise BrokenCheckpoint(f"{path} cannot be read: {error!r:.300}.") from error


def _load_of_library(path: Path) -> tuple[Any, str] | None:
    """Return a library's file that contains objects, or None if it is not from a known library."""
    try:
        content = inert.load(path)
    except BrokenCheckpoint:
        return None
    for keys, format in _LIBRARIES:
        if isinstance(content, Mapping) and all(key in content for key in keys):
            return content, format
    return None


def as_tree(content: Any, path: Path) -> tuple[Any, MemoryReader]:
    """Return `content` with a Leaf in place of each tensor, and the reader of the tensors.

    Raises CheckpointError if a tensor is not a dense CPU tensor of a known dtype.
    """
    memory = MemoryReader()

    def convert(value: Any, place: str) -> Any:
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.device.type != "cpu":
                name = place.rpartition("/")[2]
                raise CheckpointError(
                    f"{path} has {name!r:.60} as a {value.layout} tensor on {value.device}, which "
                    "cannot be read. Save it as a dense tensor on a real device."
                )
            return memory.add(place, value)
        if isinstance(value, Mapping):
            return {key: convert(item, f"{place}/{key}") for key, item in value.items()}
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(convert(item, f"{place}/{n}") for n, item in enumerate(value))
        return value

    return convert(content, ""), memory


def find_aliases(checkpoint: Checkpoint, memory: MemoryReader) -> dict[str, str]:
    """Map each further name of a tied weight to its first name.

    torch.save stores shared memory once, so tied weights share memory after a load.
    """
    first: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    leaves: Mapping[str, Any] = getattr(checkpoint.model, "leaves", {})
    for name, leaf in leaves.items():
        value = memory.tensor(leaf.name)
        place = value.data_ptr(), tuple(value.shape), value.stride(), value.dtype
        if value.numel() and first.setdefault(place, name) != name:
            aliases[name] = first[place]
    return aliases


def damages(paths: list[Path]) -> Iterator[str]:
    """Yield one sentence per file whose bytes do not have their checksums."""
    for path in paths:
        # Files of torch before 1.6 have no checksums.
        if zipfile.is_zipfile(path) and (fault := inert.damage(path)) is not None:
            yield f"{fault}. Use another checkpoint, or a fresh copy of this file."
