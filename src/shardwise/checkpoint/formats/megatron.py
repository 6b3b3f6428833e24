"""Reads Megatron-Core checkpoints (torch_dist), which are torch DCP in Megatron's own layout.

    iter_0000010/.metadata, __R_N.distcp    tensors
    iter_0000010/common.pt                  arguments, iteration, options of the optimizer
    iter_0000010/metadata.json              {"sharded_backend": "torch_dist", ...}

Layers are stacked along dim 0. A key of optimizer state is a prefix followed by the weight's key:

    decoder.layers.mlp.linear_fc1.weight                              [layers, rows, columns]
    optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight      the same shape, or flattened

Source of the layout: megatron/core/dist_checkpointing/{mapping,optimizer,strategies/torch}.py and
megatron/core/optimizer/distrib_optimizer.py.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.deepspeed.inert import Inert
from shardwise.checkpoint.file_system import read_whole
from shardwise.checkpoint.format import TensorSpec
from shardwise.checkpoint.formats import dcp, torch_files, training_dict
from shardwise.checkpoint.formats.saved import (
    Checkpoint,
    LastValue,
    Leaf,
    MappedReader,
    OptimizerGroup,
    SavedOptimizer,
    as_number,
    reading,
)
from shardwise.checkpoint.reader import TensorReader
from shardwise.checkpoint.schema import is_plain_name
from shardwise.errors import BrokenCheckpoint, CheckpointError

WHAT = "Megatron-Core"

_COMMON = "common.pt"
_LATEST = "latest_checkpointed_iteration.txt"

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_NO_WEIGHT = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine_state")
"""Keys of tensors that are not weights."""

_STACKED = re.compile(r"(.*?\blayers)\.(?!\d+\.)(.+)")
"""Keys of tensors with layers stacked along dim 0. Layers that differ are not stacked."""

_MASTERS = ("fp32_param", "param")
"""Keys of the fp32 copies of the weights."""

_OPTIONS = ("lr", "betas", "eps", "weight_decay", "momentum")
"""Options that a group's update uses. All others belong to Megatron's own schedules."""


def find(path: Path) -> Path | None:
    """Return the checkpoint folder to which `path` refers, or None.

    If `path` is the folder of a run, this is the run's newest checkpoint.
    """
    if (path / _LATEST).is_file():
        word = read_whole(path / _LATEST)[:40].decode("ascii", "replace").strip()
        name = f"iter_{int(word):07d}" if word.isdecimal() else word
        path = path / name if is_plain_name(name) else path
    is_folder = dcp.find(path) is not None and (path / _COMMON).is_file()
    return path if is_folder and (path / "metadata.json").is_file() else None


def open_checkpoint(path: Path) -> Checkpoint | None:
    """Open the Megatron-Core checkpoint at `path`. Returns None if there is none."""
    folder = find(path)
    if folder is None:
        return None
    with ExitStack() as stack:
        reader, _, _ = dcp.open_reader(folder)
        stack.callback(reader.close)
        with reading(folder / _COMMON, torch_files.WHAT):
            content, _ = torch_files.load(folder / _COMMON)
            common, _ = torch_files.as_tree(content, folder / _COMMON)
        with reading(folder, WHAT):
            checkpoint = _interpret(folder, reader, common)
        common_pt = [folder / _COMMON]
        checkpoint.damages = lambda rank, size: itertools.chain(
            reader.damages(rank, size), torch_files.damages(common_pt[rank::size])
        )
        checkpoint.stack = stack.pop_all()
        return checkpoint


def _interpret(folder: Path, reader: dcp.DcpReader, common: Mapping[str, Any]) -> Checkpoint:
    stacks: dict[str, int] = {}
    found: dict[str, tuple[int, int, Leaf]] = {}
    first: dict[str, int] = {}
    for place, (key, spec) in enumerate(reader.specs.items()):
        if not _NO_WEIGHT.match(key):
            stack = _STACKED.fullmatch(key)
            start = first.setdefault(stack[1] if stack else key, place)
            unstacked = _unstack(key, Leaf(reader, key), spec.shape, stacks)
            for layer, (name, leaf) in enumerate(unstacked):
                found[name] = start, layer, leaf
    if not found:
        raise CheckpointError(f"{folder} has no weights. Use another checkpoint.")
    # In the order of modules, layer by layer: exports may store positions.
    names = sorted(found, key=lambda name: found[name][:2])
    checkpoint = Checkpoint(WHAT, folder, MappedReader({name: found[name][2] for name in names}))
    step = as_number(common.get("iteration"))
    checkpoint.step = step if type(step) is int and step >= 0 else None
    arguments = common.get("args")
    if isinstance(arguments, Inert):
        checkpoint.facts = _facts(arguments)
    by_name = _read_state(reader, stacks)
    state = {name: by_name[name] for name in names if name in by_name}
    if state:
        _add_optimizer(checkpoint, state, common)
    elif any(key.partition("optimizer.")[1] for key in reader.specs):
        checkpoint.notes.append(
            f"{folder} has optimizer state in buffers whose layout depends on the ranks: it is not "
            "loaded. Save with --dist-ckpt-optim-fully-reshardable."
        )
    if "opt_param_scheduler" in common:
        checkpoint.notes.append(
            f"{folder} has the state of Megatron's own schedule of learning rates: it is not "
            "loaded."
        )
    return checkpoint


def _facts(arguments: Inert) -> dict[str, str]:
    """Return the model's sizes from the run's arguments, under their names in config.json."""
    values = arguments.__dict__
    # Without grouped queries, Megatron leaves the number of groups at 1.
    kv = "num_query_groups" if values.get("group_query_attention") else "num_attention_heads"
    wanted = {
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "num_key_value_heads": kv,
        "tensor_model_parallel_size": "tensor_model_parallel_size",
        "pipeline_model_parallel_size": "pipeline_model_parallel_size",
    }
    return {new: str(values[old]) for new, old in wanted.items() if type(values.get(old)) is int}


# -- tensors -----------------------------------------------------------------------------------


class _PartReader(TensorReader):
    """Reads the elements of `leaf` from `first` on as a tensor of shape `shape`."""

    def __init__(self, leaf: Leaf, first: int, shape: tuple[int, ...]) -> None:
        self._leaf, self._first = leaf, first
        self.specs = {"": TensorSpec("", leaf.spec.dtype, shape)}

    def read(self, name: str, first: int, into: Tensor) -> None:
        self._leaf.reader.read(self._leaf.name, self._first + first, into)


class _BoxesReader(TensorReader):
    """Reads a tensor that is stored as a grid of boxes, each flattened: [grid..., box elements].

    Args:
        leaf: The stored tensor.
        shape: Shape of the tensor to read.
        last: Cache of the last tensor, shared by all readers.
    """

    def __init__(self, leaf: Leaf, shape: tuple[int, ...], last: LastValue) -> None:
        self._leaf, self._shape, self._last = leaf, shape, last
        self.specs = {"": TensorSpec("", leaf.spec.dtype, shape)}

    def read(self, name: str, first: int, into: Tensor) -> None:
        value = self._last.get(id(self), self._unflatten)
        into.copy_(value[first : first + into.numel()])

    def _unflatten(self) -> Tensor:
        grid = self._leaf.shape[:-1]
        box = [size // count for size, count in zip(self._shape, grid, strict=True)]
        dims = len(grid)
        # From [grid..., box...] to [grid 0, box 0, grid 1, box 1, ...].
        order = [d for pair in zip(range(dims), range(dims, 2 * dims), strict=True) for d in pair]
        return self._leaf.value().view(*grid, *box).permute(order).reshape(-1)


def _unstack(
    key: str, leaf: Leaf, shape: tuple[int, ...], stacks: dict[str, int]
) -> Iterator[tuple[str, Leaf]]:
    """Split a stacked tensor into layers. Yield each layer's name in the model and its tensor.

    If the tensor is not stacked, yields it unchanged.

    Args:
        key: Key of the weight.
        leaf: The weight or its optimizer state.
        shape: Shape of the stacked tensor.
        stacks: Number of layers of each stack, by stack name. New stacks are added.

    Raises:
        ValueError: The tensor and another one in its stack have different numbers of layers.
    """
    found = _STACKED.fullmatch(key)
    if found is None:
        yield key, leaf
        return
    stack, rest = found.groups()
    count = stacks.setdefault(stack, shape[0] if shape else 0)
    if not shape or shape[0] != count:
        raise ValueError(f"{key} has the shape {shape}, but {stack} has {count} layers")
    size = math.prod(shape[1:])
    for number in range(count):
        part = _PartReader(leaf, number * size, shape[1:])
        yield f"{stack}.{number}.{rest}", Leaf(part, "")


def _read_state(reader: dcp.DcpReader, stacks: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Return the optimizer state of each weight, by the weight's name in the model."""
    state: dict[str, dict[str, Any]] = {}
    last = LastValue()
    for key, spec in reader.specs.items():
        found = _STATE.fullmatch(key)
        if found is None or found[2] not in reader.specs:
            continue
        kind, weight = found.groups()
        shape, leaf = reader.specs[weight].shape, Leaf(reader, key)
        if spec.shape != shape:
            boxes = zip(shape, spec.shape[:-1], strict=True)
            if spec.numel != math.prod(shape) or any(n == 0 or size % n for size, n in boxes):
                raise ValueError(f"{key} has the shape {spec.shape}, but {weight} has {shape}")
            leaf = Leaf(_BoxesReader(leaf, shape, last), "")
        for name, part in _unstack(weight, leaf, shape, stacks):
            state.setdefault(name, {})["master" if kind in _MASTERS else kind] = part
    return state


