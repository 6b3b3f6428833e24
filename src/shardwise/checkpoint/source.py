"""Opens the files to load, checks them against the model, and locates each tensor's values."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint import document, reader
from shardwise.checkpoint import tensor_names as names
from shardwise.checkpoint.atomic_folders import DOCUMENT, lacks_document
from shardwise.checkpoint.extra_sets import ExtraSets, Sets, SetsToRead
from shardwise.checkpoint.format import dtype_of
from shardwise.checkpoint.reader import TensorReader
from shardwise.checkpoint.tensor_spans import AVERAGE, MASTER, MODEL, OPTIMIZER, state_name
from shardwise.checkpoint.tensors import EngineTensors
from shardwise.errors import BrokenCheckpoint, CheckpointMismatch

if TYPE_CHECKING:
    from shardwise.checkpoint.formats.saved import Checkpoint


@dataclass(frozen=True)
class CheckpointSource:
    """An open checkpoint that locates the values of an engine's tensors."""

    read: SetsToRead
    """Tensor sets and fields that this rank reads."""
    names: Mapping[str, str]
    """Maps the model's tensor names to the names in the files."""
    foreign: Checkpoint | None
    """The checkpoint, if it is another library's, else None."""
    written: Sets
    """All tensor sets of the checkpoint, including those that other ranks read."""

    @property
    def sets(self) -> Sets:
        """The tensor sets that this rank reads, by name."""
        return self.read.sets

    @property
    def fields(self) -> Mapping[str, Any]:
        """The fields of checkpoint.json. Empty if a foreign checkpoint has no optimizers."""
        return self.read.fields

    def has(self, kind: str, name: str) -> bool:
        """Return whether set `kind` contains tensor `name`."""
        return kind in self.sets and name in self.sets[kind].specs

    @property
    def averaged(self) -> Set[str]:
        """The names of the parameters that have a saved moving average."""
        return self.sets[AVERAGE].specs.keys() if AVERAGE in self.sets else set()

    def of_model(self, name: str) -> tuple[TensorReader, str]:
        """Return the reader of the model's tensor `name`, and the tensor's name in that reader."""
        return self.read.own.get(name) or (self.sets[MODEL], self.names[name])

    def values(self, kind: str, name: str, dtype: torch.dtype) -> tuple[TensorReader, str] | None:
        """Return the reader with the best values for a tensor, and the tensor's name in it.

        A parameter is read from its fp32 master if `dtype` is wider than the parameter's saved
        dtype. A missing average or master is read from the parameter, or from the parameter's
        master if `dtype` is wider. Returns None if there are no suitable values.

        Args:
            kind: Kind of set to which the tensor belongs.
            name: Name of the tensor.
            dtype: Dtype of the memory to fill.
        """
        # Averages and moments have no other name, so use them if they exist.
        is_master = kind == OPTIMIZER and name.endswith(f".{MASTER}")
        if self.has(kind, name) and kind != MODEL and not is_master:
            return self.sets[kind], name
        if kind not in (MODEL, AVERAGE) and not is_master:
            return None
        parameter = name.removesuffix(f".{MASTER}") if is_master else name
        if parameter in self.read.own:
            return self.read.own[parameter]
        if parameter not in self.names:
            return None
        master = state_name(parameter, MASTER)
        # Prefer the master if `dtype` can hold more bits than the saved parameter has.
        held = self.sets[MODEL].specs[self.names[parameter]]
        if dtype.itemsize > dtype_of(held.dtype).itemsize and self.has(OPTIMIZER, master):
            return self.sets[OPTIMIZER], master
        return self.sets[MODEL], self.names[parameter]


