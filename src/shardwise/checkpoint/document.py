"""Reads and writes checkpoint.json, which holds everything except tensors.

    {"format": "shardwise checkpoint", "version": 2, "step": 200, "seed": 0,
     "sets": {"model": ["model.safetensors"], "optimizer": [...]},
     "checksums": {"model": {"head.weight": "1c291ca3", ...}, ...},
     "files": {"model.safetensors": "90b2c1f0", ...},
     "optimizers": [{"class": "AdamW", "groups": [{"parameters": [...], "options": {...}}]}],
     "state": {"head.weight": {"step": ...}}, "borders": [...],
     "scaling": {...}, "tracked": {"loader": {"samples": 51200, "epoch": 1}}, "written_by": {...},
     "crc32": "5d1f1a07"}

The second-to-last line holds the CRC-32 of all bytes before it. docs/checkpoint_format.md describes
each field.
"""

from __future__ import annotations

import json
import os
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
"""Version with checksums of tensors only. It can still be loaded."""

SHOWN = 8
"""Maximum number of other checkpoints that an error message lists."""

_SUM = "crc32"
# Matches the exact last bytes, so that the checksum can be read before the JSON is parsed.
_END = re.compile(rb' "crc32": "([0-9a-f]{8})"\n\}\n')
_LENGTH_OF_END = len(b' "crc32": "00000000"\n}\n')


def dump(fields: Mapping[str, Any]) -> bytes:
    """Return the contents of checkpoint.json.

    Args:
        fields: All fields except the format, the version and the checksum.
    """
    known = set(schema.FIELDS) | (set(fields) & set(schema.OPTIONAL))
    # Every field needs a check in schema.py. Otherwise no load would validate it.
    assert set(fields) == known, set(fields) ^ known
    whole = {"format": FORMAT, "version": VERSION} | dict(fields)
    # The checksum covers all bytes before it, so it must be the last field.
    body = json.dumps(whole, indent=1, allow_nan=False).encode().removesuffix(b"\n}") + b",\n"
    return body + f' "{_SUM}": "{zlib.crc32(body):08x}"\n}}\n'.encode()


def load(folder: Path) -> dict[str, Any]:
    """Return the fields of the checkpoint in `folder`.

    Raises CheckpointError if checkpoint.json does not exist or its version is too new. Raises
    BrokenCheckpoint if the file was changed or a field is invalid.
    """
    path = folder / DOCUMENT
    data = _read(folder)
    summed = _END.fullmatch(data[-_LENGTH_OF_END:])
    # Check this before parsing: a flipped bit may result in valid JSON with a different value.
    if summed and crc_of(data[:-_LENGTH_OF_END]) != (written := summed[1].decode()):
        raise BrokenCheckpoint(
            f"{path} was changed after it was written: its CRC-32 is not {written}. "
            f"{_accept_hint(folder)}"
        )
    fields = _parse(path, data)
    if fields["version"] == VERSION and not summed:
        raise BrokenCheckpoint(
            f"{path} was changed after it was written: it does not end with its CRC-32. "
            f"{_accept_hint(folder)}"
        )
    # Otherwise changing the version number would disable the check of the checksum.
    if fields["version"] == UNSUMMED and _SUM in fields:
        raise BrokenCheckpoint(
            f"{path} has a CRC-32, but files of version {UNSUMMED} do not. Use another checkpoint."
        )
    return _check_fields(path, fields)


def accept(folder: Path) -> dict[str, Any]:
    """Write new checksums for the small files in `folder` after a deliberate edit.

    The checksums of tensors and tensor-file headers are not changed. Raises the errors of `load`
    except for a wrong checksum, and raises OSError if the file cannot be written.

    Returns:
        The fields of checkpoint.json.
    """
    path = folder / DOCUMENT
    fields = _check_fields(path, _parse(path, _read(folder)))
    tensors = {name for names in fields["sets"].values() for name in names}
    # Only the small files. The checksums of tensors must still prove that the tensors are intact.
    names = [path.name for path in folder.iterdir() if path.suffix in (".json", ".pt")]
    for name in sorted({*fields["files"], *names} - tensors - {DOCUMENT}):
        fields["files"][name] = crc_of(read_whole(folder / name))
    known = [name for name in (*schema.FIELDS, *schema.OPTIONAL) if name in fields]
    replace_file(path, dump({name: fields[name] for name in known}))
    # Load the file again to verify the result like any other reader.
    return load(folder)


def crc_of(data: bytes) -> str:
    """Return the CRC-32 of `data` as 8 hexadecimal digits, the form used in checkpoint.json."""
    return f"{zlib.crc32(data):08x}"


def _accept_hint(folder: Path) -> str:
    return (
        "Use another checkpoint. If you edited it on purpose: "
        f"`shardwise checkpoint accept {folder}`."
    )


def _read(folder: Path) -> bytes:
    path = folder / DOCUMENT
    try:
        return read_whole(path)
    except OSError as error:
        others = [found.path.name for found in complete(folder.parent) if found.path != folder]
        hint = "Name the folder of one step, as in checkpoints/step-200, or their parent."
        if others:
            more = "..., " if len(others) > SHOWN else ""
            hint = f"{folder.parent} contains {more}{', '.join(others[-SHOWN:])}."
        problem = f"is not a checkpoint: {DOCUMENT} cannot be read ({error.strerror})"
        if not os.path.lexists(folder):
            problem = "does not exist"
        elif folder.is_file():
            problem, hint = "is a file", f"For files: `shardwise checkpoint show {folder}`."
        raise CheckpointError(f"{folder} {problem}. {hint}") from error


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    """Parse checkpoint.json. Raises an error if its format or version is unknown."""
    try:
        # By default Python accepts NaN and Infinity, which are not valid JSON.
        fields = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpoint(
            f"{path} is not valid JSON ({error}). Use another checkpoint."
        ) from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise BrokenCheckpoint(
            f'{path} is not a Shardwise checkpoint: it lacks "format": "{FORMAT}". Use another.'
        )
    version = fields.get("version")
    if type(version) is not int or version < UNSUMMED:
        raise BrokenCheckpoint(f"{path} has the invalid version {version!r:.60}. Use another.")
    # Not BrokenCheckpoint, because `resume` would skip it and load an older checkpoint.
    if version > VERSION:
        raise CheckpointError(
            f"{path} has version {version}, but this Shardwise reads versions up to {VERSION}. "
            "Install the Shardwise that wrote it, or a later one."
        )
    return fields


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _check_fields(path: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Return `fields` if they are valid, otherwise raise BrokenCheckpoint."""
    if fields["version"] == UNSUMMED:
        fields.setdefault("files", {})
    try:
        schema.check(fields)
    except schema.Fault as fault:
        raise BrokenCheckpoint(
            f"{path} has invalid content: {fault}. Use another checkpoint."
        ) from fault
    return fields