# -- the optimizer -----------------------------------------------------------------------------


def _add_optimizer(
    checkpoint: Checkpoint, state: dict[str, dict[str, Any]], common: Mapping[str, Any]
) -> None:
    """Add the optimizer to a checkpoint.

    If it is not certain which parameters the optimizer's groups have, add a note instead.
    """
    saved = list(_groups(common.get("optimizer")))
    groups: list[OptimizerGroup] = []
    for name in state:
        options = _options_of(saved, name, checkpoint.model.specs[name].shape)
        if options is None:
            checkpoint.notes.append(
                f"{checkpoint.path} does not say which parameters its {len(saved)} optimizer "
                f"groups have, and their options do not show which one has {name}: the optimizer "
                "state is not loaded."
            )
            return
        group = next((group for group in groups if group.options == options), None)
        if group is None:
            groups.append(group := OptimizerGroup([], options))
        group.keys.append(name)
    steps = [*(as_number(group.get("step")) for group in saved), _common_step(common)]
    step = next((n for n in steps if isinstance(n, int | float)), checkpoint.step)
    if step is None:
        raise BrokenCheckpoint(f"{checkpoint.path / _COMMON} has no number of steps.")
    for entry in state.values():
        entry["step"] = torch.tensor(float(step))
    checkpoint.optimizers = [SavedOptimizer(groups, state)]


