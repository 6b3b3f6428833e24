"""Reads and writes checkpoint.json, which holds all but tensors, with a checksum of itself.

    {"format": "shardwise checkpoint", "version": 2, "step": 200, "seed": 0,
     "sets": {"model": ["model.safetensors"], "optimizer": [...]},
     "checksums": {"model": {"head.weight": "1c291ca3", ...}, ...},
     "files": {"model.safetensors": "90b2c1f0", ...},
     "optimizers": [{"class": "AdamW", "groups": [{"parameters": [...], "options": {...}}]}],
     "state": {"head.weight": {"step": ...}}, "borders": [...],
     "scaling": {...}, "tracked": {"loader": {"samples": 51200, "epoch": 1}}, "written_by": {...},
     "crc32": "5d1f1a07"}

The last line but one holds the CRC-32 of all bytes before it. docs/checkpoint_format.md says what
each is.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.checkpoint import schema
from shardwise.checkpoint.atomic_folders import DOCUMENT, complete
from shardwise.checkpoint.file_system import read_whole, replace_file
from shardwise.errors import BrokenCheckpoint, CheckpointError

FORMAT = "shardwise checkpoint"
VERSION = 2
UNSUMMED = 1
"""The version that had no sums but those of tensors; it is read as it stands."""

SHOWN = 8
"""Other checkpoints that a message names, the newest."""

_SUM = "crc32"
_END = re.compile(rb' "crc32": "([0-9a-f]{8})"\n\}\n')
_LENGTH_OF_END = len(b' "crc32": "00000000"\n}\n')


def dump(fields: Mapping[str, Any]) -> bytes:
    """The file with `fields`, which are all that it holds beside format, version and sum."""
    known = set(schema.FIELDS) | (set(fields) & set(schema.OPTIONAL))
    assert set(fields) == known, set(fields) ^ known
    whole = {"format": FORMAT, "version": VERSION} | dict(fields)
    # The sum covers all bytes before it, so it has to stand at the end.
    body = json.dumps(whole, indent=1, allow_nan=False).encode().removesuffix(b"\n}") + b",\n"
    return body + f' "{_SUM}": "{zlib.crc32(body):08x}"\n}}\n'.encode()


def load(folder: Path) -> dict[str, Any]:
    """The fields of the checkpoint in `folder`.

    Raises CheckpointError where there is none or it is of a later version, BrokenCheckpoint
    where it is not what was written, or its fields are not what they must be.
    """
    path = folder / DOCUMENT
    data = _read(folder)
    summed = _END.fullmatch(data[-_LENGTH_OF_END:])
    if summed and crc_of(data[:-_LENGTH_OF_END]) != (written := summed[1].decode()):
        raise BrokenCheckpoint(
            f"{path} is not what was written: its CRC-32 is not {written}. {_accept(folder)}"
        )
    told = _parsed(path, data)
    if told["version"] == VERSION and not summed:
        raise BrokenCheckpoint(
            f"{path} is not what was written: it does not end with its CRC-32. {_accept(folder)}"
        )
    if told["version"] == UNSUMMED and _SUM in told:
        raise BrokenCheckpoint(f"{path} has a CRC-32, which its version {UNSUMMED} has not.")
    return _checked(path, told)


def accept(folder: Path) -> dict[str, Any]:
    """Take what stands in `folder` beside the tensors as it is now, edited on purpose, and write
    new sums of it; returns the fields.

    Sums of tensors, and of the headers of their files, stay as they are. Raises as `load` does, but
    for a sum that is wrong, and OSError where nothing can be written.
    """
    path = folder / DOCUMENT
    told = _checked(path, _parsed(path, _read(folder)))
    tensors = {name for names in told["sets"].values() for name in names}
    there = [path.name for path in folder.iterdir() if path.suffix in (".json", ".pt")]
    for name in sorted({*told["files"], *there} - tensors - {DOCUMENT}):
        told["files"][name] = crc_of(read_whole(folder / name))
    known = [name for name in (*schema.FIELDS, *schema.OPTIONAL) if name in told]
    replace_file(path, dump({name: told[name] for name in known}))
    return load(folder)


def crc_of(data: bytes) -> str:
    """The CRC-32 of `data`, as it stands in the document."""
    return f"{zlib.crc32(data):08x}"


def _accept(folder: Path) -> str:
    return (
        "Take another checkpoint. If it was edited on purpose: "
        f"`shardwise checkpoint accept {folder}`."
    )


def _read(folder: Path) -> bytes:
    path = folder / DOCUMENT
    try:
        return read_whole(path)
    except OSError as error:
        there = [found.path.name for found in complete(folder.parent) if found.path != folder]
        hint = "Name the folder of one step, as in checkpoints/step-200, or that of all steps."
        if there:
            more = "..., " if len(there) > SHOWN else ""
            hint = f"In {folder.parent} there are {more}{', '.join(there[-SHOWN:])}."
        raise CheckpointError(
            f"{folder} is no checkpoint: {DOCUMENT} cannot be read ({error.strerror}). {hint}"
        ) from error


def _parsed(path: Path, data: bytes) -> dict[str, Any]:
    """The map of a file of ours, of a version that is known."""
    try:
        # Python would take NaN and Infinity, which are not JSON: a load would go on with them.
        told = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpoint(f"{path} is no JSON ({error}). Take another checkpoint.") from error
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise BrokenCheckpoint(f"{path} does not say that it is a {FORMAT}.")
    version = told.get("version")
    if type(version) is not int or version < UNSUMMED:
        raise BrokenCheckpoint(f"{path} says the version {version!r:.60}, which is none.")
    if version > VERSION:
        raise CheckpointError(
            f"{path} is of version {version}, and this Shardwise reads up to {VERSION}: "
            "install the one that wrote it, or a later one."
        )
    return told


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _checked(path: Path, told: dict[str, Any]) -> dict[str, Any]:
    """`told` where it is what it must be."""
    if told["version"] == UNSUMMED:
        told.setdefault("files", {})
    try:
        schema.check(told)
    except schema.Fault as fault:
        raise BrokenCheckpoint(
            f"{path} is not as a checkpoint is written: {fault}. Take another checkpoint."
        ) from fault
    return told
