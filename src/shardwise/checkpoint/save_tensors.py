"""Plan of a save, this rank's byte ranges, and the documents next to the tensors.

plan ─▶ lend: spans ─▶ extents ─▶ byte ranges ─▶ a writer or a copy ─▶ documents with checksums
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from shardwise.checkpoint import document, optimizer_fields
from shardwise.checkpoint.atomic_folders import DOCUMENT
from shardwise.checkpoint.checksum import ChecksumPart, combine
from shardwise.checkpoint.extra_sets import ExtraSets
from shardwise.checkpoint.format import TensorFile, TensorSpec, index, index_name, lay_out
from shardwise.checkpoint.tensor_spans import (
    ATTRIBUTES,
    AVERAGE,
    GROUP,
    MODEL,
    OPTIMIZER,
    ReportedState,
    StoredTensors,
)
from shardwise.checkpoint.tensors import (
    EngineTensors,
    average_specs,
    optimizer_specs,
    spec_of,
)
from shardwise.checkpoint.writer import CHUNK, TensorKey, TensorSink
from shardwise.layout.byte_ranges import byte_ranges, clipped, share
from shardwise.states.optimizer.existing_optimizer_state import Blank
from shardwise.tiers.host_window import HostWindow

T = TypeVar("T")

Sums = Mapping[TensorKey, Sequence[ChecksumPart]]
"""Checksums of the parts that a rank has written, by set and tensor."""


@dataclass(frozen=True)
class SavePlan:
    """Contents of a checkpoint before it is written; the same on all ranks."""

    sets: dict[str, list[TensorFile]]
    reported: ReportedState
    state: dict[str, dict[str, Any]]
    """State that is a single value, as JSON, by parameter and key."""
    borders: list[str]
    """Parameters at whose borders segments of optimizer state were cut."""
    extra_fields: dict[str, Any]
    """Fields that an ExtraSets adds."""
    failure: str | None
    """Why a value cannot be saved, or None."""

    @property
    def files(self) -> list[TensorFile]:
        """All files of all sets."""
        return [file for files in self.sets.values() for file in files]

    @property
    def nbytes(self) -> int:
        """Total size of all files in bytes."""
        return sum(file.nbytes for file in self.files)


def plan(
    engine_tensors: EngineTensors, extra_sets: ExtraSets, scaling: Mapping[str, Any], limit: int
) -> SavePlan:
    """Plan the files, of at most `limit` bytes each. Collective."""
    spec, states, inventory = engine_tensors.spec, engine_tensors.states, engine_tensors.inventory
    gather_from_layers = engine_tensors.gather_from_layers
    reported = engine_tensors.trained.reported()
    # Ranks may disagree on the shape of a buffer that grows: the rank that writes it decides.
    buffers: dict[str, TensorSpec] = {}
    own_specs = {name: spec_of(name, value) for name, value in engine_tensors.own_buffers.items()}
    # All ranks get the same dict: a buffer is written by exactly one rank.
    for rank_specs in spec.world_group.gather_objects(own_specs):
        buffers |= rank_specs
    named = states.parameters.named
    numbers: dict[str, dict[str, Any]] = {}
    # Entries with a Blank are tensors and go into files; the rest is small and goes into JSON.
    singles = {
        named[number].name: {k: v for k, v in entries.items() if not isinstance(v, Blank)}
        for number, entries in sorted(reported.states.items())
    }
    singles |= {e.name: e.numbers for e in engine_tensors.frozen_states if e.numbers or e.tensors}
    for part in gather_from_layers(singles):
        numbers |= part
    # A segment is cut at a parameter without a gradient. A load must make the same cuts, because
    # optimizers keep one step count per segment.
    borders = _concatenate(
        gather_from_layers([named[number].name for number in sorted(reported.borders)])
    )
    specs = {
        MODEL: [
            inventory.parameters[name] if name in inventory.parameters else buffers[name]
            for name in inventory.names
        ],
        AVERAGE: _concatenate(gather_from_layers(average_specs(states))),
        ATTRIBUTES: engine_tensors.attribute_specs,
    } | _specs_of_groups(engine_tensors, reported)
    # The order of these sets and of the names in them must be the same on all ranks, because each
    # rank computes the offsets of the files for itself.
    sets = {
        kind: lay_out(
            kind, set_specs, limit=limit, aliases=inventory.aliases if kind == MODEL else {}
        )
        for kind, set_specs in specs.items()
        if set_specs
    }
    # A value that no file can hold is an error on all ranks, but only after the next collective.
    state, failure = optimizer_fields.encode_state(numbers)
    extra = extra_sets.fields(
        {"state": state, "borders": borders, "scaling": scaling}, gather_from_layers
    )
    return SavePlan(sets, reported, state, borders, extra, failure)


def _specs_of_groups(
    engine_tensors: EngineTensors, reported: ReportedState
) -> dict[str, list[TensorSpec]]:
    """Return, by set, the tensors that differ between groups of ranks. Collective."""
    spec, extra = engine_tensors.spec, engine_tensors.extra
    own_specs = {OPTIMIZER: optimizer_specs(engine_tensors, reported)}
    if extra is not None:
        own_specs |= extra.specs()
    specs_by_layer = engine_tensors.gather_from_layers(own_specs)
    specs_by_kind = {
        kind: _concatenate(layer_specs[kind] for layer_specs in specs_by_layer)
        for kind in own_specs
    }
    if extra is not None:
        # Not across the layers: the ranks of one replica write the buffers of all.
        buffers = [spec_of(name, value) for name, value in engine_tensors.extra_buffers.items()]
        specs_by_kind[GROUP] += _concatenate(spec.step_group.gather_objects(buffers))
    return {
        engine_tensors.set_of(kind, group): specs
        for group, group_specs in enumerate(spec.peers.gather_objects(specs_by_kind))
        for kind, specs in group_specs.items()
    }


def _concatenate(lists: Iterable[Iterable[T]]) -> list[T]:
    return list(itertools.chain.from_iterable(lists))


def lend(engine_tensors: EngineTensors, save_plan: SavePlan, sink: TensorSink) -> None:
    """Pass to `sink` everything that this rank writes. Collective if memory is out of order."""
    # An empty optimizer state or a set that no rank has is not in the plan: skip its tensors.
    known = {(kind, n) for kind, files in save_plan.sets.items() for f in files for n in f.tensors}
    # A tensor in channels_last order has no contiguous range of the file on any rank. Such
    # tensors are assembled and written whole, after all others, which are written in place.
    out_of_order = engine_tensors.out_of_order(save_plan.reported)
    out_of_order = {(engine_tensors.set_of(kind), name) for kind, name in out_of_order}
    window = HostWindow()
    for held in [*engine_tensors.trained, *engine_tensors.beside()]:
        _lend_span(held, engine_tensors.set_of(held.kind), known - out_of_order, sink, window)
    if out_of_order:
        for held in engine_tensors.reordered(save_plan.reported):
            _lend_span(held, engine_tensors.set_of(held.kind), known, sink, window)


def _lend_span(
    held: StoredTensors,
    kind: str,
    wanted: Set[TensorKey],
    sink: TensorSink,
    window: HostWindow,
) -> None:
    """Pass to `sink` this rank's share of the `wanted` tensors of a span in the set `kind`."""
    storage = held.storage
    wanted_extents = [part for part in held.extents if (kind, part.tensor) in wanted]
    if not wanted_extents:
        return
    # Ranks that hold the same elements write equal shares, so that all disks and links are used.
    first, end = share(storage.numel, held.copy, held.copies)
    # Per span of the storage: its number, the part [low, high) of it to write, and its start.
    pieces = [
        (number, max(a, first) - a, min(b, end) - a, a)
        for number, (a, b) in enumerate(storage.spans)
        if max(a, first) < min(b, end)
    ]
    for place, (number, low, high, start) in enumerate(pieces):
        if place + 1 < len(pieces):
            # On a slow tier, the next span is read while this one is written.
            storage.read_ahead(pieces[place + 1][0])
        taken = storage.take(number)[low:high].detach()
        for offset, near in window.read(taken, sink.settle):
            begin = start + low + offset
            parts = clipped(wanted_extents, begin, begin + near.numel())
            # As bytes, because numpy has no bf16. A tensor without elements cannot be viewed so.
            memory = near.view(torch.uint8).numpy().data if near.numel() else memoryview(b"")
            sink.write(kind, byte_ranges(parts, storage.dtype.itemsize, CHUNK), memory)
        # The storage may reuse this memory, so the sink must have finished reading it.
        sink.settle()
        storage.put(number, changed=False)


