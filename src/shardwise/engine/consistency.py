"""Checks that all ranks train the same model, and broadcasts rank 0's optimizer state."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim

from shardwise.comm import Collectives
from shardwise.engine import initial_values
from shardwise.engine.engine_spec import EngineSpec
from shardwise.errors import ModelMismatch
from shardwise.layout import fingerprints
from shardwise.states.optimizer.optimizer_kind import settings_of
from shardwise.states.parameters.named_parameters import NamedParameter


def check_same_model(spec: EngineSpec) -> None:
    """Raise ModelMismatch on all ranks if the ranks built different models. Collective."""
    mine = _description(spec)
    # Gather hashes first: the description of a large model takes megabytes.
    digest = hashlib.blake2b("\n".join(mine).encode(), digest_size=16).hexdigest()
    if len(set(spec.world_group.gather_objects(digest))) == 1:
        return
    lists = spec.world_group.gather_objects(mine)
    for rank, other in enumerate(lists):
        if other != lists[0]:
            here, there = _first_difference(lists[0], other)
            raise ModelMismatch(
                f"Ranks built different models. The first difference: rank 0 has {here}, "
                f"rank {rank} has {there}. Build the same model on all ranks."
            )


def check_written(spec: EngineSpec, named: Sequence[NamedParameter], written: Set[int]) -> None:
    """Raise ModelMismatch on all ranks if the parameters in `written` differ between ranks.

    Without this check, each rank would train a different model. Collective.

    Args:
        spec: The engine's models and process groups.
        named: This rank's parameters.
        written: Indices into `named` of the parameters that user code has written to.
    """
    # Compare by name, because indices differ between pipeline stages.
    names = {named[number].name for number in written}
    gathered = _gathered_values(spec, named, names)
    # Usually all ranks have written to the same parameters. Otherwise, compare every parameter that
    # any rank has written to.
    if any(each.keys() != gathered[0].keys() for each in gathered):
        gathered = _gathered_values(spec, named, {name for each in gathered for _, name in each})
    # Compare with the first rank that has the parameter: pipeline stages have different ones.
    first: dict[tuple[int, str], tuple[int, Any]] = {}
    for rank, each in enumerate(gathered):
        for key, value in each.items():
            other, expected = first.setdefault(key, (rank, value))
            if value != expected:
                raise ModelMismatch(
                    f"{key[1]} was written to since the last step, with different values on rank "
                    f"{rank} and rank {other}, for example by a forward that renormalises or "
                    "clips its own weights. A replicated parameter must be the same on all "
                    "ranks. Write the same values on every rank, or rank 0's values on all: with "
                    "engine.full_parameters(write=True)."
                )


def _gathered_values(
    spec: EngineSpec, named: Sequence[NamedParameter], names: Set[str]
) -> list[dict[tuple[int, str], tuple[int, int]]]:
    """Gather each rank's fingerprints of the parameters in `names`. Collective.

    Returns one dict per rank, with keys (part, name). The parts of a split parameter differ, so
    each has its own key. `part` is 0 for all other parameters.
    """
    mine = {
        (0 if each.shard is None else each.shard.rank, each.name): fingerprints.sums_of(
            each.parameter
        )
        for each in named
        if each.name in names
    }
    return spec.step_group.gather_objects(mine)


def _description(spec: EngineSpec) -> list[str]:
    lines = [
        f"{t.name} {tuple(t.whole_shape)} {t.parameter.dtype}"
        f"{'' if t.parameter.requires_grad else ' frozen'}"
        for t in spec.located()
    ]
    for prefix, model in zip(spec.prefixes, spec.models, strict=True):
        lines += [
            f"buffer {prefix}{name} {tuple(buffer.shape)} {buffer.dtype}"
            for name, buffer in model.named_buffers()
        ]
    for optimizer in spec.optimizers:
        for group in optimizer.param_groups:
            lines.append(f"{type(optimizer).__name__} with {len(group['params'])} parameters")
    return lines


def _first_difference(mine: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    # Compare position by position, because the lists follow the model's order.
    for a, b in zip(mine, other, strict=False):
        if a != b:
            return a, b
    longer = mine if len(mine) > len(other) else other
    extra = longer[min(len(mine), len(other))]
    return (extra, "nothing there") if longer is mine else ("nothing there", extra)


def make_state_alike(spec: EngineSpec) -> None:
    """Broadcast rank 0's optimizer state to every rank. Collective."""
    # Send the structure as an object without tensors; `make_alike` then broadcasts the tensors.
    mine = [_outline(optimizer) for optimizer in spec.optimizers]
    gathered = spec.world_group.gather_objects(mine)
    if spec.world_group.size == 1 or not any(any(each) for outline in gathered for each in outline):
        return
    for optimizer, outline in zip(spec.optimizers, gathered[0], strict=True):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter, entries in zip(parameters, outline, strict=True):
            # Allocate exactly rank 0's entries, and drop any other entries of this rank.
            if spec.world_group.rank and (entries or parameter in optimizer.state):
                old = optimizer.state[parameter]
                optimizer.state[parameter] = {
                    key: _room(entry, old.get(key), parameter) for key, entry in entries.items()
                }
            state = optimizer.state[parameter] if entries else {}
            initial_values.make_alike(
                [state[key] for key, entry in entries.items() if isinstance(entry, _Tensor)],
                spec.world_group,
            )


