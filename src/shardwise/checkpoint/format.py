"""Computes and parses the layout of safetensors files. Does no I/O.

    | 8 bytes: length n | n bytes: JSON, padded with spaces | tensors, without gaps |

Tensors are sorted by decreasing element size, so that each starts at a multiple of its element
size. docs/checkpoint_format.md is the specification.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.errors import BrokenCheckpoint, CheckpointError

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element of each safetensors dtype."""

LONGEST_HEADER = 100_000_000
"""Maximum length of a header in bytes. The reference implementation has the same limit."""

MOST_DIMS = 64
"""Maximum number of dims of a tensor. torch has the same limit."""

MOST_TENSORS = 2**18
"""Maximum number of tensors in a file. Parsing more would take many seconds. A larger set is split
into several files."""

_LENGTH = 8
_METADATA = "__metadata__"


@dataclass(frozen=True)
class TensorSpec:
    """The name, dtype (a key of ITEM_BYTES) and shape of a tensor in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor that is stored in bytes [begin, end) of a file."""

    spec: TensorSpec
    file: str
    begin: int
    end: int


@dataclass(frozen=True)
class TensorFile:
    """The layout of one file, which may not exist yet.

    Args:
        header: First bytes of the file: the header's length and its JSON.
        tensors: Tensors in the file, by name.
        metadata: Free-form metadata in the header.
        nbytes: Size of the file in bytes.
    """

    name: str
    header: bytes
    tensors: Mapping[str, PlacedTensor]
    metadata: Mapping[str, str]
    nbytes: int


def lay_out(
    stem: str,
    specs: Iterable[TensorSpec],
    *,
    limit: float,
    aliases: Mapping[str, str],
    group_of: Callable[[TensorSpec], int] = lambda _: 0,
) -> list[TensorFile]:
    """Compute the layout of a set of tensors, in one or more files.

    A file contains at most `limit` bytes of tensors and at most MOST_TENSORS tensors. A tensor
    larger than `limit` has its own file.

    Args:
        stem: Name of the set. Its file names start with it.
        specs: Tensors of the set. All ranks must pass them in the same order.
        limit: Maximum total size of a file's tensors in bytes.
        aliases: Maps each further name of a tied weight to its name in `specs`. Stored in the
            metadata, as with safetensors' own `save_model`.
        group_of: Returns a tensor's group. No file contains tensors of different groups.
    """
    # sorted() is stable, so all ranks compute the same layout from the same list.
    ordered = sorted(specs, key=lambda spec: (group_of(spec), -ITEM_BYTES[spec.dtype]))
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in ordered:
        # The first tensor of a file is always accepted, even if it exceeds the limit.
        last = groups[-1]
        is_full = size + spec.nbytes > limit or len(last) == MOST_TENSORS
        if last and (is_full or group_of(last[-1]) != group_of(spec)):
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.nbytes
    names = file_names(stem, len(groups))
    return [_build_file(name, group, aliases) for name, group in zip(names, groups, strict=True)]


def file_names(stem: str, count: int) -> list[str]:
    """Return the file names of a set with `count` files, in the form that Hugging Face expects."""
    if count == 1:
        # A single file has no number in its name, so that other libraries find it without an index.
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def index_name(stem: str) -> str:
    """Return the name of the index file for a set that is split into several files."""
    return f"{stem}.safetensors.index.json"


def index(files: Sequence[TensorFile]) -> dict[str, Any]:
    """Return the index of a set with several files. It maps each tensor to its file."""
    placed = {name: tensor for file in files for name, tensor in file.tensors.items()}
    total = sum(tensor.spec.nbytes for tensor in placed.values())
    return {
        "metadata": {"total_size": total},
        "weight_map": {name: placed[name].file for name in sorted(placed)},
    }


def _build_file(name: str, specs: Sequence[TensorSpec], aliases: Mapping[str, str]) -> TensorFile:
    names = {spec.name for spec in specs}
    metadata = {"format": "pt"} | {
        a: first for a, first in sorted(aliases.items()) if first in names
    }
    table: dict[str, Any] = {_METADATA: metadata}
    ends, offset = [], 0
    for spec in specs:
        ends.append((offset, offset + spec.nbytes))
        table[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": list(ends[-1]),
        }
        offset += spec.nbytes
    # Pad the header to a multiple of 8 bytes, so that the first tensor is aligned for any dtype.
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = _LENGTH + len(text)
    tensors = {
        spec.name: PlacedTensor(spec, name, start + begin, start + end)
        for spec, (begin, end) in zip(specs, ends, strict=True)
    }
    header = len(text).to_bytes(_LENGTH, "little") + text
    return TensorFile(name, header, tensors, metadata, start + offset)


# -- parsing --------------------------------------------------------------------------------