def open_source(
    path: Path,
    engine_tensors: EngineTensors,
    extra_sets: ExtraSets,
    stack: ExitStack,
    *,
    strict: bool,
    model_only: bool,
) -> CheckpointSource:
    """Open a checkpoint folder or another library's files, and check that they match the model.

    Args:
        path: The folder or file.
        engine_tensors: Tensors of the engine that loads the checkpoint.
        extra_sets: Chooses the sets to read.
        stack: Closes the files when it exits.
        strict: Raise CheckpointMismatch if tensors are missing or unexpected.
        model_only: Load only the model.

    Raises:
        CheckpointMismatch: Tensors have the wrong shape or, if `strict`, are missing or unexpected.
            The message lists their names.
        BrokenCheckpoint: checkpoint.json is damaged, or it is missing and `model_only` is False.
    """
    fields: dict[str, Any] = {}
    foreign: Checkpoint | None = None
    # Such a folder looks like a Hugging Face model. Loading it as one would silently lose the
    # optimizers and the step count.
    if lacks_document(path) and not model_only:
        raise BrokenCheckpoint(
            f"{path} has the tensors of a checkpoint but no {DOCUMENT}, which holds everything "
            "else. Restore the file, or use another checkpoint. To load only the weights: "
            "engine.load(path, model_only=True)."
        )
    if os.path.lexists(path / DOCUMENT):
        fields = document.load(path)
        sets: dict[str, TensorReader] = {
            kind: stack.enter_context(closing(reader.open_set(path, files, fields["files"])))
            for kind, files in fields["sets"].items()
        }
        if MODEL not in sets:
            raise BrokenCheckpoint(
                f"{path / DOCUMENT} has no set of tensors {MODEL!r}. Use another checkpoint."
            )
    else:
        # Import here, because every rank imports this module at its start, and few need a format.
        from shardwise.checkpoint.formats.optimizers import fields_for
        from shardwise.checkpoint.formats.recognise import FOREIGN, open_checkpoint
        from shardwise.checkpoint.formats.rules import with_fused_experts

        foreign = stack.enter_context(open_checkpoint(path, FOREIGN))
        foreign.model = with_fused_experts(foreign, engine_tensors.inventory.names)
        sets = {MODEL: foreign.model}
        if not model_only:
            optimizer_names = engine_tensors.optimizer_names
            groups = [
                [
                    [optimizer_names[parameter] for parameter in group["params"]]
                    for group in optimizer.param_groups
                ]
                for optimizer in engine_tensors.spec.optimizers
            ]
            sets, fields = fields_for(foreign, engine_tensors.inventory.names, groups)
    # Names in the file may have a prefix from DistributedDataParallel or torch.compile.
    match = names.match(engine_tensors.inventory.names, sets[MODEL].specs)
    _check(path, engine_tensors, sets[MODEL], match, strict=strict)
    buffers = engine_tensors.inventory.buffers.keys()
    read = extra_sets.select_sets(sets, fields, buffers, model_only=model_only)
    return CheckpointSource(read, match.found, foreign, sets)


def _check(
    path: Path,
    engine_tensors: EngineTensors,
    tensors: TensorReader,
    match: names.Match,
    *,
    strict: bool,
) -> None:
    """Raise CheckpointMismatch if tensors do not match the model. The message lists them all."""
    inventory = engine_tensors.inventory
    shapes = {name: spec.shape for name, spec in inventory.parameters.items()}
    shapes |= {name: tuple(value.shape) for name, value in inventory.buffers.items()}
    misshapen = [
        f"{name} (model {list(shapes[name])}, file {list(tensors.specs[saved_name].shape)})"
        for name, saved_name in match.found.items()
        if shapes[name] != tensors.specs[saved_name].shape
    ]
    faults = [("with another shape", misshapen)]
    # With strict=False the file may lack tensors or have more, but shapes must still match.
    if strict:
        faults += [("missing in the file", match.missing), ("unexpected", match.unexpected)]
    lines = [f"{what}: {names.listed(fault_names)}" for what, fault_names in faults if fault_names]
    if lines:
        loosely = " To load what fits and keep the rest: strict=False." if not misshapen else ""
        raise CheckpointMismatch(
            f"{path} does not match this model. Tensors {'; '.join(lines)}. Build the model that "
            f"was saved.{loosely}"
        )


def verify(path: Path, source: CheckpointSource, rank: int, size: int) -> None:
    """Verify the checksums of the tensors that are assigned to `rank`, one of `size` ranks.

    Raises BrokenCheckpoint if a tensor is missing or has changed since the save.
    """
    if source.foreign is not None:
        # Stop at the first damaged file.
        for damage in source.foreign.damages(rank, size):
            raise BrokenCheckpoint(damage)
        return
    missing = [
        f"{name} of the set {kind}"
        for kind, sums in source.fields["checksums"].items()
        for name in sums
        if kind not in source.written or name not in source.written[kind].specs
    ]
    if missing:
        raise BrokenCheckpoint(
            f"{path} lacks tensors that were saved: {names.listed(missing)}. Use another "
            "checkpoint."
        )
    # The ranks together check every tensor of every set once, including tensors that no rank loads.
    # Assign the largest tensors first, each to the rank with the fewest bytes so far, so that all
    # ranks finish at about the same time.
    bytes_by_rank = [0] * size
    specs = [
        (kind, spec)
        for kind, tensors in sorted(source.written.items())
        for spec in tensors.specs.values()
    ]
    # Use the name as a tie-break, because all ranks must compute the same assignment.
    for kind, spec in sorted(specs, key=lambda entry: (-entry[1].nbytes, entry[1].name)):
        assigned_rank = bytes_by_rank.index(min(bytes_by_rank))
        bytes_by_rank[assigned_rank] += spec.nbytes
        written = source.fields["checksums"].get(kind, {}).get(spec.name)
        if assigned_rank == rank and source.written[kind].checksum(spec.name) != written:
            raise BrokenCheckpoint(
                f"{spec.name} of the set {kind} in {path} was changed after it was saved: its "
                f"CRC-32 is not {written}. Use another checkpoint. `shardwise checkpoint verify` "
                "shows details."
            )
