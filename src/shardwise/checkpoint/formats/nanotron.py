"""Reads the weights of nanotron's checkpoints, with tensor-parallel shards put together.

    1000/checkpoint_metadata.json      {"metas": {"last_train_step": 1000, ...}, "tp": 2, ...}
    1000/model_config.json             heads and sizes
    1000/model/A/B/model_weight.safetensors                                the tensor A.B.weight
    1000/model/A/C/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors  a shard of A.C.weight
    1000/optimizer/, lr_scheduler/, random/                                not read

The metadata of a shard has the shape of the full tensor, and pairs of a box in the shard and the
box in the full tensor that it is: "0,4,None|None,None,None#4,8,None|None,None,None;...". Source of
the layout: nanotron/serialize/{weights,metadata,utils}.py and nanotron/parallel/parameters.py.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.file_system import read_whole
from shardwise.checkpoint.format import TensorSpec, dtype_of
from shardwise.checkpoint.formats import dcp
from shardwise.checkpoint.formats.saved import Checkpoint, reading
from shardwise.checkpoint.reader import SafetensorsReader, TensorReader
from shardwise.checkpoint.schema import is_plain_name
from shardwise.errors import BrokenCheckpoint, CheckpointError

WHAT = "nanotron"

_METADATA = "checkpoint_metadata.json"
_LATEST = "latest.txt"
_CONFIG = "model_config.json"
_FILE = re.compile(
    r"model_(\w+?)(?:_pp-rank-\d+-of-\d+_tp-rank-\d+-of-(\d+)(_exp-rank-\d+-of-\d+)?)?\.safetensors"
)
_DATA = "data"
"""Name of the tensor in each file."""

_Box = tuple[slice, ...]


@dataclass(frozen=True)
class _Shard:
    """A file, and the boxes of the full tensor that it has, or () if it has the full tensor.

    Args:
        pairs: For each box, its place in the shard and its place in the full tensor.
    """

    path: Path
    pairs: tuple[tuple[_Box, _Box], ...]

    def open(self) -> SafetensorsReader:
        # Opened for each read, because there may be more files than a process may open.
        return SafetensorsReader([self.path])


class _ShardsReader(TensorReader):
    """Reads tensors from the shards of tensor parallelism.

    Args:
        specs: Dtype and shape of each full tensor, by name.
        shards: The shards of each tensor, by name.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], shards: Mapping[str, list[_Shard]]) -> None:
        self.specs, self._shards = specs, shards
        self._assembled: tuple[str, Tensor] | None = None

    def read(self, name: str, first: int, into: Tensor) -> None:
        shards = self._shards[name]
        if not shards[0].pairs:
            with closing(shards[0].open()) as reader:
                reader.read(_DATA, first, into)
            return
        if self._assembled is None or self._assembled[0] != name:
            self._assembled = None  # free the last tensor before the next is read
            self._assembled = name, self._assemble(name)
        into.copy_(self._assembled[1][first : first + into.numel()])

    def _assemble(self, name: str) -> Tensor:
        spec = self.specs[name]
        value = torch.empty(spec.shape, dtype=dtype_of(spec.dtype))
        for shard in self._shards[name]:
            with closing(shard.open()) as reader:
                part = reader.whole(_DATA)
            for place, box in shard.pairs:
                value[box] = part[place]
        return value.view(-1)


def find(path: Path) -> Path | None:
    """Return the folder of one checkpoint that `path` refers to, or None.

    `path` may be the folder of a run, whose newest checkpoint is used.
    """
    if (path / _LATEST).is_file() and not (path / "model").is_dir():
        word = read_whole(path / _LATEST)[:40].decode("ascii", "replace").strip()
        path = path / word if is_plain_name(word) else path
    return path if (path / _METADATA).is_file() and (path / "model").is_dir() else None


