"""StepRecord: one observed micro-batch of a script, with its operations, tensors and parameters.

A record is independent of ranks and placements: it is observed on a single rank without sharded
parameters or split layers. memory.py and clock.py predict the memory and time of a placement from
it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.errors import LaunchError

VERSION = 7
"""Version of the file format. Increase it with every change of the format."""


@dataclass(frozen=True)
class Operation:
    """One call of an ATen operator.

    Attributes:
        name: Name of the operator.
        flops: Number of floating-point operations.
        bytes: Total bytes of the tensors that it reads and writes (0 for a view).
        dtype: Dtype of its first result, as torch spells it ("bfloat16").
        unit: Index into StepRecord.units, or -1 outside units.
        phase: "forward" or "backward".
        line: Line of user code that made the call, such as "train.py:41". An operator of the
            backward pass has the line of its forward operator.
    """

    name: str
    flops: int
    bytes: int
    dtype: str
    unit: int
    phase: str
    line: str
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the input tensors, in order."""
    layer: int = 0
    """Index into StepRecord.layers. An operator between two layers belongs to the earlier one."""
    unvectorised: bool = False
    """True if it copies or computes element by element, and its tensors differ in shape, strides or
    dtype. CUDA's kernel then reads and writes single elements instead of vectors."""


@dataclass(frozen=True)
class TensorLife:
    """The lifetime of a tensor's memory.

    Attributes:
        nbytes: Size in bytes.
        born: Index into StepRecord.operations of the operation that allocates it, or -1 for the
            batch, which exists before the first operation.
        died: Index of the operation after which it is freed.
        unit: Index into StepRecord.units, or -1 outside units.
        line: Line of user code that created it.
        source: Name of the operator that created it.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor, as torch spells it.
        saved: True if the forward pass created it and it is still alive in the backward pass.
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
    """True if the script still holds it after the step, until the next step replaces it."""


@dataclass(frozen=True)
class ParameterRecord:
    """A parameter of the model.

    Attributes:
        name: Name of the parameter.
        shape: Shape of the full parameter.
        dtype: Dtype, as torch spells it.
        itemsize: Bytes per element.
        unit: Index into StepRecord.units, or -1 outside units.
        group: Index into StepRecord.groups, or -1 if no optimizer trains it.
        arrived: Index of the operation that completed its gradient, or -1 if it has none.
        is_float: True if its dtype is floating-point or complex, so that it can be sharded.
        layer: Index into StepRecord.layers.
        experts: Number of experts in its layer, or 0 if it does not belong to an expert.
        expert: Index of its expert, or -1 if it holds all experts along its first dim.
        quantised: True if it is frozen and stored in 4 bits.
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
    experts: int = 0
    expert: int = -1
    quantised: bool = False

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    def held(self, ranks: int) -> int:
        """Return how many elements the last of the `ranks` ranks that share the experts holds.

        If the ranks have different numbers of experts, the last rank has the most.
        """
        if not self.experts or ranks == 1:
            return self.numel
        first = self.experts * (ranks - 1) // ranks  # as in parallel/expert/split_experts.py
        if self.expert < 0:
            return self.numel // self.experts * (self.experts - first)
        return self.numel if self.expert >= first else 0

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class GroupRecord:
    """A parameter group of an optimizer, and the kind of its update.

    `moments` are the names of the state tensors that each parameter has. `elementwise` and
    `separable` are defined in `states.optimizer_kind`. `fused` is True if the update allocates no
    temporaries.
    """

    optimizer: str
    number: int
    index: int
    moments: tuple[str, ...]
    elementwise: bool
    separable: bool
    known: bool
    fused: bool
    quantised: bool = False
    """True if the moments are stored in 8 bits."""
    rounded: bool = False
    """True if bf16 parameters have no fp32 master."""


@dataclass(frozen=True)
class UnitUse:
    """One pass through a unit in `phase`, from operation `first` to `end` (exclusive)."""

    unit: int
    phase: str
    first: int
    end: int