def header_length(first: bytes, nbytes: int, name: str) -> int:
    """Return the length of a file's JSON header in bytes.

    Raises BrokenCheckpoint if the length is invalid.

    Args:
        first: The first 8 bytes of the file.
        nbytes: Size of the file in bytes.
        name: Name of the file, for error messages.
    """
    if len(first) < _LENGTH or nbytes < _LENGTH:
        raise _broken(name, f"it ends after {nbytes} bytes, before its header")
    # Check the length before using it. A malicious file must not make us allocate gigabytes.
    length = int.from_bytes(first[:_LENGTH], "little")
    if length > LONGEST_HEADER:
        raise _broken(name, f"its header claims {length} bytes, above {LONGEST_HEADER}")
    if _LENGTH + length > nbytes:
        raise _broken(name, f"its header claims {length} bytes and the file has {nbytes}")
    return length


def parse(header: bytes, nbytes: int, name: str) -> TensorFile:
    """Parse a file's header (length and JSON) and return the file's layout.

    Raises BrokenCheckpoint unless the tensors fill the file from the header to the end without gaps
    or overlaps, and each tensor has the size that its shape and dtype imply.

    Args:
        nbytes: Size of the file in bytes.
        name: Name of the file, for error messages.
    """
    table = _parse_table(header[_LENGTH:], name)
    metadata = table.pop(_METADATA, {})
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        raise _broken(name, "its metadata is not a map of text to text")
    start = len(header)
    tensors = [_parse_entry(key, value, name, start) for key, value in table.items()]
    # Sort by `end` too, because an empty tensor starts at the same byte as the next one.
    tensors.sort(key=lambda placed: (placed.begin, placed.end))
    reached = start
    for placed in tensors:
        if placed.begin != reached:
            fault = "overlaps the one before" if placed.begin < reached else "leaves a gap before"
            raise _broken(name, f"tensor {placed.spec.name!r} {fault} it, at byte {placed.begin}")
        reached = placed.end
    if reached != nbytes:
        fault = "is cut short" if reached > nbytes else "has bytes that belong to no tensor"
        raise _broken(name, f"it {fault}: its tensors end at byte {reached} of {nbytes}")
    return TensorFile(name, header, {p.spec.name: p for p in tensors}, metadata, nbytes)


def _parse_table(text: bytes, name: str) -> dict[str, Any]:
    # The format requires this, although JSON would allow whitespace before it.
    if not text.startswith(b"{"):
        raise _broken(name, "its header does not begin with {")
    # Count before parsing. A malicious header of 100 MB must not become millions of objects.
    if (count := text.count(b'"data_offsets"')) > MOST_TENSORS:
        raise _broken(name, f"its header has {count} tensors, above {MOST_TENSORS}")
    try:
        table = json.loads(text.decode(), object_pairs_hook=_without_duplicates)
    except RecursionError as error:
        raise _broken(name, "its header is nested too deeply") from error
    except ValueError as error:
        raise _broken(name, f"its header is not valid JSON ({error})") from error
    assert isinstance(table, dict), "text that begins with { is a map"
    return table


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # If a key appears twice, Python uses the last value, but other readers may use the first.
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} appears twice")
    return table


def _parse_entry(key: str, value: Any, name: str, start: int) -> PlacedTensor:
    """Parse one entry of a header. Raises BrokenCheckpoint if it is invalid."""
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _broken(name, f"tensor {key!r} does not have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _broken(name, f"tensor {key!r} has the unknown dtype {dtype!r}")
    if not _are_counts(shape) or len(shape) > MOST_DIMS:
        raise _broken(name, f"tensor {key!r} has the invalid shape {str(shape)[:100]}")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _broken(name, f"tensor {key!r} has the invalid data_offsets {offsets!r}")
    spec = TensorSpec(key, dtype, tuple(shape))
    # Readers compute lengths from shape and dtype, so the offsets must agree with these.
    if offsets[1] - offsets[0] != spec.nbytes:
        raise _broken(
            name,
            f"tensor {key!r} has {offsets[1] - offsets[0]} bytes, but {dtype} of shape {shape} "
            f"takes {spec.nbytes}",
        )
    return PlacedTensor(spec, name, start + offsets[0], start + offsets[1])


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 2**63 for v in values
    )


def _broken(name: str, fault: str) -> BrokenCheckpoint:
    return BrokenCheckpoint(
        f"{name} is not a complete safetensors file: {fault}. Use another checkpoint, or a fresh "
        "copy of this file."
    )


# -- dtypes -----------------------------------------------------------------------------------

_DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of `dtype`. Raises CheckpointError if it has none."""
    if dtype not in _DTYPE_NAMES:
        raise CheckpointError(
            f"safetensors files cannot hold tensors of {dtype}. Convert the tensor to another "
            "dtype, or a complex one to two real ones."
        )
    return _DTYPE_NAMES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with the safetensors name `name`, a key of ITEM_BYTES."""
    return _DTYPES[name]
