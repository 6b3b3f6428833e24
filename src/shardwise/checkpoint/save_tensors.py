"""Plans a save, passes this rank's byte ranges to a writer, and builds the small files.

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
"""Checksums of the tensor parts that a rank has written, by set and tensor."""


@dataclass(frozen=True)
class SavePlan:
    """The planned contents of a checkpoint.

    Args:
        sets: Layout of the files of each set, identical on all ranks.
        reported: Description of the optimizer state on all ranks that shard it.
    """

    sets: dict[str, list[TensorFile]]
    reported: ReportedState
    state: dict[str, dict[str, Any]]
    """Scalar optimizer state as JSON, by parameter and key."""
    borders: list[str]
    """Names of the parameters at which optimizer state is cut into segments."""
    extra_fields: dict[str, Any]
    """Fields that the engine's ExtraSets adds."""
    failure: str | None
    """Error message if a value cannot be saved, else None."""

    @property
    def files(self) -> list[TensorFile]:
        return [file for files in self.sets.values() for file in files]

    @property
    def nbytes(self) -> int:
        """Total size of all files in bytes."""
        return sum(file.nbytes for file in self.files)


def plan(
    engine_tensors: EngineTensors, extra_sets: ExtraSets, scaling: Mapping[str, Any], limit: int
) -> SavePlan:
    """Plan a checkpoint's contents. Collective.

    Args:
        scaling: The field `scaling` of checkpoint.json.
        limit: Maximum size of a file in bytes.
    """
    spec, states, inventory = engine_tensors.spec, engine_tensors.states, engine_tensors.inventory
    gather_from_layers = engine_tensors.gather_from_layers
    reported = engine_tensors.trained.reported()
    # Ranks may disagree on the shape of a growing buffer. The rank that writes it decides.
    buffers: dict[str, TensorSpec] = {}
    own_specs = {name: spec_of(name, value) for name, value in engine_tensors.own_buffers.items()}
    # Exactly one rank writes each buffer, so all ranks build the same dict.
    for rank_specs in spec.world_group.gather_objects(own_specs):
        buffers |= rank_specs
    named = states.parameters.named
    numbers: dict[str, dict[str, Any]] = {}
    # A Blank stands for a tensor, which goes into a file. All other entries go into the JSON.
    singles = {
        named[number].name: {k: v for k, v in entries.items() if not isinstance(v, Blank)}
        for number, entries in sorted(reported.states.items())
    }
    singles |= {e.name: e.numbers for e in engine_tensors.frozen_states if e.numbers or e.tensors}
    for part in gather_from_layers(singles):
        numbers |= part
    # Segments were cut at parameters without a gradient. A load must cut at the same parameters,
    # because optimizers store one step count per segment.
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
    # Sets and names must be in the same order on all ranks, because each rank computes the offsets
    # in the files itself.
    sets = {
        kind: lay_out(
            kind, set_specs, limit=limit, aliases=inventory.aliases if kind == MODEL else {}
        )
        for kind, set_specs in specs.items()
        if set_specs
    }
    # Do not raise here if a value cannot be encoded, because other ranks wait in the collective
    # below. The caller raises `failure` on all ranks.
    state, failure = optimizer_fields.encode_state(numbers)
    extra = extra_sets.fields(
        {"state": state, "borders": borders, "scaling": scaling}, gather_from_layers
    )
    return SavePlan(sets, reported, state, borders, extra, failure)


def _specs_of_groups(
    engine_tensors: EngineTensors, reported: ReportedState
) -> dict[str, list[TensorSpec]]:
    """Return the specs of the tensors that groups of ranks hold separately, by set. Collective."""
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
        # Gather buffers in the whole group, because only the ranks of one replica write them.
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
    """Pass all tensor ranges that this rank writes to `sink`.

    Collective if a tensor's memory order differs from its element order.
    """
    # Sets that are empty on all ranks are not in the plan, so skip their tensors.
    known = {(kind, n) for kind, files in save_plan.sets.items() for f in files for n in f.tensors}
    # If a tensor is in channels_last order, no rank's part is contiguous in the file. Such tensors
    # are gathered and written in full, after all others, which are written without a copy.
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
    """Pass this rank's share of a span to `sink`.

    Args:
        held: The span.
        kind: Name of the set that contains the span's tensors.
        wanted: Tensors to write. Other tensors in the span are skipped.
    """
    storage = held.storage
    wanted_extents = [part for part in held.extents if (kind, part.tensor) in wanted]
    if not wanted_extents:
        return
    # Ranks that hold the same elements write equal shares, to use the bandwidth of all hosts.
    first, end = share(storage.numel, held.copy, held.copies)
    # For each span of the storage: its index, the part [low, high) to write, and its start.
    pieces = [
        (number, max(a, first) - a, min(b, end) - a, a)
        for number, (a, b) in enumerate(storage.spans)
        if max(a, first) < min(b, end)
    ]
    for place, (number, low, high, start) in enumerate(pieces):
        if place + 1 < len(pieces):
            # On a slow tier, read the next span while this one is being written.
            storage.read_ahead(pieces[place + 1][0])
        taken = storage.take(number)[low:high].detach()
        for offset, near in window.read(taken, sink.settle):
            begin = start + low + offset
            parts = clipped(wanted_extents, begin, begin + near.numel())
            # View the elements as bytes, because numpy has no bf16. An empty tensor has no such
            # view.
            memory = near.view(torch.uint8).numpy().data if near.numel() else memoryview(b"")
            sink.write(kind, byte_ranges(parts, storage.dtype.itemsize, CHUNK), memory)
        # `put` lets the storage reuse this memory, so the sink must have finished reading it.
        sink.settle()
        storage.put(number, changed=False)


def documents(
    save_plan: SavePlan,
    sums_by_rank: Iterable[Sums],
    fields: Mapping[str, Any],
    small_files: Mapping[str, bytes],
) -> dict[str, bytes]:
    """Return the contents of a checkpoint's small files by name, with checkpoint.json last.

    Args:
        sums_by_rank: Each rank's checksums of the parts that it has written.
        fields: The fields of checkpoint.json, except those that describe files.
        small_files: Contents of additional small files, by name.
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
    # Headers of tensor files have checksums too, because they determine where each tensor starts.
    file_sums = {name: document.crc_of(data) for name, data in small.items()}
    file_sums |= {file.name: document.crc_of(file.header) for file in save_plan.files}
    tensors = {"sets": sets, "checksums": checksums, "files": file_sums}
    # This file must be the last, because a folder that contains it counts as a checkpoint.
    return small | {DOCUMENT: document.dump(tensors | dict(fields))}