@dataclass(frozen=True)
class RoutedTokens:
    """The tokens that a layer sends to its experts in a forward pass.

    Attributes:
        nbytes: Size of the token copies in bytes.
        unit: Index into StepRecord.units, or -1 outside units.
        experts: Number of experts of the layer.
        divisible: True if different ranks can hold its experts.
    """

    nbytes: int
    unit: int
    experts: int
    divisible: bool


@dataclass(frozen=True)
class SequenceExchange:
    """An exchange between context-parallel ranks, which hold parts of the same sequences.

    Attributes:
        nbytes: Number of bytes that a rank sends, including the part that it sends to itself.
        unit: Index into StepRecord.units, or -1 outside units.
        phase: "forward" or "backward".
    """

    nbytes: int
    unit: int
    phase: str


@dataclass(frozen=True)
class LayerRecord:
    """A layer, which is assigned to one pipeline stage.

    `size` is its parameter count, in elements. `trains` is True if it has a trainable parameter
    that is not shared with an earlier layer.
    """

    name: str
    size: int
    trains: bool


@dataclass(frozen=True)
class Assumption:
    """A note about a value that was not available during the observation, and its replacement."""

    what: str
    line: str

    def __str__(self) -> str:
        return f"{self.what} {self.line}"


@dataclass(frozen=True)
class StepRecord:
    """The forward and backward pass of one micro-batch, through one or several engines.

    Attributes:
        operations: Operator calls in program order.
        tensors: Lifetimes of all tensors, in order of creation.
        parameters: Parameters in registration order.
        groups: Parameter groups of the optimizers.
        units: Names of the units.
        uses: Passes through units, in program order.
        batch_size: Number of samples in the micro-batch.
        total_batch: The Loader's total batch size, or 0 without a Loader. In that case the script
            itself decides how many samples each worker processes.
        backward: Index of the first operation of the backward pass.
        precision: The `--precision` of the observation.
        activations: The `--activations` of the observation.
        accumulates: True if the training loop can split a step into several micro-batches.
        assumed: Values that were unavailable, and their replacements.
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
    """Total size of the modules' buffers in bytes."""
    tensor: int = 1
    """Number of tensor-parallel ranks. The record contains the first rank's part."""
    layers: tuple[LayerRecord, ...] = ()
    """The layers between which a pipeline can be split, in order."""
    no_pipeline: str = ""
    """Reason why the model cannot be split into pipeline stages, or "" if it can."""
    routed: tuple[RoutedTokens, ...] = ()
    """The tokens of each pass through a layer with experts."""
    context: int = 1
    """Number of context-parallel ranks. The record contains the first rank's part."""
    exchanged: tuple[SequenceExchange, ...] = ()
    """The exchanges between context-parallel ranks, in program order."""

    @cached_property
    def parts(self) -> dict[range, StepRecord]:
        """Cache of `stage_records.part_of`: the part of the record for each range of layers."""
        # This is not a field, because it must be neither compared nor written to the file. A cached
        # property works even though the class is frozen.
        return {}

    @property
    def flops(self) -> int:
        """Total floating-point operations of the forward and backward pass."""
        return sum(each.flops for each in self.operations)

    @property
    def attends(self) -> bool:
        """Whether the step calls `scaled_dot_product_attention`, which `--context` supports."""
        return any("scaled_dot_product" in each.name for each in self.operations)

    @property
    def sent_bytes(self) -> int:
        """Bytes that a context-parallel rank sends to the others for this micro-batch."""
        return sum(each.nbytes for each in self.exchanged) * (self.context - 1) // self.context

    def write(self, path: Path) -> None:
        """Write the record to `path` as JSON."""
        path.write_text(json.dumps({"version": VERSION, **asdict(self)}))

    @classmethod
    def read(cls, path: Path) -> StepRecord:
        """Read a file written by `write`. Raises LaunchError if its version differs."""
        content = json.loads(path.read_text())
        if content.pop("version", None) != VERSION:
            raise LaunchError(
                f"{path} was written by another version of shardwise: observe the script again."
            )
        # JSON has neither tuples nor dataclasses, so rebuild them.
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
    "routed": RoutedTokens,
    "exchanged": SequenceExchange,
}


def _frozen(value: Any) -> Any:
    """Convert JSON lists back to tuples, recursively."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
