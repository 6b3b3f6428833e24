"""Reads nanotron's checkpoints, and joins tensor-parallel shards into full tensors.

    1000/checkpoint_metadata.json      {"metas": {"last_train_step": 1000, ...}, "tp": 2, ...}
    1000/model_config.json             heads and sizes
    1000/model/A/B/model_weight.safetensors                                the tensor A.B.weight
    1000/model/A/C/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors  a shard of A.C.weight
    1000/optimizer/optimizer_config.json                                   class and ranks
    1000/optimizer/optimizer_pp-0-of-1_tp-1-of-2_exp-0-of-1.pt             state, groups and names
    1000/lr_scheduler/, random/                                            not read

A shard's metadata contains the full tensor's shape, and pairs of boxes. The first box of a pair is
in the shard, and the second is its place in the full tensor:
"0,4,None|None,None,None#4,8,None|None,None,None;...". Source of the layout:
nanotron/serialize/{weights,optimizer,metadata,utils}.py, nanotron/parallel/parameters.py and
nanotron/optim/named_optimizer.py.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.file_system import read_whole
from shardwise.checkpoint.format import TensorSpec, dtype_of
from shardwise.checkpoint.formats import dcp, torch_files, training_dict
from shardwise.checkpoint.formats.saved import (
    Checkpoint,
    LastValue,
    Leaf,
    OptimizerGroup,
    SavedOptimizer,
    as_number,
    reading,
)
from shardwise.checkpoint.reader import SafetensorsReader, TensorReader
from shardwise.checkpoint.schema import is_plain_name
from shardwise.errors import BrokenCheckpoint, CheckpointError

WHAT = "nanotron"

_METADATA = "checkpoint_metadata.json"
_LATEST = "latest.txt"
_CONFIG = "model_config.json"
_FILE = re.compile(
    r"model_(\w+?)(?:_pp-rank-\d+-of-\d+_tp-rank-(\d+)-of-\d+(_exp-rank-\d+-of-\d+)?)?\.safetensors"
)
_OPTIMIZER_FILE = re.compile(r"optimizer_pp-\d+-of-\d+_tp-(\d+)-of-\d+(?:_exp-0-of-1)?\.pt")
_DATA = "data"
"""Name of the tensor in each file."""

_Box = tuple[slice, ...]
_Pairs = tuple[tuple[_Box, _Box], ...]


@dataclass(frozen=True)
class _Shard:
    """A file with a tensor-parallel shard of a tensor.

    Args:
        rank: The tensor-parallel rank that wrote the file.
        pairs: For each box, its place in the shard and its place in the full tensor. () if the file
            contains the full tensor.
    """

    path: Path
    rank: int
    pairs: _Pairs

    def open(self) -> SafetensorsReader:
        # Opened for each read, because there may be more files than a process may open.
        return SafetensorsReader([self.path])

    def value(self) -> Tensor:
        with closing(self.open()) as reader:
            return reader.whole(_DATA)


def _assemble(spec: TensorSpec, parts: Iterable[tuple[Tensor, _Pairs]]) -> Tensor:
    """Return a full tensor, flattened to 1-D, from its shards and their boxes."""
    value = torch.empty(spec.shape, dtype=dtype_of(spec.dtype))
    for part, pairs in parts:
        for place, box in pairs:
            value[box] = part[place]
    return value.view(-1)


class _ShardsReader(TensorReader):
    """Reads full tensors from tensor-parallel shards.

    Args:
        specs: Dtype and shape of each full tensor, by name.
        shards: The shards of each tensor, by name.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], shards: Mapping[str, list[_Shard]]) -> None:
        self.specs, self._shards, self._last = specs, shards, LastValue()

    def read(self, name: str, first: int, into: Tensor) -> None:
        shards = self._shards[name]
        if not shards[0].pairs:
            with closing(shards[0].open()) as reader:
                reader.read(_DATA, first, into)
            return
        parts = ((shard.value(), shard.pairs) for shard in shards)
        value = self._last.get(name, lambda: _assemble(self.specs[name], parts))
        into.copy_(value[first : first + into.numel()])


