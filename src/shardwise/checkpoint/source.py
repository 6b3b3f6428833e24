"""Opens the files of a load, checks them against the model, and locates each tensor's values."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import document, reader
from shardwise.checkpoint import tensor_names as names
from shardwise.checkpoint.atomic_folders import DOCUMENT, lacks_document
from shardwise.checkpoint.deepspeed.as_checkpoint import fields_of
from shardwise.checkpoint.deepspeed.as_checkpoint import verify as verify_save
from shardwise.checkpoint.deepspeed.folders import find
from shardwise.checkpoint.deepspeed.save import Save
from shardwise.checkpoint.extra_sets import ExtraSets, Sets, SetsToRead
from shardwise.checkpoint.format import dtype_of
from shardwise.checkpoint.reader import TensorReader
from shardwise.checkpoint.tensor_spans import AVERAGE, MASTER, MODEL, OPTIMIZER, state_name
from shardwise.checkpoint.tensors import EngineTensors
from shardwise.errors import BrokenCheckpoint, CheckpointMismatch


@dataclass(frozen=True)
class CheckpointSource:
    """Locates the values of a model's tensors in an opened checkpoint."""

    read: SetsToRead
    """Sets and fields that this rank reads."""
    names: Mapping[str, str]
    """Maps the model's tensor names to those in the files."""
    foreign: Save | None
    """The DeepSpeed checkpoint that is loaded, or None."""
    written: Sets
    """All sets of the checkpoint."""

    @property
    def sets(self) -> Sets:
        """Sets that this rank reads."""
        return self.read.sets

    @property
    def fields(self) -> Mapping[str, Any]:
        """Fields of checkpoint.json or of a DeepSpeed checkpoint; empty for other files."""
        return self.read.fields

    def has(self, kind: str, name: str) -> bool:
        """Return whether set `kind` contains tensor `name`."""
        return kind in self.sets and name in self.sets[kind].specs

    @property
    def averaged(self) -> Set[str]:
        """Names of the parameters that have a saved moving average."""
        return self.sets[AVERAGE].specs.keys() if AVERAGE in self.sets else set()

    def of_model(self, name: str) -> tuple[TensorReader, str]:
        """Return the reader for tensor `name` of the model, and the tensor's name there."""
        return self.read.own.get(name) or (self.sets[MODEL], self.names[name])

    def values(self, kind: str, name: str, dtype: torch.dtype) -> tuple[TensorReader, str] | None:
        """Return the reader with the best values for tensor `name`, and the tensor's name there.

        A master replaces its parameter if a wider dtype than the parameter's is wanted. It also
        replaces an average that was not saved. A parameter replaces a missing master.
        """
        # Averages and moments are saved under exactly this name, or not at all.
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
        # Narrower values would lose bits that the master still has, so prefer it if it helps.
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
    """Open `path`, a checkpoint folder or another library's files, for the model of
    `engine_tensors`.

    The files stay open until `stack` closes.

    Raises:
        CheckpointMismatch: Tensors have the wrong shape or, with `strict`, are missing or
            unexpected. The message has all names.
        BrokenCheckpoint: checkpoint.json is missing and more than the model is wanted.
    """
    fields: dict[str, Any] = {}
    save: Save | None = None
    # Such a folder looks like a Hugging Face model; loading it silently would lose all progress.
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
    elif (folder := find(path)) is not None:
        save = Save(folder)
        sets = {MODEL: save.model}
        if not model_only:
            optimizer_names = engine_tensors.optimizer_names
            groups = [
                [optimizer_names[parameter] for parameter in group["params"]]
                for optimizer in engine_tensors.spec.optimizers
                for group in optimizer.param_groups
            ]
            sets, fields = fields_of(save, engine_tensors.inventory.names, groups)
    else:
        sets = {MODEL: stack.enter_context(closing(reader.open_foreign(path)))}
    # Names may have the prefix of DistributedDataParallel or torch.compile.
    match = names.match(engine_tensors.inventory.names, sets[MODEL].specs)
    _check(path, engine_tensors, sets[MODEL], match, strict=strict)
    buffers = engine_tensors.inventory.buffers.keys()
    read = extra_sets.select_sets(sets, fields, buffers, model_only=model_only)
    return CheckpointSource(read, match.found, save, sets)


def _check(
    path: Path,
    engine_tensors: EngineTensors,
    tensors: TensorReader,
    match: names.Match,
    *,
    strict: bool,
) -> None:
    """Raise CheckpointMismatch, naming every tensor that does not match."""
    inventory = engine_tensors.inventory
    shapes = {name: spec.shape for name, spec in inventory.parameters.items()}
    shapes |= {name: tuple(value.shape) for name, value in inventory.buffers.items()}
    misshapen = [
        f"{name} (model {list(shapes[name])}, file {list(tensors.specs[saved_name].shape)})"
        for name, saved_name in match.found.items()
        if shapes[name] != tensors.specs[saved_name].shape
    ]
    faults = [("with another shape", misshapen)]
    # With strict=False a file may hold another model's other tensors, but shapes must still fit.
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
    """Verify the checksums of the part of a checkpoint that is assigned to `rank` of `size`.

    Whole tensors are assigned by size, largest first. Raises BrokenCheckpoint if one has changed.
    """
    if source.foreign is not None:
        verify_save(source.foreign, rank, size)
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
    # All bytes of all sets, not just those that this rank will use: some rank checks each byte
    # once. Each tensor, largest first, goes to the least loaded rank, so that all finish together.
    bytes_by_rank = [0] * size
    specs = [
        (kind, spec)
        for kind, tensors in sorted(source.written.items())
        for spec in tensors.specs.values()
    ]
    # Sorted with the name as a tie-break: all ranks must compute the same assignment.
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
