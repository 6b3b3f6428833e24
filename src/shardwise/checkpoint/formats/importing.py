"""Writes a checkpoint of any format as a Shardwise checkpoint, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import document, tensor_names
from shardwise.checkpoint.atomic_folders import DOCUMENT, Draft
from shardwise.checkpoint.checksum import ChecksumPart, combine
from shardwise.checkpoint.folder_lock import take
from shardwise.checkpoint.format import TensorFile, TensorSpec, dtype_of, index, index_name, lay_out
from shardwise.checkpoint.formats.optimizers import fields_alone
from shardwise.checkpoint.formats.rules import Rule
from shardwise.checkpoint.formats.saved import Checkpoint, Leaf, MappedReader, SetsAndFields
from shardwise.checkpoint.reader import TensorReader
from shardwise.checkpoint.writer import Writer, create
from shardwise.errors import BrokenCheckpoint, CheckpointError
from shardwise.layout.byte_ranges import Extent

CHUNK = 2**22
"""Maximum number of elements that are held in memory for a tensor that needs no change."""

SPLIT = 5 * 10**9
"""Maximum size in bytes of a tensor file, as in `engine.save`."""

Advance = Callable[[int], None]
"""Progress callback. Receives the number of bytes written since the previous call."""


@dataclass(frozen=True)
class Imported:
    """A checkpoint that `write` has written.

    Args:
        path: Folder of the checkpoint.
        tensors: Number of tensors.
        nbytes: Size of all files in bytes.
        notes: Sentences about contents that are missing or were not imported.
    """

    path: Path
    tensors: int
    nbytes: int
    notes: list[str]


def plain_prefixes(checkpoint: Checkpoint) -> list[Rule]:
    """Return rules that remove wrappers' prefixes from the checkpoint's tensor names.

    DistributedDataParallel, torch.compile, FSDP1 and recomputation add such prefixes.
    """
    plain = tensor_names.plain_names(list(checkpoint.model.specs))
    # One rule per name, because wrappers of single modules add prefixes inside names.
    return [Rule(f"{old}={new}", (old,), (new,)) for old, new in plain.items() if old != new]


@dataclass(frozen=True)
class Import:
    """The contents of a checkpoint that `write` writes.

    Args:
        checkpoint: The source.
        sets: Tensor sets by name.
        fields: Fields of checkpoint.json, except those about files.
    """

    checkpoint: Checkpoint
    sets: Mapping[str, TensorReader]
    fields: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for t in self.sets.values() for spec in t.specs.values())


def prepare(checkpoint: Checkpoint, *, model_only: bool = False) -> Import:
    """Return the contents that an import of `checkpoint` writes.

    Adds sentences about missing contents to the checkpoint's notes.

    Args:
        model_only: Leave out the optimizer state.

    Raises:
        CheckpointError: The source's optimizer state has no names, or a value cannot be stored.
    """
    return Import(checkpoint, *_sets_and_fields(checkpoint, model_only=model_only))


def _sets_and_fields(checkpoint: Checkpoint, *, model_only: bool) -> SetsAndFields:
    notes = checkpoint.notes
    if model_only:
        sets, fields = {"model": checkpoint.model}, dict[str, Any]()
    else:
        sets, fields = fields_alone(checkpoint)
    # A tied weight is stored once. Its other names are in the metadata.
    model = sets["model"]
    kept = {name: Leaf(model, name) for name in model.specs if name not in checkpoint.aliases}
    sets["model"] = MappedReader(kept)
    if not fields:
        fields = {
            "step": checkpoint.step or 0,
            "optimizers": [],
            "state": {},
            "borders": [],
            "tracked": {},
            "written_by": {"format": checkpoint.format, **checkpoint.facts},
        }
        why = "was not imported (--model-only)" if model_only else "is missing"
        notes.append(
            f"The optimizer state {why}. Load the result with engine.load(path, model_only=True)."
        )
        if checkpoint.step is None:
            notes.append("The source has no step count: the result has step 0.")
    fields["seed"] = checkpoint.seed
    if checkpoint.seed is None:
        notes.append("The source has no seed: the run that loads the result keeps its own.")
    if "scaling" not in fields:
        # An fp16 run would start with this scale anyway. Other runs do not use it.
        fields["scaling"] = {"scale": 65536.0, "good_steps": 0, "unit": None, "wide": False}
        notes.append("The source has no loss scale: an fp16 run starts with 65536.")
    return sets, fields


def write(job: Import, out: Path, advance: Advance = lambda _: None) -> Imported:
    """Write a checkpoint into the folder `out`, as `out`/step-N.

    Tensors are read and written one after the other, with checksums. If the process is killed,
    earlier checkpoints in `out` stay intact.

    Args:
        out: Folder that contains a run's checkpoints, for `engine.resume`.
        advance: Called after each write with the number of bytes written.

    Raises:
        CheckpointError: The disk fails.
        BrokenCheckpoint: The source is damaged.
        FolderInUse: A run is saving into `out`.
    """
    checkpoint, sets, fields = job.checkpoint, job.sets, job.fields
    # Check the source first, because nothing checks its own checksums later.
    for damage in checkpoint.damages(0, 1):
        raise BrokenCheckpoint(damage)
    plan = {
        kind: lay_out(
            kind,
            list(tensors.specs.values()),
            limit=SPLIT,
            aliases=checkpoint.aliases if kind == "model" else {},
        )
        for kind, tensors in sets.items()
    }
    files = [file for of_set in plan.values() for file in of_set]
    draft = Draft(out, fields["step"], sum(file.nbytes for file in files))
    try:
        claim = take(out)
    except OSError as error:
        raise CheckpointError(draft.describe_error(error)) from error
    try:
        draft.begin()
        create(draft.path, files)
        sums = _write_tensors(draft.path, plan, sets, advance)
        draft.finish(_documents(plan, sums, fields, checkpoint.config))
    except OSError as error:
        draft.discard()
        raise CheckpointError(draft.describe_error(error)) from error
    except BaseException:
        draft.discard()
        raise
    finally:
        claim.release()
    count = sum(len(tensors.specs) for tensors in sets.values())
    return Imported(draft.final, count, draft.nbytes, [*checkpoint.notes, *draft.warnings])


def chunks(tensors: TensorReader, spec: TensorSpec) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield a tensor in chunks: the index of the first element, and a 1-D tensor of elements."""
    for first in range(0, spec.numel, CHUNK):
        value = torch.empty(min(CHUNK, spec.numel - first), dtype=dtype_of(spec.dtype))
        tensors.read(spec.name, first, value)
        yield first, value