def open_checkpoint(path: Path) -> Checkpoint | None:
    """Open a checkpoint of nanotron. Returns None if `path` is not one."""
    folder = find(path)
    if folder is None:
        return None
    files: dict[str, list[Path]] = defaultdict(list)
    for file in sorted((folder / "model").rglob("*.safetensors")):
        found = _FILE.fullmatch(file.name)
        if found is None or found[3]:
            raise CheckpointError(
                f"{file} is a shard of an expert or has an unknown name, which cannot be read. "
                "Convert the checkpoint with nanotron's convert_nanotron_to_hf.py."
            )
        parts = file.relative_to(folder / "model").parts[:-1]
        files[".".join([*parts, found[1]])].append(file)
        if found[2] is None and len(files[".".join([*parts, found[1]])]) > 1:
            raise BrokenCheckpoint(f"{file} and shards of it both exist. Use another checkpoint.")
    if not files:
        raise BrokenCheckpoint(f"{folder / 'model'} has no weights. Use another checkpoint.")
    specs: dict[str, TensorSpec] = {}
    shards: dict[str, list[_Shard]] = {}
    for name, paths in files.items():
        with reading(paths[0].parent, WHAT):
            specs[name], shards[name] = _read_headers(name, paths)
    checkpoint = Checkpoint(WHAT, folder, _ShardsReader(specs, shards), has_checksums=False)
    checkpoint.step = _step(folder)
    checkpoint.facts = {"files": str(sum(map(len, files.values()))), **_facts(folder / _CONFIG)}
    if (folder / "optimizer").is_dir():
        checkpoint.notes.append(f"The optimizer state in {folder / 'optimizer'} is not read.")
    return checkpoint


def _read_headers(name: str, paths: list[Path]) -> tuple[TensorSpec, list[_Shard]]:
    """Return the spec of a full tensor, and its shards.

    Raises ValueError if the shards do not cover every element once.
    """
    shards: list[_Shard] = []
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    shapes: set[tuple[int, ...]] = set()
    dtypes: set[str] = set()
    for path in paths:
        with closing(SafetensorsReader([path])) as reader:
            spec, metadata = reader.specs[_DATA], reader.metadata
        dtypes.add(spec.dtype)
        if "unsharded_shape" not in metadata:
            shapes.add(spec.shape)
            shards.append(_Shard(path, ()))
            continue
        # numpy's numbers are written as np.int64(5).
        numbers = re.sub(r"np\.int\d+\((\d+)\)", r"\1", metadata["unsharded_shape"])
        shape = tuple(int(size) for size in numbers.strip("()").split(",") if size.strip())
        shapes.add(shape)
        pairs = [pair.split("#") for pair in metadata["local_global_slices_pairs"].split(";")]
        parsed = tuple((_box(local, spec.shape), _box(place, shape)) for local, place in pairs)
        for local, box in parsed:
            sizes = tuple(s.stop - s.start for s in box)
            if sizes != tuple(s.stop - s.start for s in local):
                raise ValueError(f"two boxes of {name} have different shapes")
            boxes.append((tuple(s.start for s in box), sizes))
        shards.append(_Shard(path, parsed))
    is_mixed = len(shards) > 1 and not all(shard.pairs for shard in shards)
    if len(shapes) != 1 or len(dtypes) != 1 or is_mixed:
        raise ValueError(f"the shards of {name} are of different tensors")
    (shape,) = shapes
    if boxes:
        # A shard that is smaller than its box would be caught here, before memory is allocated.
        dcp.check_boxes(name, shape, boxes)
    return TensorSpec(name, dtypes.pop(), shape), shards


def _box(text: str, shape: tuple[int, ...]) -> _Box:
    """Parse a box such as `0,4,None|None,None,None`. Raises ValueError if it is not in `shape`."""
    found = []
    for part, size in zip(text.split("|"), shape, strict=True):
        start, stop, step = (None if n == "None" else int(n) for n in part.split(","))
        first, end = start or 0, size if stop is None else stop
        if step not in (None, 1) or not 0 <= first <= end <= size:
            raise ValueError(f"the box {text} does not fit the shape {shape}")
        found.append(slice(first, end))
    return tuple(found)


def _step(folder: Path) -> int | None:
    with reading(folder / _METADATA, WHAT):
        step = json.loads(read_whole(folder / _METADATA))["metas"]["last_train_step"]
        if type(step) is not int or step < 0:
            raise ValueError(f"last_train_step is {step!r:.40}")
        return step


def _facts(path: Path) -> dict[str, str]:
    """Return what the model's configuration says, by the names that config.json has."""
    if not path.is_file():
        return {}
    with reading(path, WHAT):
        fields: dict[str, Any] = json.loads(read_whole(path))
        wanted = ("num_attention_heads", "num_key_value_heads", "rope_interleaved")
        return {key: str(fields[key])[:40] for key in wanted if key in fields}
