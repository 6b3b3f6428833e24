"""Writes the model of a save of DeepSpeed as one plain file in fp32, in bounded memory."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from shardwise.checkpoint.deepspeed.partitions import FragmentReader
from shardwise.checkpoint.deepspeed.save import Save
from shardwise.checkpoint.export import PICKLED, disk_errors, written_aside
from shardwise.checkpoint.format import MOST_TENSORS, TensorSpec, dtype_of, lay_out
from shardwise.errors import CheckpointError

_CHUNK = 2**22
"""Elements that are in memory at a time."""

Advance = Callable[[int], None]
"""Told how many elements more are written."""


def place_of(out: Path) -> Path:
    """The file that `out` means: itself, or model.safetensors in it where it is a folder's name.

    Raises CheckpointError for an ending that is not known.
    """
    if out.is_dir() or not out.suffix:
        return out / "model.safetensors"
    if out.suffix not in (".safetensors", *PICKLED):
        raise CheckpointError(
            f"{out} ends in {out.suffix}: write a name that ends in .safetensors, "
            f"{', '.join(PICKLED)}, or a folder's."
        )
    return out


def write_fp32(save: Save, out: Path, advance: Advance = lambda _: None) -> int:
    """Write the model of `save` to the file `out`, floating-point tensors in fp32; returns how many
    tensors. A safetensors file has tied weights once, and their other names in its metadata.

    Raises CheckpointError where it cannot be written, BrokenCheckpoint for one that is cut.
    """
    tensors, twins = save.fp32(), save.twins
    specs = [
        TensorSpec(spec.name, "F32", spec.shape) if dtype_of(spec.dtype).is_floating_point else spec
        for spec in tensors.specs.values()
    ]
    try:
        with written_aside(out) as file:
            if out.suffix in PICKLED:
                _write_pickled(tensors, specs, twins, file, out.parent, advance)
            else:
                _write_safetensors(tensors, specs, twins, file, out, advance)
    except (OSError, RuntimeError) as error:  # torch's writer raises the latter
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{out} cannot be written: {why}.") from error
    return len(specs) + len(twins)


def numel(save: Save) -> int:
    """How many elements `write_fp32` writes."""
    return sum(spec.numel for spec in save.fp32().specs.values())


def _write_safetensors(
    tensors: FragmentReader,
    specs: list[TensorSpec],
    twins: dict[str, str],
    file: IO[bytes],
    out: Path,
    advance: Advance,
) -> None:
    laid, *more = lay_out(out.stem, specs, limit=math.inf, aliases=twins)
    if more:
        raise CheckpointError(
            f"{len(specs)} tensors are too many for {out}: a file of safetensors holds "
            f"{MOST_TENSORS} here. Write to .pt."
        )
    file.write(laid.header)
    for name, placed in laid.tensors.items():  # in the order of their places
        for first, count in _chunks(placed.spec.numel):
            value = torch.empty(count, dtype=dtype_of(placed.spec.dtype))
            tensors.read(name, first, value)
            file.write(value.view(torch.uint8).numpy().data)
            advance(count)


def _write_pickled(
    tensors: FragmentReader,
    specs: list[TensorSpec],
    twins: dict[str, str],
    file: IO[bytes],
    folder: Path,
    advance: Advance,
) -> None:
    """torch.save wants all tensors at once: they are mapped files in a folder beside."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".zero-to-fp32-") as aside:
        values: dict[str, Tensor] = {}
        for number, spec in enumerate(specs):
            flat = _mapped(Path(aside, str(number)), spec)
            for first, count in _chunks(spec.numel):
                tensors.read(spec.name, first, flat[first : first + count])
                advance(count)
            values[spec.name] = flat.view(spec.shape)
        with disk_errors(file) as writer:
            torch.save(values | {twin: values[first] for twin, first in twins.items()}, writer)


def _mapped(path: Path, spec: TensorSpec) -> Tensor:
    dtype = dtype_of(spec.dtype)
    if not spec.numel:
        return torch.empty(0, dtype=dtype)
    return torch.from_file(str(path), shared=True, size=spec.numel, dtype=dtype)


def _chunks(total: int) -> Iterator[tuple[int, int]]:
    """Where each part of at most _CHUNK elements begins, and how many it has."""
    for first in range(0, total, _CHUNK):
        yield first, min(_CHUNK, total - first)
