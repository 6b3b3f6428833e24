"""CheckpointSource finds the values of a model's tensors in an opened checkpoint, or in files of
another library."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.checkpoint.deepspeed.save import Save
from shardwise.checkpoint.format import dtype_of
from shardwise.checkpoint.reader import TensorReader
from shardwise.islands.checkpoint_tensors import OWN
from shardwise.states import tensor_spans
from shardwise.states.tensor_spans import AVERAGE, ISLAND, MODEL, OPTIMIZER, OUTER


@dataclass(frozen=True)
class CheckpointSource:
    """Where the values of a model's tensors are: by set its files, and by the model's names those
    in the file. `fields` are what stands beside them, where it is a checkpoint of ours, or one of
    DeepSpeed's with an optimizer."""

    sets: Mapping[str, TensorReader]
    names: Mapping[str, str]
    fields: Mapping[str, Any] = field(default_factory=dict)
    foreign: Save | None = None
    """The save of DeepSpeed that it is, if it is one."""
    written: Mapping[str, TensorReader] = field(default_factory=dict)
    """By set its files, as they were written; `sets` are those that an island reads."""
    goes_on: bool = False
    """Whether islands go on from what each had for itself."""
    takes_own: bool = False
    """Whether weights are those that islands have trained, rather than what they last had in
    common: where there are no islands any more."""

    def has(self, kind: str, name: str) -> bool:
        """Whether tensor `name` of set `kind` is there."""
        return kind in self.sets and name in self.sets[kind].specs

    @property
    def averaged(self) -> Set[str]:
        """The names of what has a moving average."""
        return self.sets[AVERAGE].specs.keys() if AVERAGE in self.sets else set()

    def of_model(self, name: str, *, is_buffer: bool) -> tuple[TensorReader, str]:
        """The files that have tensor `name` of the model, as this island goes on with it, and its
        name there. A parameter that is not trained is what islands have in common."""
        own = tensor_spans.state_name(name, OWN)
        if (self.goes_on if is_buffer else self.takes_own) and self.has(ISLAND, own):
            return self.sets[ISLAND], own
        return self.sets[MODEL], self.names[name]

    def values(self, kind: str, name: str, dtype: torch.dtype) -> tuple[TensorReader, str] | None:
        """The files with the best values for tensor `name`, and its name there.

        A master is better than the parameter made of it where the wider dtype is wanted, and
        stands in for an average that was not kept; a parameter stands in for its master.
        """
        if kind == OPTIMIZER and not name.endswith(f".{tensor_spans.MASTER}"):
            return (self.sets[kind], name) if self.has(kind, name) else None
        if kind == AVERAGE and self.has(kind, name):
            return self.sets[kind], name
        if kind in (ISLAND, OUTER):
            return (self.sets[kind], name) if self.has(kind, name) else None
        plain_name = name.removesuffix(f".{tensor_spans.MASTER}") if kind == OPTIMIZER else name
        own = tensor_spans.state_name(plain_name, OWN)
        if self.takes_own and self.has(ISLAND, own):
            return self.sets[ISLAND], own
        master = tensor_spans.state_name(plain_name, tensor_spans.MASTER)
        if plain_name not in self.names:
            return None
        held = self.sets[MODEL].specs[self.names[plain_name]]
        wide = dtype.itemsize > dtype_of(held.dtype).itemsize
        if wide and self.has(OPTIMIZER, master):
            return self.sets[OPTIMIZER], master
        return self.sets[MODEL], self.names[plain_name]
