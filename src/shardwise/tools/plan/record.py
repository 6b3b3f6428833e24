"""StepRecord is one observed micro-batch of a script: operations, tensors, parameters.

It contains no ranks or placements. `memory` and `clock` compute the memory and time of a placement
from it. It was observed on one rank, with no parameter sharded and no layer split.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.errors import LaunchError

VERSION = 4
"""Increase this with every change of the file format."""


@dataclass(frozen=True)
class Operation:
    """A call of an ATen operator, in the order of the program.

    `flops` are its floating-point operations, `bytes` the bytes of all tensors that it reads and
    writes (0 for a view). `dtype` is the dtype of its first result, as torch spells it
    ("bfloat16"). `unit` is an index into StepRecord.units, or -1 outside of all units. `phase` is
    "forward" or "backward". `line` is the user's line, such as "train.py:41"; an operator of
    backward has the line of its forward.
    """

    name: str
    flops: int
    bytes: int
    dtype: str
    unit: int
    phase: str
    line: str
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the tensors that it reads, in order."""
    layer: int = 0
    """An index into StepRecord.layers. An operator between two layers belongs to the one before."""


@dataclass(frozen=True)
class TensorLife:
    """Memory that an operation made.

    It is alive from the start of operation `born` to the end of operation `died`; both are indices
    into StepRecord.operations. `born` is -1 for the batch, which exists before the first operation.
    `saved`: forward made it, and it is still alive in backward. `source` is the operator's name.
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
    """Whether the script still holds it after the step, until the next step makes a new one."""


@dataclass(frozen=True)
class ParameterRecord:
    """A parameter, in registration order.

    `group` is an index into StepRecord.groups, or -1 if no optimizer trains it. `arrived` is the
    operation after which its gradient was complete, or -1 if it got no gradient. `itemsize` is
    bytes per element. `is_float`: its dtype is floating-point or complex, so it can be sharded.
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
        """The number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class GroupRecord:
    """A parameter group of an optimizer, and the kind of its update.

    `moments` are the names of the state tensors of each parameter. `elementwise` and `separable`
    are defined in `states.optimizer_kind`. `fused`: the update makes no temporaries.
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
    """One run of a unit in `phase`, from operation `first` up to, but not including, `end`."""

    unit: int
    phase: str
    first: int
    end: int


@dataclass(frozen=True)
class LayerRecord:
    """A layer, which belongs to one pipeline stage.

    `size` is the number of elements of its parameters. `trains`: it has a trainable parameter that
    no earlier layer has.
    """

    name: str
    size: int
    trains: bool


@dataclass(frozen=True)
class Assumption:
    """A value that did not exist while the step was observed, and its replacement."""

    what: str
    line: str

    def __str__(self) -> str:
        return f"{self.what} {self.line}"


@dataclass(frozen=True)
class StepRecord:
    """Forward and backward of one micro-batch of `batch_size` samples, for one engine or several.

    `total_batch` is the Loader's total batch size. It is 0 without a Loader: then the script itself
    decides the number of samples per worker. `accumulates`: the loop can take a step in several
    micro-batches. `backward` is the index of the first operation of backward. `precision` and
    `activations` are the settings of the observation.
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
    """Bytes of the modules' buffers."""
    tensor: int = 1
    """The number of tensor-parallel ranks. The record is of the first one's part."""
    layers: tuple[LayerRecord, ...] = ()
    """The layers between which a pipeline can be split, in order."""
    no_pipeline: str = ""
    """Why the script has no pipeline, or empty if it can have one."""

    @cached_property
    def parts(self) -> dict[range, StepRecord]:
        """The parts of the record by range of layers, as cached by `stage_records.part_of`."""
        # Not a field: the cache is neither compared nor written. A cached property may be mutable
        # although the class is frozen.
        return {}

    @property
    def flops(self) -> int:
        """Floating-point operations of the micro-batch, forward and backward."""
        return sum(each.flops for each in self.operations)

    def write(self, path: Path) -> None:
        """Write the record as JSON."""
        path.write_text(json.dumps({"version": VERSION, **asdict(self)}))

    @classmethod
    def read(cls, path: Path) -> StepRecord:
        """Read what `write` wrote. Raises LaunchError if the version differs."""
        content = json.loads(path.read_text())
        if content.pop("version", None) != VERSION:
            raise LaunchError(
                f"{path} was written by another version of shardwise: observe the script again."
            )
        # JSON has neither tuples nor dataclasses.
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
    """Convert the lists of JSON back to tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