def _groups(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the options of all parameter groups in nested dicts and lists, without parameters."""
    if isinstance(value, Mapping) and isinstance(value.get("param_groups"), list | tuple):
        yield from (training_dict.plain_value(group) for group in value["param_groups"])
        return
    items = value.values() if isinstance(value, Mapping) else value
    for item in items if isinstance(value, Mapping | list | tuple) else ():
        yield from _groups(item)


def _common_step(common: Mapping[str, Any]) -> Any:
    value: Any = common.get("optimizer")
    for key in ("optimizer", "state", "common_step"):
        if isinstance(value, Mapping) and key in value:
            value = value[key]
    return as_number(value)


def _options_of(
    groups: Sequence[Mapping[str, Any]], name: str, shape: tuple[int, ...]
) -> dict[str, Any] | None:
    """Return the options of the group that contains parameter `name`, or None if it is uncertain.

    Megatron does not decay biases and vectors: their group has wd_mult=0.
    """
    is_decayed = len(shape) > 1 and not name.endswith(".bias")
    found: list[dict[str, Any]] = []
    for group in groups:
        if len(groups) == 1 or bool(group.get("wd_mult", 1.0)) == is_decayed:
            options = {key: group[key] for key in _OPTIONS if key in group}
            if options not in found:
                found.append(options)
    return found[0] if len(found) == 1 else None
