"""Plans and writes the tensors of a checkpoint: each rank its own byte ranges."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise.checkpoint import document, json_values
from shardwise.checkpoint.atomic_folders import DOCUMENT, Draft
from shardwise.checkpoint.checksum import ChecksumPart, joined
from shardwise.checkpoint.format import TensorFile, TensorSpec, index, index_name, lay_out
from shardwise.checkpoint.writer import CHUNK, TensorSink, Writer, create
from shardwise.comm import Collectives
from shardwise.engine import consistency
from shardwise.engine.checkpoint_tensors import (
    EngineTensors,
    average_specs,
    optimizer_specs,
    spec_of,
)
from shardwise.errors import CheckpointError, CheckpointNotWritten
from shardwise.islands import checkpoint_tensors
from shardwise.layout.byte_ranges import byte_ranges, clipped, share
from shardwise.states.optimizer.existing_optimizer_state import Blank
from shardwise.states.tensor_spans import (
    ATTRIBUTES,
    AVERAGE,
    ISLAND,
    MODEL,
    OPTIMIZER,
    ReportedState,
    TensorSpan,
)
from shardwise.tiers.host_window import HostWindow

T = TypeVar("T")

Sums = Mapping[tuple[str, str], Sequence[ChecksumPart]]
"""By set and tensor, the checksums of the parts that a rank has written."""


@dataclass(frozen=True)
class SavePlan:
    """A checkpoint before it is written, alike on all ranks."""

    sets: dict[str, list[TensorFile]]
    reported: ReportedState
    numbers: dict[str, dict[str, Any]]
    """By parameter what the optimizers keep of it as one value, whatever rank has it."""
    borders: list[str]
    """The parameters at which segments were cut."""
    islands: list[dict[str, Any]]
    """Of each island the same two, and what it has beside; none where they have no weights of their
    own."""
    behind: dict[str, Any] | None
    """What is known of gradients that are not used yet, where islands make those equal."""

    @property
    def files(self) -> list[TensorFile]:
        """All of them."""
        return [file for files in self.sets.values() for file in files]

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(file.nbytes for file in self.files)


def plan(engine_tensors: EngineTensors, limit: int) -> SavePlan:
    """What is to be written, in files of at most `limit` bytes. Collective."""
    inventory, states = engine_tensors.inventory, engine_tensors.states
    reported = engine_tensors.trained.reported()
    # Ranks may differ in the shape of a buffer that grows; who writes it tells.
    buffers = {name: spec_of(name, value) for name, value in engine_tensors.own_buffers.items()}
    theirs: dict[str, TensorSpec] = {}
    for several in engine_tensors.spec.world_group.gather_objects(buffers):
        theirs |= several
    numbers: dict[str, dict[str, Any]] = {}
    for part in engine_tensors.of_all_layers(_numbers(engine_tensors, reported)):
        numbers |= part
    named = states.parameters.named
    borders = engine_tensors.of_all_layers(
        [named[number].name for number in sorted(reported.borders)]
    )
    specs = {
        MODEL: [
            inventory.parameters[name] if name in inventory.parameters else theirs[name]
            for name in inventory.names
        ],
        AVERAGE: _joined(engine_tensors.of_all_layers(average_specs(states))),
        ATTRIBUTES: engine_tensors.attribute_specs,
    } | _own_specs(engine_tensors, reported)
    sets = {
        kind: lay_out(kind, each, limit=limit, aliases=inventory.aliases if kind == MODEL else {})
        for kind, each in specs.items()
        if each
    }
    islands = _islands(engine_tensors, numbers, _joined(borders))
    behind = _behind(engine_tensors)
    return SavePlan(sets, reported, numbers, _joined(borders), islands, behind)


def _own_specs(
    engine_tensors: EngineTensors, reported: ReportedState
) -> dict[str, list[TensorSpec]]:
    """By set, the tensors that each island may have for itself. Collective over the islands."""
    mine = {OPTIMIZER: optimizer_specs(engine_tensors, reported)}
    if engine_tensors.of_islands is not None:
        mine |= engine_tensors.of_islands.specs()
    several = engine_tensors.of_all_layers(mine)
    joined = {kind: _joined(each[kind] for each in several) for kind in mine}
    if engine_tensors.islands is not None:
        buffers = [spec_of(name, value) for name, value in engine_tensors.island_buffers.items()]
        joined[ISLAND] += _joined(engine_tensors.spec.step_group.gather_objects(buffers))
    return {
        engine_tensors.set_of(kind, island): specs
        for island, theirs in enumerate(engine_tensors.spec.peers.gather_objects(joined))
        for kind, specs in theirs.items()
    }


def _islands(
    engine_tensors: EngineTensors, numbers: Mapping[str, Any], borders: list[str]
) -> list[dict[str, Any]]:
    """What stands beside the tensors of each island. Collective over the islands."""
    if engine_tensors.islands is None:
        return []
    beside: dict[str, dict[str, Any]] = {"weights": {}, "due": {}}
    for each in engine_tensors.of_all_layers(engine_tensors.islands.numbers()):
        for key, values in each.items():
            beside[key] |= values
    mine = {"state": numbers, "borders": borders} | beside
    return engine_tensors.spec.peers.gather_objects(mine)


def _behind(engine_tensors: EngineTensors) -> dict[str, Any] | None:
    """What is known of gradients that are not used yet. Collective over the layers."""
    if engine_tensors.delayed is None:
        return None
    mine = engine_tensors.delayed.numbers(engine_tensors.spec.peers.size)
    return checkpoint_tensors.joined(engine_tensors.of_all_layers(mine))


def _joined(several: Iterable[Iterable[T]]) -> list[T]:
    return list(itertools.chain.from_iterable(several))


def _numbers(engine_tensors: EngineTensors, reported: ReportedState) -> dict[str, dict[str, Any]]:
    """What the optimizers keep of the parameters here as one value each, by name."""
    named = engine_tensors.states.parameters.named
    singles = {
        named[number].name: {k: v for k, v in entries.items() if not isinstance(v, Blank)}
        for number, entries in sorted(reported.states.items())
    }
    return singles | {e.name: e.numbers for e in engine_tensors.idle if e.numbers or e.tensors}


def lend(engine_tensors: EngineTensors, made: SavePlan, sink: TensorSink) -> None:
    """Give `sink` all that this rank is to write. Collective where memory is out of order."""
    known = {(kind, n) for kind, files in made.sets.items() for f in files for n in f.tensors}
    apart = engine_tensors.out_of_order(made.reported)
    apart = {(engine_tensors.set_of(kind), name) for kind, name in apart}
    window = HostWindow()
    for holding in [*engine_tensors.trained, *engine_tensors.beside()]:
        _give(holding, engine_tensors.set_of(holding.kind), known - apart, sink, window)
    if apart:
        for holding in engine_tensors.reordered(made.reported):
            _give(holding, engine_tensors.set_of(holding.kind), known, sink, window)


def _give(
    holding: TensorSpan,
    kind: str,
    wanted: Set[tuple[str, str]],
    sink: TensorSink,
    window: HostWindow,
) -> None:
    """Lend this rank's share of what is `wanted` of a holding, by set (its own is `kind`) and name,
    span by span."""
    held = holding.storage
    mine = [part for part in holding.extents if (kind, part.tensor) in wanted]
    first, end = share(held.numel, holding.copy, holding.copies)
    spans = [
        (span, max(a, first) - a, min(b, end) - a, a)
        for span, (a, b) in enumerate(held.spans)
        if max(a, first) < min(b, end)
    ]
    for number, (span, low, high, start) in enumerate(spans if mine else []):
        if number + 1 < len(spans):
            held.read_ahead(spans[number + 1][0])
        taken = held.take(span)[low:high].detach()
        for first, near in window.read(taken, sink.settle):
            begin = start + low + first
            parts = clipped(mine, begin, begin + near.numel())
            sink.write(kind, byte_ranges(parts, held.dtype.itemsize, CHUNK), bytes_of(near))
        sink.settle()
        held.put(span, changed=False)


def bytes_of(flat: Tensor) -> memoryview:
    """The memory of a flat tensor of the CPU."""
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


# -- one after the other -------------------------------------------------------------------


def begin(draft: Draft, made: SavePlan, group: Collectives) -> None:
    """Make the draft's folder and its files, on rank 0; all ranks must see them. Collective.

    Raises CheckpointNotWritten, or CheckpointError where they do not, on all ranks alike.
    """
    failure = None
    if group.rank == 0:
        failure = disk_error_of(lambda: _make(draft, made), draft)
    consistency.agree(group, failure, CheckpointNotWritten)
    draft.path = group.gather_objects(draft.path)[0]
    seen = group.gather_objects((socket.gethostname(), draft.path.is_dir()))
    blind = sorted({host for host, there in seen if not there})
    if blind:
        if group.rank == 0:
            draft.discard()
        raise CheckpointError(
            f"{draft.folder} is not the same folder everywhere: {', '.join(blind)} cannot see what "
            "rank 0 made there. Save into a folder on a file system that all hosts share."
        )


def _make(draft: Draft, made: SavePlan) -> None:
    draft.begin()
    create(draft.path, made.files)


def write(engine_tensors: EngineTensors, made: SavePlan, draft: Draft) -> Sums:
    """Write this rank's part, to the disk, and return the checksums of all ranks. Collective.

    Raises CheckpointNotWritten on all ranks alike.
    """
    group = engine_tensors.spec.world_group
    writer = Writer(draft.path, made.sets)
    sums: Sums = {}

    def finish() -> None:
        nonlocal sums
        sums = writer.finish()

    try:
        lend(engine_tensors, made, writer)
        failure = disk_error_of(finish, draft)
    finally:
        writer.close()
    consistency.agree(group, failure, CheckpointNotWritten)
    return merged(group.gather_objects(sums))


def merged(several: Sequence[Sums]) -> Sums:
    """The parts of all ranks, by tensor."""
    whole: dict[tuple[str, str], list[ChecksumPart]] = {}
    for sums in several:
        for tensor, parts in sums.items():
            whole.setdefault(tensor, []).extend(parts)
    return whole


def documents(
    made: SavePlan, sums: Sums, fields: Mapping[str, Any], more: Mapping[str, bytes]
) -> dict[str, bytes]:
    """The small files of a checkpoint, the one that completes it last."""
    checksums = {
        kind: {
            name: f"{_checksum(placed.spec, sums.get((kind, name), ())):08x}"
            for file in files
            for name, placed in file.tensors.items()
        }
        for kind, files in made.sets.items()
    }
    found = dict(more)
    for kind, files in made.sets.items():
        if len(files) > 1:
            found[index_name(kind)] = json.dumps(index(files), indent=1).encode() + b"\n"
    sets = {kind: [file.name for file in files] for kind, files in made.sets.items()}
    summed = {name: document.crc_of(data) for name, data in found.items()}
    summed |= {file.name: document.crc_of(file.header) for file in made.files}
    tensors = {"sets": sets, "checksums": checksums, "files": summed}
    found[DOCUMENT] = document.dump(tensors | dict(fields))
    return found


def _checksum(spec: TensorSpec, parts: Sequence[ChecksumPart]) -> int:
    crc = joined(parts, spec.nbytes)
    assert crc is not None, f"{spec.name} was not written whole: {sorted(parts)}"
    return crc


def disk_error_of(work: Callable[[], Any], draft: Draft) -> str | None:
    """Do `work`; what went wrong with the disk, in words."""
    try:
        work()
    except OSError as error:
        return draft.refused(error)
    return None


# -- what stands beside the tensors --------------------------------------------------------


def state_fields(engine_tensors: EngineTensors, made: SavePlan) -> dict[str, Any]:
    """The optimizers' numbers: groups by parameter, options, and what is one value each.

    Raises CheckpointError for a value that no file can hold.
    """
    names = engine_tensors.optimized
    optimizers = [
        {
            "class": type(optimizer).__name__,
            "groups": [
                {
                    "parameters": [names[p] for p in group["params"]],
                    "options": {
                        key: _encoded(value, f"option {key} of {type(optimizer).__name__}")
                        for key, value in group.items()
                        if key not in ("params", "param_names")
                    },
                }
                for group in optimizer.param_groups
            ],
        }
        | ({} if values is None else {"attributes": values.fields})
        for optimizer, values in zip(
            engine_tensors.spec.optimizers, engine_tensors.attributes, strict=True
        )
    ]
    fields = {"optimizers": optimizers, "state": _state(made.numbers), "borders": made.borders}
    if made.islands:
        islands = [each | {"state": _state(each["state"])} for each in made.islands]
        fields["islands"] = islands
    if made.behind is not None:
        fields[checkpoint_tensors.FIELD] = made.behind
    return fields


def _state(numbers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: {key: _encoded(value, f"{key} of {name}") for key, value in entries.items()}
        for name, entries in numbers.items()
    }


def _encoded(value: Any, what: str) -> Any:
    try:
        return json_values.encode(value)
    except json_values.NotPlain as error:
        raise CheckpointError(
            f"The optimizer keeps {what} as {error}, which a checkpoint cannot hold: tensors, "
            "numbers, text, and lists and maps of those."
        ) from error
