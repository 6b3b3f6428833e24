"""Converts the model in a DeepSpeed save to a single fp32 file, using bounded memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from shardwise.checkpoint.deepspeed.save import Save
from shardwise.checkpoint.export import (
    PICKLED,
    disk_errors,
    replace_when_complete,
    write_safetensors,
)
from shardwise.checkpoint.format import TensorSpec, dtype_of
from shardwise.checkpoint.reader import TensorReader
from shardwise.errors import CheckpointError

_CHUNK = 2**22
"""Maximum number of elements that are held in memory at a time."""

Advance = Callable[[int], None]
"""Progress callback. Receives the number of elements written since the previous call."""


def place_of(out: Path) -> Path:
    """Return the path of the file to write.

    This is `out`, or `out`/model.safetensors if `out` is a folder or has no suffix. Raises
    CheckpointError if the suffix is unknown.
    """
    if out.is_dir() or not out.suffix:
        return out / "model.safetensors"
    if out.suffix not in (".safetensors", *PICKLED):
        raise CheckpointError(
            f"{out} ends in {out.suffix}. Write a file name that ends in .safetensors, "
            f"{', '.join(PICKLED)}, or the name of a folder."
        )
    return out


def write_fp32(save: Save, out: Path, advance: Advance = lambda _: None) -> int:
    """Write the model in `save` to the file `out`, with all floating-point tensors in fp32.

    A safetensors file contains each tied weight once. Its metadata lists the other names.

    Args:
        advance: Called after each write with the number of elements written.

    Returns:
        The number of tensors. A tied weight counts once per name.

    Raises:
        CheckpointError: The file cannot be written.
        BrokenCheckpoint: The save is incomplete.
    """
    tensors, twins = save.fp32(), save.twins
    # Only the dtype in the file changes here. `read` converts the values.
    specs = [
        TensorSpec(spec.name, "F32", spec.shape) if dtype_of(spec.dtype).is_floating_point else spec
        for spec in tensors.specs.values()
    ]
    try:
        with replace_when_complete(out) as file:
            if out.suffix in PICKLED:
                write_pickled(tensors, specs, twins, file, out.parent, advance)
            else:
                write_safetensors(file, out, specs, twins, partial(write_parts, tensors, advance))
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{out} cannot be written: {why}.") from error
    return len(specs) + len(twins)


def numel(save: Save) -> int:
    """Return the number of elements that `write_fp32` writes."""
    return sum(spec.numel for spec in save.fp32().specs.values())


def write_pickled(
    tensors: TensorReader,
    specs: Sequence[TensorSpec],
    twins: Mapping[str, str],
    file: IO[bytes],
    folder: Path,
    advance: Advance,
    wrap: Callable[[dict[str, Tensor]], Any] = dict,
) -> None:
    """Write `file` with torch.save.

    torch.save needs all tensors at once, so they are memory-mapped from temporary files in
    `folder`.

    Args:
        specs: Tensors to write, with their dtypes in the file.
        twins: Maps further names of tied weights to the names in `specs`.
        wrap: Returns the object to save, given all tensors by name.
    """
    # Use the folder of the output, whose disk must have room for the model anyway.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".zero-to-fp32-") as aside:
        values: dict[str, Tensor] = {}
        for number, spec in enumerate(specs):
            flat = _map_file(Path(aside, str(number)), spec)
            for first, count in _chunks(spec.numel):
                tensors.read(spec.name, first, flat[first : first + count])
                advance(count)
            values[spec.name] = flat.view(spec.shape)
        with disk_errors(file) as writer:
            tied = {twin: values[first] for twin, first in twins.items()}
            torch.save(wrap(values | tied), writer)


def write_parts(tensors: TensorReader, advance: Advance, spec: TensorSpec) -> Iterator[Tensor]:
    """Yield the elements of a tensor in chunks, so that large tensors need not fit in memory."""
    for first, count in _chunks(spec.numel):
        value = torch.empty(count, dtype=dtype_of(spec.dtype))
        tensors.read(spec.name, first, value)
        yield value
        advance(count)


def _map_file(path: Path, spec: TensorSpec) -> Tensor:
    dtype = dtype_of(spec.dtype)
    if not spec.numel:
        return torch.empty(0, dtype=dtype)
    # With a shared mapping the kernel can write pages to disk, so the model need not fit in memory.
    return torch.from_file(str(path), shared=True, size=spec.numel, dtype=dtype)


def _chunks(total: int) -> Iterator[tuple[int, int]]:
    """Yield the start index and the length of each chunk of at most _CHUNK elements."""
    for first in range(0, total, _CHUNK):
        yield first, min(_CHUNK, total - first)