@dataclass(frozen=True)
class _Tensor:
    """Shape and dtype of a tensor on another rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


def _outline(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    """Return each parameter's optimizer state, with tensors replaced by their shape and dtype."""
    states = [
        optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]
    ]
    return [
        {
            key: _Tensor(tuple(value.shape), value.dtype, value.device.type == "cpu")
            if isinstance(value, Tensor)
            else value
            for key, value in state.items()
        }
        for state in states
    ]


def _room(entry: Any, old: Any, parameter: Tensor) -> Any:
    """Return `entry` or, if it describes a tensor, a tensor of that shape and dtype."""
    if not isinstance(entry, _Tensor):
        return entry
    if isinstance(old, Tensor) and tuple(old.shape) == entry.shape and old.dtype == entry.dtype:
        return old
    device = "cpu" if entry.on_cpu or parameter.is_meta else parameter.device
    return torch.zeros(entry.shape, dtype=entry.dtype, device=device)


def everything(spec: EngineSpec) -> list[Tensor]:
    """Return all models' parameters and buffers, including frozen ones, except meta tensors."""
    buffers = [buffer for model in spec.models for buffer in model.buffers()]
    tensors = [*(named.parameter for named in spec.located()), *buffers]
    return [tensor for tensor in tensors if not tensor.is_meta]


# -- options of the optimizers -----------------------------------------------------------------

_PLAIN = (bool, int, float, str, complex, type(None))


_NO_OPTIONS = ("params", "param_names")
"""Keys of a parameter group that are not options."""


class OptionChecksum:
    """A checksum of the options in the optimizers' parameter groups, for comparison across ranks.

    It covers numbers, strings, sequences of these, and tensors on the CPU.
    """

    def __init__(self, optimizers: Sequence[optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._values: list[Any] = []
        self._number = 0.0

    def number(self) -> float:
        """Return the checksum. It is cached until an option changes."""
        # Don't name and sort the options in every step.
        values = [
            value
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for key, each in group.items()
            if key not in _NO_OPTIONS and _is_plain(value := _near(each))
        ]
        if values != self._values:
            self._values = values
            told = repr([value for _, value in self._named()])
            # A 32-bit number is exact in the exchange's fp64 vector. `repr` of a float is exact and
            # the same on every host.
            self._number = float(zlib.crc32(told.encode()))
        return self._number

    def difference(self, group: Collectives) -> ModelMismatch:
        """Return an error that names the first option that differs between ranks. Collective."""
        gathered: list[list[tuple[str, Any]]] = group.gather_objects(list(self._named()))
        for rank, named in enumerate(gathered):
            for (name, here), (_, there) in zip(gathered[0], named, strict=False):
                # Compare by repr, like the checksum, so that two NaNs are equal.
                if repr(here) != repr(there):
                    return ModelMismatch(
                        f"{name} is {here!r} on rank 0 and {there!r} on rank {rank}, so ranks "
                        "would train different models. Nothing was updated. Set the same value on "
                        "all ranks; pass a scheduler a value that all ranks share: "
                        "engine.step().loss, or with --islands the mean of sw.Metrics."
                    )
        lengths = [len(named) for named in gathered]
        return ModelMismatch(f"Optimizers have different options on each rank: {lengths} of them.")

    def _named(self) -> Iterator[tuple[str, Any]]:
        for optimizer in self._optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for key, value in sorted(settings_of(group).items()):
                    if _is_plain(near := _near(value)):
                        yield f"{key} of group {number} of {type(optimizer).__name__}", near


def _near(value: Any) -> Any:
    """Return the numbers of a tensor on the CPU, and any other value itself."""
    return value.tolist() if isinstance(value, Tensor) and value.device.type == "cpu" else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, _PLAIN):
        return True
    return isinstance(value, (list, tuple)) and all(_is_plain(each) for each in value)
