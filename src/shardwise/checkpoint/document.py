"""What stands in a checkpoint beside its tensors: one JSON file.

    {"format": "shardwise checkpoint", "version": 1, "step": 200, "seed": 0,
     "sets": {"model": ["model.safetensors"], "optimizer": [...]},
     "checksums": {"model": {"head.weight": "1c291ca3", ...}, ...},
     "optimizers": [{"class": "AdamW", "groups": [{"parameters": [...], "options": {...}}]}],
     "state": {"head.weight": {"step": ...}}, "borders": [...],
     "scaling": {...}, "tracked": {"loader": {"samples": 51200, "epoch": 1}}, "written_by": {...}}

docs/checkpoint_format.md says what each is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.checkpoint.folders import DOCUMENT, complete
from shardwise.errors import BrokenCheckpoint, CheckpointError

FORMAT = "shardwise checkpoint"
VERSION = 1

_FIELDS: dict[str, type] = {
    "step": int,
    "seed": int,
    "sets": dict,
    "checksums": dict,
    "optimizers": list,
    "state": dict,
    "borders": list,
    "scaling": dict,
    "tracked": dict,
    "written_by": dict,
}


def dump(fields: Mapping[str, Any]) -> bytes:
    """The file with `fields`, which are all that it holds beside format and version."""
    assert set(fields) == set(_FIELDS), set(fields) ^ set(_FIELDS)
    whole = {"format": FORMAT, "version": VERSION} | dict(fields)
    return json.dumps(whole, indent=1, allow_nan=False).encode() + b"\n"


SHOWN = 8
"""Other checkpoints that a message names, the newest."""


def _others(folder: Path) -> str:
    """What to name instead of `folder`, which holds no checkpoint."""
    there = [found.path.name for found in complete(folder.parent) if found.path != folder]
    if there:
        named = ", ".join(there[-SHOWN:])
        return f"In {folder.parent} there are {named if len(there) <= SHOWN else f'..., {named}'}."
    return "Name the folder of one step, as in checkpoints/step-200, or that of all steps."


def load(folder: Path) -> dict[str, Any]:
    """The fields of the checkpoint in `folder`.

    Raises CheckpointError where there is none or it is of a later version, BrokenCheckpoint
    where its fields are not what they must be.
    """
    path = folder / DOCUMENT
    try:
        told = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{folder} is no checkpoint: {DOCUMENT} cannot be read ({error.strerror}). "
            f"{_others(folder)}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpoint(f"{path} is no JSON ({error}). Take another checkpoint.") from error
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise BrokenCheckpoint(f"{path} does not say that it is a {FORMAT}.")
    if told.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is of version {told.get('version')}, and this Shardwise reads {VERSION}: "
            "install the one that wrote it, or a later one."
        )
    for name, kind in _FIELDS.items():
        if not isinstance(told.get(name), kind) or isinstance(told[name], bool):
            raise BrokenCheckpoint(
                f"{path} has no {name}, or not as a {kind.__name__}. Take another checkpoint."
            )
    return told
