"""StepRecord is one micro-batch of a script as it was observed: operations, tensors, parameters.

It says nothing of ranks or placements: memory (`memory`) and time (`clock`) of a placement are
computed from it. It was observed on one rank, whole: no parameter sharded, no layer split.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.errors import LaunchError

VERSION = 4
"""Raised with every change of the file's form."""


@dataclass(frozen=True)
class Operation:
    """A call of an ATen operator, in the order of the program.

    `bytes` are those of all tensors that it reads and writes, views counted once; 0 for a view.
    `dtype` is that of its first result, as torch spells it ("bfloat16"). `unit` is an index into
    StepRecord.units, -1 outside of all; `phase` is "forward" or "backward". `line` is the user's,
    as "train.py:41"; that of the forward for what backward computes.
    """

    name: str
    flops: int
    bytes: int
    dtype: str
    unit: int
    phase: str
    line: str
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of the tensors that it reads, in order."""
    layer: int = 0
    """An index into StepRecord.layers: what runs between two layers goes with the one before."""


@dataclass(frozen=True)
class TensorLife:
    """Memory that an operation made: it is there from the start of operation `born` until after
    operation `died` (both indices into StepRecord.operations).

    `born` is -1 for what was there before the first operation (the batch). `saved` is True where
    forward made it and backward found it alive. `source` is the operator's name.
    """

    nbytes: int
    born: int
    died: int
    unit: int
    line: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    saved: bool
    kept: bool = False
    """Whether the script still had it when the step was over: until the next step makes it anew."""


@dataclass(frozen=True)
class ParameterRecord:
    """A parameter, in registration order.

    `group` is an index into StepRecord.groups, -1 for one that no optimizer trains. `arrived` is
    the operation after which its gradient was complete, -1 where it got none. `master` is the
    dtype in which it is updated.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    unit: int
    group: int
    arrived: int
    is_float: bool = True
    layer: int = 0

    @property
    def numel(self) -> int:
        """The number of its elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class GroupRecord:
    """A parameter group of an optimizer: how it updates, found as the engine finds it.

    `moments` are the names of the tensors that it keeps of each parameter. `whole` asks for whole
    tensors, `elementwise` and `separable` are as in `states.optimizer_kind`. `fused` says that its
    update makes no temporaries.
    """

    optimizer: str
    number: int
    index: int
    moments: tuple[str, ...]
    elementwise: bool
    separable: bool
    known: bool
    fused: bool


@dataclass(frozen=True)
class UnitUse:
    """A unit runs from operation `first` to before operation `end`, in `phase`."""

    unit: int
    phase: str
    first: int
    end: int


@dataclass(frozen=True)
class LayerRecord:
    """A layer, which one pipeline stage runs: the elements of its parameters, and whether it has
    one to train that no earlier layer has."""

    name: str
    size: int
    trains: bool


@dataclass(frozen=True)
class Assumption:
    """What had no value while it was observed, and what was taken in its place."""

    what: str
    line: str

    def __str__(self) -> str:
        return f"{self.what} {self.line}"


@dataclass(frozen=True)
class StepRecord:
    """Forward and backward of one micro-batch of `batch_size` samples, for one engine or several.

    `total_batch` is the Loader's total batch size, 0 where there is no Loader: then the number of
    samples per worker is the script's own. `accumulates`: the script's loop takes a step in several
    micro-batches, where a setting asks for that. `backward` is the index of the first operation of
    backward. `precision` and `activations` are the settings it was observed with.
    """

    operations: tuple[Operation, ...]
    tensors: tuple[TensorLife, ...]
    parameters: tuple[ParameterRecord, ...]
    groups: tuple[GroupRecord, ...]
    units: tuple[str, ...]
    uses: tuple[UnitUse, ...]
    batch_size: int
    total_batch: int
    backward: int
    precision: str
    activations: str
    accumulates: bool = False
    assumed: tuple[Assumption, ...] = ()
    buffer_bytes: int = 0
    """Buffers of the modules."""
    tensor: int = 1
    """What was observed is the part of the first of so many tensor-parallel ranks."""
    layers: tuple[LayerRecord, ...] = ()
    """What a pipeline can be cut between, in order."""
    no_pipeline: str = ""
    """Why the script has no pipeline; empty where it can have one."""

    @cached_property
    def parts(self) -> dict[range, StepRecord]:
        """What runs in some of its layers, as `stage_records.part_of` has found it."""
        return {}

    @property
    def flops(self) -> int:
        """Floating-point operations of the micro-batch, forward and backward."""
        return sum(each.flops for each in self.operations)

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps({"version": VERSION, **asdict(self)}))

    @classmethod
    def read(cls, path: Path) -> StepRecord:
        """Read what `write` wrote. Raises LaunchError for a file of another form."""
        content = json.loads(path.read_text())
        if content.pop("version", None) != VERSION:
            raise LaunchError(f"{path} was written by another version of shardwise: make it anew.")
        lists = {
            name: tuple(kind(**{k: _frozen(v) for k, v in each.items()}) for each in content[name])
            for name, kind in _KINDS.items()
        }
        return cls(**{**content, **lists, "units": tuple(content["units"])})


_KINDS: dict[str, type] = {
    "operations": Operation,
    "tensors": TensorLife,
    "parameters": ParameterRecord,
    "groups": GroupRecord,
    "uses": UnitUse,
    "assumed": Assumption,
    "layers": LayerRecord,
}


def _frozen(value: Any) -> Any:
    """Return a list of JSON as the tuple that it was."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
