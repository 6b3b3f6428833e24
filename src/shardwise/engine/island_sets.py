"""Finds in a checkpoint what is this island's: its own sets where it was written by as many, else
the mean of those of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import json_values
from shardwise.checkpoint.format import TensorSpec, dtype_of
from shardwise.checkpoint.reader import TensorReader
from shardwise.checkpoint.tensor_spans import ISLAND, OPTIMIZER
from shardwise.comm import Collectives
from shardwise.engine.island_tensors import set_name

Sets = Mapping[str, TensorReader]


class MeanReader(TensorReader):
    """The mean of the tensors that several `readers` have under one name; what is no floating-point
    number is the first one's."""

    def __init__(self, readers: Sequence[TensorReader]) -> None:
        self._readers = readers
        specs: dict[str, TensorSpec] = {}
        for reader in reversed(readers):
            specs |= reader.specs
        self.specs = specs

    def read(self, name: str, first: int, into: Tensor) -> None:
        held = [reader for reader in self._readers if name in reader.specs]
        dtype = dtype_of(self.specs[name].dtype)
        if not dtype.is_floating_point:
            held[0].read(name, first, into)
            return
        total = torch.zeros(into.numel(), dtype=torch.float64)
        part = torch.empty(into.numel(), dtype=dtype)
        for reader in held:
            reader.read(name, first, part)
            total += part
        into.copy_(total / len(held))


def count(fields: Mapping[str, Any]) -> int:
    """How many islands wrote the checkpoint with these `fields`."""
    return len(fields.get("islands") or [None])


def seen(
    sets: Sets, fields: Mapping[str, Any], peers: Collectives
) -> tuple[dict[str, TensorReader], dict[str, Any]]:
    """`sets` and `fields` as the island of this rank is to read them, out of those of all."""
    saved, islands = count(fields), fields.get("islands")
    if not islands:
        return dict(sets), dict(fields)
    if saved == peers.size:
        mine = {kind: [set_name(kind, peers.rank)] for kind in (OPTIMIZER, ISLAND)}
        found = dict(fields) | islands[peers.rank]
    else:
        mine = {kind: [set_name(kind, k) for k in range(saved)] for kind in (OPTIMIZER, ISLAND)}
        found = dict(fields) | {"weights": {}, "due": islands[0]["due"]}
        found["state"] = _most([each["state"] for each in islands])
        found["borders"] = sorted({name for each in islands for name in each["borders"]})
    view = {kind: held for kind, held in sets.items() if kind != OPTIMIZER}
    for kind, names in mine.items():
        if held := [sets[name] for name in names if name in sets]:
            view[kind] = held[0] if len(held) == 1 else MeanReader(held)
    return view, found


def residual_of(sets: Sets, fields: Mapping[str, Any], peers: Collectives) -> Sets:
    """What this island has lost on the wire of its gradients, in a checkpoint of as many; none in
    one of another number, whose islands had other ones."""
    name = set_name(ISLAND, peers.rank)
    saved = fields.get("behind", {}).get("islands")
    return {ISLAND: sets[name]} if saved == peers.size and name in sets else {}


def _most(several: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """By parameter what is one value, such as the number of its steps: the largest of those that
    islands have, since some may never have used a parameter that others have."""
    found: dict[str, dict[str, Any]] = {}
    for each in several:
        for name, values in each.items():
            mine = found.setdefault(name, {})
            for key, value in values.items():
                mine[key] = max(mine.get(key, value), value, key=_size)
    return found


def _size(value: Any) -> float:
    """How large an encoded value is; what is no number is as good as any."""
    number = json_values.decode(value)
    if isinstance(number, Tensor) and number.numel() == 1:
        number = number.item()
    return float(number) if isinstance(number, int | float) else 0.0
