"""Opens files written by torch.save: weights, Lightning checkpoints, scripts' training dicts."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.deepspeed import inert
from shardwise.checkpoint.deepspeed.inert import Inert
from shardwise.checkpoint.file_system import must_be_file
from shardwise.checkpoint.formats import training_dict
from shardwise.checkpoint.formats.saved import Checkpoint, MemoryReader, reading
from shardwise.errors import BrokenCheckpoint, CheckpointError

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")

WHAT = "torch.save"

_LIBRARIES = (
    (("pytorch-lightning_version",), "Lightning checkpoint"),
    (("state", "rng"), "Composer checkpoint"),
    (("state_dict", "arch", "epoch"), "timm checkpoint"),
)
"""Keys by which a library's files are recognised."""


def open_checkpoint(path: Path) -> Checkpoint | None:
    """Open a file written by torch.save. Returns None for a folder or an unknown suffix."""
    if path.suffix not in SUFFIXES or path.is_dir():
        return None
    content, format = load(path)
    with reading(path, WHAT):
        tree, memory = as_tree(content, path)
        checkpoint = Checkpoint(format, path, **training_dict.interpret(tree, path))
        checkpoint.aliases = find_aliases(checkpoint, memory)
        if objects := objects_in(tree):
            checkpoint.facts["not read"] = ", ".join(objects)[:200]
    checkpoint.damages = lambda rank, size: damages([path][rank::size])
    return checkpoint


def load(path: Path) -> tuple[Any, str]:
    """Return a file's contents and the name of its format. Runs no code from the file.

    Raises:
        CheckpointError: The file contains objects of unknown classes.
        BrokenCheckpoint: The file is damaged, or was not written by torch.save.
    """
    try:
        must_be_file(path)
        try:
            # Mapped memory, so that only the elements that are used are read from disk.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError):  # not a zip file, so written by torch before 1.6
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # Many scripts and libraries store objects next to the tensors, such as timm's arguments.
        # They become records without behaviour, because unpickling them could run code.
        try:
            content = inert.load(path)
        except BrokenCheckpoint:
            content = None
        if not isinstance(content, Mapping):
            raise CheckpointError(
                f"{path} is damaged, or contains more than tensors and plain values. Shardwise "
                "does not read those, because unpickling them could run code. Load the file in a "
                "program that trusts it, and save only its state_dict()."
            ) from error
    except BrokenCheckpoint:
        raise
    except Exception as error:  # torch raises many exception types for truncated files
        raise BrokenCheckpoint(f"{path} cannot be read: {error!r:.300}.") from error
    known = content if isinstance(content, Mapping) else {}
    names = (name for keys, name in _LIBRARIES if all(key in known for key in keys))
    return content, next(names, "torch.save")


def objects_in(tree: Any) -> list[str]:
    """Return each top-level key whose value is an object of an unknown class, and that class."""
    return [
        f"{key!s:.40} ({value.kind})" for key, value in tree.items() if isinstance(value, Inert)
    ]


def as_tree(content: Any, path: Path) -> tuple[Any, MemoryReader]:
    """Return `content` with a Leaf in place of each tensor, and a reader of these tensors.

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
    """Return a map from each further name of a tied weight to its first name.

    torch.save stores shared memory once, so tied weights share memory after loading.
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
    """Yield one sentence for each file with a wrong checksum."""
    for path in paths:
        # Files of torch before 1.6 have no checksums.
        if zipfile.is_zipfile(path) and (fault := inert.damage(path)) is not None:
            yield f"{fault}. Use another checkpoint, or a fresh copy of this file."