class _StateReader(TensorReader):
    """Reads one optimizer state of a sharded parameter as a full tensor.

    Args:
        shape: Shape of the full parameter.
        shards: The parameter's shards.
        leaves: The state of each shard, by tensor-parallel rank.
        last: Cache of the last tensor, shared by all readers.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        shards: list[_Shard],
        leaves: Mapping[int, Leaf],
        last: LastValue,
    ) -> None:
        self._last = last
        (dtype,) = {leaf.spec.dtype for leaf in leaves.values()}
        self.specs = {"": TensorSpec("", dtype, shape)}
        self._parts = [(leaves[shard.rank], shard.pairs) for shard in shards]
        for leaf, pairs in self._parts:
            for place, _ in pairs:
                if any(s.stop > n for s, n in zip(place, leaf.shape, strict=True)):
                    raise ValueError(f"a state of the shape {leaf.shape} lacks {place}")

    def read(self, name: str, first: int, into: Tensor) -> None:
        parts = ((leaf.value(), pairs) for leaf, pairs in self._parts)
        value = self._last.get(id(self), lambda: _assemble(self.specs[name], parts))
        into.copy_(value[first : first + into.numel()])


def find(path: Path) -> Path | None:
    """Return the checkpoint folder to which `path` refers, or None.

    If `path` is the folder of a run, this is the run's newest checkpoint.
    """
    if (path / _LATEST).is_file() and not (path / "model").is_dir():
        word = read_whole(path / _LATEST)[:40].decode("ascii", "replace").strip()
        path = path / word if is_plain_name(word) else path
    return path if (path / _METADATA).is_file() and (path / "model").is_dir() else None


def open_checkpoint(path: Path) -> Checkpoint | None:
    """Open the nanotron checkpoint at `path`. Returns None if there is none."""
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
        _add_optimizer(checkpoint, folder / "optimizer", shards)
    return checkpoint


def _read_headers(name: str, paths: list[Path]) -> tuple[TensorSpec, list[_Shard]]:
    """Return the spec of a full tensor, and its shards.

    Raises ValueError unless the shards cover each element exactly once.
    """
    shards: list[_Shard] = []
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    shapes: set[tuple[int, ...]] = set()
    dtypes: set[str] = set()
    for path in paths:
        found = _FILE.fullmatch(path.name)
        with closing(SafetensorsReader([path])) as reader:
            spec, metadata = reader.specs[_DATA], reader.metadata
        dtypes.add(spec.dtype)
        if "unsharded_shape" not in metadata:
            shapes.add(spec.shape)
            shards.append(_Shard(path, 0, ()))
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
        shards.append(_Shard(path, int(found[2]) if found and found[2] else 0, parsed))
    is_mixed = len(shards) > 1 and not all(shard.pairs for shard in shards)
    if len(shapes) != 1 or len(dtypes) != 1 or is_mixed:
        raise ValueError(f"the shards of {name} are of different tensors")
    (shape,) = shapes
    if boxes:
        # Readers allocate memory by this shape, so a false one must not pass.
        dcp.check_boxes(name, shape, boxes)
    return TensorSpec(name, dtypes.pop(), shape), shards


def _box(text: str, shape: tuple[int, ...]) -> _Box:
    """Parse a box such as `0,4,None|None,None,None`. Raises ValueError unless it fits `shape`."""
    found = []
    for part, size in zip(text.split("|"), shape, strict=True):
        start, stop, step = (None if n == "None" else int(n) for n in part.split(","))
        first, end = start or 0, size if stop is None else stop
        if step not in (None, 1) or not 0 <= first <= end <= size:
            raise ValueError(f"the box {text} does not fit the shape {shape}")
        found.append(slice(first, end))
    return tuple(found)


# -- the optimizer -----------------------------------------------------------------------------


def _add_optimizer(
    checkpoint: Checkpoint, folder: Path, shards: Mapping[str, list[_Shard]]
) -> None:
    """Add the optimizer in `folder` to a checkpoint, or a note if its form is not supported."""
    files = sorted(folder.glob("optimizer_*.pt"))
    found = [_OPTIMIZER_FILE.fullmatch(file.name) for file in files]
    if not files or not all(found):
        checkpoint.notes.append(
            f"The optimizer state in {folder} is not read: it is split by data-parallel ranks "
            "(ZeRO) or experts."
        )
        return
    # By parameter, kind and tensor-parallel rank.
    parts: dict[str, dict[str, dict[int, Any]]] = defaultdict(lambda: defaultdict(dict))
    groups: list[OptimizerGroup] = []
    for file, matched in zip(files, found, strict=True):
        content, _ = torch_files.load(file)
        with reading(file, WHAT):
            tree, _ = torch_files.as_tree(content, file)
            names = {n: str(name).removeprefix("module.") for n, name in tree["names"].items()}
            for number, entry in tree["state"].items():
                for kind, value in entry.items():
                    assert matched is not None
                    parts[names[number]][kind][int(matched[1])] = value
            for place, group in enumerate(tree["param_groups"]):
                options = {k: training_dict.plain_value(v) for k, v in group.items()}
                own = [names[number] for number in options.pop("params") if number in names]
                if place == len(groups):
                    groups.append(OptimizerGroup([], options))
                # Pipeline ranks have different parameters, tensor-parallel ranks the same ones.
                groups[place].keys.extend(n for n in own if n not in groups[place].keys)
    if unknown := [name for name in parts if name not in checkpoint.model.specs]:
        checkpoint.notes.append(
            f"The optimizer state in {folder} is not read: it has {unknown[0]}, which is no weight."
        )
        return
    with reading(folder, WHAT):
        last = LastValue()
        state = {
            name: _join(checkpoint.model.specs[name].shape, shards[name], kinds, last)
            for name, kinds in parts.items()
        }
    checkpoint.optimizers = [SavedOptimizer([g for g in groups if g.keys], state)]
    checkpoint.damages = lambda rank, size: torch_files.damages(files[rank::size])


def _join(
    shape: tuple[int, ...],
    shards: list[_Shard],
    kinds: Mapping[str, Mapping[int, Any]],
    last: LastValue,
) -> dict[str, Any]:
    """Join the tensor-parallel ranks' state of one parameter into the full parameter's state."""
    entry: dict[str, Any] = {}
    for kind, by_rank in kinds.items():
        some = by_rank[min(by_rank)]
        if not isinstance(some, Leaf) or not some.shape:
            entry[kind] = as_number(some)
            if kind == "step":  # torch's optimizers expect a tensor
                entry[kind] = torch.tensor(float(entry[kind]))
        elif shards[0].pairs:
            entry[kind] = Leaf(_StateReader(shape, shards, by_rank, last), "")
        else:
            entry[kind] = some
    return entry


def _step(folder: Path) -> int | None:
    with reading(folder / _METADATA, WHAT):
        step = json.loads(read_whole(folder / _METADATA))["metas"]["last_train_step"]
        if type(step) is not int or step < 0:
            raise ValueError(f"last_train_step is {step!r:.40}")
        return step


def _facts(path: Path) -> dict[str, str]:
    """Return the head counts and rotary layout in the model's config, in config.json's form."""
    if not path.is_file():
        return {}
    with reading(path, WHAT):
        fields: dict[str, Any] = json.loads(read_whole(path))
        wanted = ("num_attention_heads", "num_key_value_heads", "rope_interleaved")
        return {key: str(fields[key])[:40] for key in wanted if key in fields}