def _write_tensors(
    folder: Path,
    plan: Mapping[str, Sequence[TensorFile]],
    sets: Mapping[str, TensorReader],
    advance: Advance,
) -> dict[tuple[str, str], list[ChecksumPart]]:
    """Write all tensors into the files of `plan`. Return the checksums of each tensor's parts."""
    writer = Writer(folder, plan)
    try:
        for kind, tensors in sets.items():
            # Keep the order of the source, so that its files are read sequentially.
            for spec in tensors.specs.values():
                for first, value in chunks(tensors, spec):
                    data = value.view(torch.uint8).numpy().data
                    extent = Extent(spec.name, 0, len(data), first * value.itemsize)
                    writer.write(kind, [extent], data)
                    # The writer's thread reads `value`, so it must finish before the next one.
                    writer.settle()
                    advance(len(data))
        return writer.finish()
    finally:
        writer.close()


def _documents(
    plan: Mapping[str, Sequence[TensorFile]],
    sums: Mapping[tuple[str, str], Sequence[ChecksumPart]],
    fields: Mapping[str, Any],
    config: Mapping[str, bytes],
) -> dict[str, bytes]:
    """Return the contents of the small files by name, with checkpoint.json last."""
    checksums: dict[str, dict[str, str]] = {}
    small = dict(config)
    for kind, files in plan.items():
        for spec in (placed.spec for file in files for placed in file.tensors.values()):
            crc = combine(sums.get((kind, spec.name), ()), spec.nbytes)
            assert crc is not None, f"{spec.name} was written whole"
            checksums.setdefault(kind, {})[spec.name] = f"{crc:08x}"
        if len(files) > 1:
            small[index_name(kind)] = json.dumps(index(files), indent=1).encode() + b"\n"
    described = {
        "sets": {kind: [file.name for file in files] for kind, files in plan.items()},
        "checksums": checksums,
        "files": {name: document.crc_of(data) for name, data in small.items()}
        | {f.name: document.crc_of(f.header) for files in plan.values() for f in files},
    }
    return small | {DOCUMENT: document.dump(described | dict(fields))}
