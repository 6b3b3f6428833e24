"""Detects the format of a file or folder, and opens it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from shardwise.checkpoint.atomic_folders import DOCUMENT, lacks_document
from shardwise.checkpoint.deepspeed.folders import find as find_deepspeed
from shardwise.checkpoint.file_system import read_whole
from shardwise.checkpoint.formats import (
    dcp,
    deepspeed_folders,
    megatron,
    nanotron,
    own,
    run_folders,
    safetensors_files,
    torch_files,
)
from shardwise.checkpoint.formats.saved import Checkpoint
from shardwise.errors import BrokenCheckpoint, CheckpointError

FORMATS: tuple[Callable[[Path], Checkpoint | None], ...] = (
    own.open_checkpoint,
    deepspeed_folders.open_checkpoint,
    # Before DCP, because Megatron's checkpoints look like DCP too.
    megatron.open_checkpoint,
    dcp.open_checkpoint,
    nanotron.open_checkpoint,
    # Before model folders, because a run folder contains a model too.
    run_folders.open_checkpoint,
    safetensors_files.open_checkpoint,
    torch_files.open_checkpoint,
)
"""Functions that open one format each, or return None. The first match is used."""

FOREIGN = tuple(one for one in FORMATS if one is not own.open_checkpoint)
"""Functions that open other libraries' formats."""


def open_checkpoint(
    path: Path, formats: tuple[Callable[[Path], Checkpoint | None], ...] = FORMATS
) -> Checkpoint:
    """Open a checkpoint of any format.

    Args:
        path: A file or folder.
        formats: Functions that each open one format. They are tried in order.

    Raises:
        CheckpointError: `path` does not exist or has no known format.
        BrokenCheckpoint: The checkpoint is damaged or incomplete.
    """
    if not os.path.lexists(path):
        raise CheckpointError(f"{path} does not exist. Name a file or folder to load.")
    # Such a folder looks like a model of Transformers. Reading it as one would lose the optimizers.
    if formats is FORMATS and lacks_document(path):
        raise BrokenCheckpoint(
            f"{path} has the tensors of a checkpoint but no {DOCUMENT}, which holds everything "
            "else. Restore the file, or name one of its .safetensors files to use only the weights."
        )
    _refuse_unsupported(path)
    try:
        for open_format in formats:
            if (found := open_format(path)) is not None:
                return found
    except OSError as error:
        raise BrokenCheckpoint(
            f"{error.filename or path} cannot be read ({error.strerror or error}). Restore the "
            "file, or use another checkpoint."
        ) from error
    if path.is_dir():
        if chunks := next(iter(sorted(path.glob("*.distcp"))), None):
            raise BrokenCheckpoint(
                f"{path} has chunks of torch's distributed checkpoint ({chunks.name}), but lacks "
                f"{dcp.METADATA}: the save did not finish, or the file was not copied. Restore the "
                "file, or use another checkpoint."
            )
        raise CheckpointError(
            f"{path} contains no model.safetensors, model.safetensors.index.json, .metadata (torch "
            "DCP) or pytorch_model.bin. Name a file, a checkpoint folder such as step-200, or the "
            "folder of a model."
        )
    raise CheckpointError(
        f"{path} ends in {path.suffix or 'nothing'}, which cannot be loaded. Name a folder, or a "
        f"file that ends in .safetensors, {', '.join(torch_files.SUFFIXES)}."
    )


def training_format(folder: Path) -> str | None:
    """Return the name of the library whose training checkpoint is in `folder`, or None.

    A model without an optimizer is not a training checkpoint. No file except DeepSpeed's `latest`
    is read.
    """
    if find_deepspeed(folder) is not None:
        return "DeepSpeed"
    if megatron.find(folder) is not None:
        return megatron.WHAT
    if dcp.find(folder) is not None:
        return "torch DCP"
    return "Accelerate or the Trainer" if run_folders.has_optimizer(folder) else None


def _refuse_unsupported(path: Path) -> None:
    """Raise CheckpointError if `path` has a known but unsupported format. The message names it."""
    metadata = path / "metadata.json"
    if metadata.is_file() and metadata.stat().st_size < 2**16:
        backend = re.search(rb'"sharded_backend":\s*"(\w+)"', read_whole(metadata))
        if backend is not None and backend[1] != b"torch_dist":
            raise CheckpointError(
                f"{path} is a checkpoint of Megatron-Core in the format "
                f"{backend[1].decode()}, which cannot be read. Save it with "
                "--dist-ckpt-format torch_dist."
            )
    if any(path.glob("iter_*/mp_rank_*/model_optim_rng.pt")) or any(
        path.glob("mp_rank_*/model_optim_rng.pt")
    ):
        raise CheckpointError(
            f"{path} is a checkpoint of Megatron-LM in its old format, with one file per rank, "
            "which cannot be read. Save it with --use-dist-ckpt."
        )
    if found := next(iter(sorted(path.glob("pytorch_model_fsdp*_rank*.bin"))), None):
        raise CheckpointError(
            f"{path} has one file of Accelerate per rank ({found.name}), which cannot be read: "
            "they do not say how the ranks share the tensors. Save with state_dict_type="
            "SHARDED_STATE_DICT and DCP, or FULL_STATE_DICT."
        )