def documents(
    save_plan: SavePlan,
    sums_by_rank: Iterable[Sums],
    fields: Mapping[str, Any],
    small_files: Mapping[str, bytes],
) -> dict[str, bytes]:
    """Return the small files of a checkpoint by name, checkpoint.json last.

    Args:
        sums_by_rank: The checksums of the parts that each rank has written.
        fields: The fields of checkpoint.json, except those about files.
        small_files: Additional small files.
    """
    parts: dict[TensorKey, list[ChecksumPart]] = {}
    for sums in sums_by_rank:
        for tensor, tensor_parts in sums.items():
            parts.setdefault(tensor, []).extend(tensor_parts)
    checksums: dict[str, dict[str, str]] = {kind: {} for kind in save_plan.sets}
    for kind, files in save_plan.sets.items():
        for placed in (placed for file in files for placed in file.tensors.values()):
            name = placed.spec.name
            crc = combine(parts.get((kind, name), ()), placed.spec.nbytes)
            assert crc is not None, (
                f"{name} was not written whole: {sorted(parts.get((kind, name), ()))}"
            )
            checksums[kind][name] = f"{crc:08x}"
    small = dict(small_files)
    for kind, files in save_plan.sets.items():
        if len(files) > 1:
            small[index_name(kind)] = json.dumps(index(files), indent=1).encode() + b"\n"
    sets = {kind: [file.name for file in files] for kind, files in save_plan.sets.items()}
    # The header of a tensor file has a checksum too: it says where each tensor starts.
    file_sums = {name: document.crc_of(data) for name, data in small.items()}
    file_sums |= {file.name: document.crc_of(file.header) for file in save_plan.files}
    tensors = {"sets": sets, "checksums": checksums, "files": file_sums}
    # Last: a folder counts as a checkpoint once this file is in it.
    return small | {DOCUMENT: document.dump(tensors | dict(fields))}
