"""Replaces the arguments of compiled units that are split by tokens (`--sequence-parallel`).

torch.compile traces a unit on a stand-in for each split tensor: a tensor with the full shape, but
without data. The compiled graph gets the parts instead (compiled_sequences.py).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.errors import UsageError
from shardwise.parallel.tensor.region_collectives import scatter_to_region
from shardwise.parallel.tensor.replica import Replica
from shardwise.parallel.tensor.sequence_parallel import (
    TOKEN_DIM,
    SequenceShard,
    can_be_split,
    split_tokens,
)


class StandIns:
    """The stand-ins in the arguments of one call of a unit.

    Besides SequenceShards, a stand-in replaces the first floating-point tensor (`replace_first`).
    The first of several blocks may get a full tensor, such as an embedding. Blocks of a class share
    their graphs, so all of them would otherwise gather their inputs.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._entries: dict[int, tuple[Tensor, SequenceShard, Tensor]] = {}
        """Maps the id of a stand-in to the stand-in, its SequenceShard, and the original."""

    def shard_of(self, value: Any) -> SequenceShard | None:
        """Return the SequenceShard that `value` stands for, or None."""
        return self._entries[id(value)][1] if id(value) in self._entries else None

    def insert(self, nest: Any, *, replace_first: bool) -> Any:
        """Return `nest` with stand-ins. Changes lists, dicts and dataclasses in place.

        In place, because the unit may write to its caller's containers.
        """
        tensors: list[Tensor] = []
        _exchanged(nest, lambda value: tensors.append(value) or value)  # type: ignore[func-returns-value]
        first = next((each for each in tensors if each.is_floating_point()), None)
        memories = {
            memory_of(each)
            for each in tensors
            if each is not first and type(each) is Tensor and each.layout is torch.strided
        }
        for each in tensors:
            full = each._full if isinstance(each, SequenceShard) else None
            if full is not None and memory_of(full) in memories:
                raise unit_error("gets a split tensor and a view of it", "Pass one of them")
        if (
            replace_first
            and first is not None
            and not isinstance(first, SequenceShard)
            and first.layout is torch.strided
            and can_be_split(first, self._replica.group.size)
            # A part would not see writes to another argument that shares memory with the tensor.
            and memory_of(first) not in memories
        ):
            self._add(split(first, self._replica), first)
        return _exchanged(nest, self._stand_in)

    def remove(self, nest: Any) -> Any:
        """Undo `insert`."""
        return _exchanged(
            nest, lambda value: self._entries[id(value)][2] if id(value) in self._entries else value
        )

    def check(self) -> None:
        """Raise UsageError if the unit has changed a stand-in, or has stored one for later."""
        for stand_in, shard, _ in self._entries.values():
            if (
                stand_in._backward_hooks
                or stand_in.retains_grad
                or stand_in.__dict__
                or stand_in.requires_grad != shard.local.requires_grad
            ):
                raise unit_error(
                    "registers a hook on its input, or changes an attribute of its input",
                    "Apply this change to a new tensor, such as x * 1",
                )
        left = [ref(stand_in) for stand_in, _, _ in self._entries.values()]
        self._entries.clear()
        stand_in = None  # type: ignore[assignment]
        if any(each() is not None for each in left):
            gc.collect()  # the compiler's own references are cyclic
        if any(each() is not None for each in left):
            raise unit_error("stores its input for later use", "Store a new tensor, such as x * 1")

    def _stand_in(self, value: Tensor) -> Tensor:
        for stand_in, _, original in self._entries.values():
            if original is value:
                return stand_in
        return self._add(value, value) if isinstance(value, SequenceShard) else value

    def _add(self, shard: SequenceShard, original: Tensor) -> Tensor:
        local = shard.local
        with torch.enable_grad():
            # NaN, so that a stand-in that is used by mistake does not go unnoticed.
            data = local.new_full((), float("nan") if local.is_floating_point() else 0)
            data.requires_grad_(local.requires_grad)
            # Not a view of a leaf, whose writes torch refuses without naming this mode.
            stand_in = data.clone().expand(shard.sharded.whole_shape(local.shape))
        self._entries[id(stand_in)] = stand_in, shard, original
        return stand_in


def _exchanged(value: Any, exchange: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return exchange(value)
    if isinstance(value, dict | list):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            other = _exchanged(item, exchange)
            if other is not item:
                value[key] = other
    elif isinstance(value, tuple):
        items = [_exchanged(item, exchange) for item in value]
        if any(one is not other for one, other in zip(items, value, strict=True)):
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif is_dataclass(value) and not isinstance(value, type | nn.Module):
        for field in fields(value):
            item = getattr(value, field.name, None)
            other = _exchanged(item, exchange)
            if other is not item:
                object.__setattr__(value, field.name, other)
    return value


def split(full: Tensor, replica: Replica) -> SequenceShard:
    """Split `full`, (..., tokens, features), by tokens. Sends no data: all ranks have `full`."""
    group = replica.group
    sharded = split_tokens(full.shape[TOKEN_DIM], group.size)
    part = scatter_to_region(full, group, sharded)
    return SequenceShard(part, group, replica.randomness, sharded)


def sizes_of_its_own(mode: FakeTensorMode) -> AbstractContextManager[Any]:
    """Return a context manager for a run of a graph on fake tensors, apart from torch's trace.

    Sizes that depend on values, such as the rows of an expert, become new symbols in each run. The
    compiler would otherwise look for them in its own run.
    """
    shapes: Any = mode.shape_env
    return nullcontext() if shapes is None else shapes.ignore_fresh_unbacked_symbols()


def memory_of(tensor: Tensor) -> int:
    """Return a number that identifies the memory of `tensor`, which must be alive."""
    return int(tensor.untyped_storage()._cdata)


def unit_error(does: str, advice: str = "", node: fx.Node | None = None) -> UsageError:
    """Return the error of a unit that `does` something unsupported.

    Args:
        does: A verb phrase.
        advice: What to do instead, if there is an alternative.
        node: The node of the unit's graph, to name the line of code.
    """
    trace = (node.stack_trace or "") if node is not None else ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    place = f" at {lines[-1]}" if lines else ""
    return UsageError(
        f"A compiled unit (--compile with --sequence-parallel) {does}{place}. "
        f"{advice + ', or start' if advice else 'Start'} without one of the two flags."
    )
