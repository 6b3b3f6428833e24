"""Loads tensors from a checkpoint into the states: each rank reads what it holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint import document, reader
from shardwise.checkpoint import tensor_names as names
from shardwise.checkpoint.atomic_folders import DOCUMENT, lacks_document
from shardwise.checkpoint.deepspeed.as_checkpoint import fields_of
from shardwise.checkpoint.deepspeed.as_checkpoint import verify as verify_save
from shardwise.checkpoint.deepspeed.folders import find
from shardwise.checkpoint.deepspeed.save import Save
from shardwise.checkpoint.format import dtype_of
from shardwise.checkpoint.reader import TensorReader
from shardwise.engine.attribute_values import OptimizerAttributes
from shardwise.engine.build import States
from shardwise.engine.checkpoint_source import CheckpointSource
from shardwise.engine.checkpoint_tensors import EngineTensors
from shardwise.engine.optimizer_fields import OptimizerFields
from shardwise.errors import BrokenCheckpoint, CheckpointMismatch
from shardwise.islands import checkpoint_sets
from shardwise.islands.checkpoint_tensors import FIELD
from shardwise.islands.parameter_averaging import ParameterAveraging
from shardwise.layout.byte_ranges import Extent, clipped
from shardwise.layout.shards import Shard
from shardwise.model.buffers import write
from shardwise.states import tensor_spans
from shardwise.states.optimizer.existing_optimizer_state import Blank
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.tensor_spans import (
    ATTRIBUTES,
    ISLAND,
    MODEL,
    OPTIMIZER,
    OUTER,
    TensorSpan,
)
from shardwise.tiers.host_window import HostWindow

Fill = Callable[[Tensor, int], None]
"""Fills a flat tensor with the elements of one tensor from the given one on."""


def open_source(
    path: Path, engine_tensors: EngineTensors, *, strict: bool, alone: bool, stack: ExitStack
) -> CheckpointSource:
    """What `path`, a checkpoint's folder or another's files, has for the model of `engine_tensors`.

    The files are open until `stack` is closed. Raises CheckpointMismatch, with all names, where
    tensors are misshapen, or with `strict` missing or unexpected; BrokenCheckpoint for one that has
    lost what stands beside the tensors, unless those `alone` are wanted.
    """
    fields: dict[str, Any] = {}
    save: Save | None = None
    if lacks_document(path) and not alone:
        raise BrokenCheckpoint(
            f"{path} has the tensors of a checkpoint, and no {DOCUMENT}, which says the rest of "
            "it. Bring the file back, or take another checkpoint. To load the weights alone: "
            "engine.load(path, model_only=True)."
        )
    if os.path.lexists(path / DOCUMENT):
        fields = document.load(path)
        sets: dict[str, TensorReader] = {
            kind: stack.enter_context(closing(reader.open_set(path, files, fields["files"])))
            for kind, files in fields["sets"].items()
        }
        if MODEL not in sets:
            raise BrokenCheckpoint(f"{path / DOCUMENT} has no set of tensors {MODEL!r}.")
    elif (folder := find(path)) is not None:
        save = Save(folder)
        sets = {MODEL: save.model}
        if not alone:
            sets, fields = fields_of(save, engine_tensors.inventory.names, _groups(engine_tensors))
    else:
        sets = {MODEL: stack.enter_context(closing(reader.open_foreign(path)))}
    found = names.match(engine_tensors.inventory.names, sets[MODEL].specs)
    _check(path, engine_tensors, sets[MODEL], found, strict=strict)
    spec = engine_tensors.spec
    mine, seen = checkpoint_sets.seen(sets, fields, spec.apart) if fields else (sets, fields)
    mine = {**mine, **checkpoint_sets.residual_of(sets, fields, spec.peers)}
    return CheckpointSource(
        mine,
        found.found,
        seen,
        save,
        written=sets,
        goes_on=not alone,
        takes_own=not alone and spec.apart.size == 1,
    )


def _groups(engine_tensors: EngineTensors) -> list[list[str]]:
    """The names of what the optimizers have, by group."""
    named = engine_tensors.optimized
    return [
        [named[parameter] for parameter in group["params"]]
        for optimizer in engine_tensors.spec.optimizers
        for group in optimizer.param_groups
    ]


def _check(
    path: Path,
    engine_tensors: EngineTensors,
    tensors: TensorReader,
    found: names.Match,
    *,
    strict: bool,
) -> None:
    """Raise CheckpointMismatch for all that does not fit."""
    inventory = engine_tensors.inventory
    shapes = {name: spec.shape for name, spec in inventory.parameters.items()}
    shapes |= {name: tuple(value.shape) for name, value in inventory.buffers.items()}
    misshapen = [
        f"{name} (here {list(shapes[name])}, there {list(tensors.specs[theirs].shape)})"
        for name, theirs in found.found.items()
        if shapes[name] != tensors.specs[theirs].shape
    ]
    faults = [("misshapen", misshapen)]
    if strict:
        faults += [("missing in it", found.missing), ("unexpected in it", found.unexpected)]
    lines = [f"{what}: {names.listed(several)}" for what, several in faults if several]
    if lines:
        loosely = " To load what fits and keep the rest: strict=False." if not misshapen else ""
        raise CheckpointMismatch(
            f"{path} is not of this model. {'; '.join(lines)}. Build the model that was saved."
            f"{loosely}"
        )


def verify(path: Path, source: CheckpointSource, rank: int, size: int) -> None:
    """Read what falls to `rank` of `size` of a checkpoint's bytes.

    Tensors are dealt out by their bytes, the largest first. Raises BrokenCheckpoint for one that is
    not as it was written.
    """
    if source.foreign is not None:
        verify_save(source.foreign, rank, size)
        return
    lost = [
        f"{name} of the set {kind}"
        for kind, sums in source.fields["checksums"].items()
        for name in sums
        if kind not in source.written or name not in source.written[kind].specs
    ]
    if lost:
        raise BrokenCheckpoint(
            f"{path} lacks what was written: {names.listed(lost)}. Take another checkpoint."
        )
    loads = [0] * size
    specs = [
        (kind, spec)
        for kind, tensors in sorted(source.written.items())
        for spec in tensors.specs.values()
    ]
    for kind, spec in sorted(specs, key=lambda each: (-each[1].nbytes, each[1].name)):
        turn = loads.index(min(loads))
        loads[turn] += spec.nbytes
        written = source.fields["checksums"].get(kind, {}).get(spec.name)
        if turn == rank and source.written[kind].checksum(spec.name) != written:
            raise BrokenCheckpoint(
                f"{spec.name} of the set {kind} in {path} is not what was written: its CRC-32 is "
                f"not {written}. Take another checkpoint; `shardwise checkpoint verify` tells more."
            )


# -- into the states -----------------------------------------------------------------------


def fill_model(engine_tensors: EngineTensors, source: CheckpointSource) -> None:
    """Read the model's tensors, masters and averages. Collective."""
    states = engine_tensors.states
    apart, window = _apart(engine_tensors), HostWindow()
    with torch.no_grad():
        states.parameters.meet()
        for holding in engine_tensors.trained:
            if _is_of_model(holding):
                _fill(holding, source, apart, window)
        for holding in engine_tensors.frozen():
            _fill(holding, source, apart, window)
        _fill_whole(engine_tensors, source, window)
        if engine_tensors.spec.placement.is_sharded("optimizer"):
            sent = [states.parameters.publish(i) for i in range(len(states.optimizer.intervals))]
            for handle in sent:
                handle.wait()
            for handle in sent:
                handle.reusable()
        states.parameters.settle()


def fill_islands(engine_tensors: EngineTensors, source: CheckpointSource, step: int) -> None:
    """Read what islands have beside, once the weights are the anchor; they go on from there, where
    there is none. Collective."""
    hooks = engine_tensors.states.hooks
    if not isinstance(hooks, ParameterAveraging):
        return
    islands = hooks.exchange
    islands.forget()
    islands.begun = "weights" in source.fields  # several islands wrote it
    if not islands.begun:
        return  # the first step begins from the weights
    tensors = engine_tensors.all_of_islands(islands)
    apart, window = _apart(engine_tensors), HostWindow()
    with torch.no_grad():
        islands.anchor.restart()
        tensors.take_numbers(source.fields, step)
        for holding in tensors:
            _fill(holding, source, apart, window)
        islands.anchor.swap()


def fill_delayed(engine_tensors: EngineTensors, source: CheckpointSource) -> None:
    """Read the gradients that islands are to use yet; without any they begin anew. Collective."""
    tensors, hooks = engine_tensors.delayed, engine_tensors.states.hooks
    if tensors is None or hooks is None:
        return
    hooks.begin_anew()
    tensors.take_numbers(source.fields.get(FIELD, {"updates": 0, "waiting": []}))
    apart, window = _apart(engine_tensors), HostWindow()
    with torch.no_grad():
        for holding in tensors:
            _fill(holding, source, apart, window)


def _is_of_model(holding: TensorSpan) -> bool:
    master = f".{tensor_spans.MASTER}"
    return holding.kind != OPTIMIZER or all(e.tensor.endswith(master) for e in holding.extents)


def _fill_whole(
    engine_tensors: EngineTensors, source: CheckpointSource, window: HostWindow
) -> None:
    """Read what every rank has whole: buffers, and parameters that are not trained."""
    inventory = engine_tensors.inventory
    for name, value in [*inventory.buffers.items(), *inventory.whole.items()]:
        if name not in source.names:
            continue
        tensors, theirs = source.of_model(name, is_buffer=name in inventory.buffers)
        shard = engine_tensors.spec.shard_of(value)
        if shard is None and value.device.type != "cpu" and value.is_contiguous():
            for first, near in window.write(value.detach().view(-1), fresh=True):
                tensors.read(theirs, first, near)
        else:
            read = tensors.whole(theirs)
            found = read.view(value.shape) if shard is None else part_of(read, shard)
            write(value.detach(), found)


def fill_optimizers(
    engine_tensors: EngineTensors,
    source: CheckpointSource,
    numbers: OptimizerFields,
    attributes: OptimizerAttributes,
    say: Callable[[str], None],
) -> None:
    """Read the optimizers' options, attributes and state, which replaces what there is."""
    states = engine_tensors.states
    numbers.take_options(engine_tensors.spec.optimizers)

    def read(name: str) -> Tensor:
        return source.sets[ATTRIBUTES].whole(name)

    # Before the copies are made, which begin with the attributes of the user's optimizers.
    for optimizer, saved in zip(engine_tensors.spec.optimizers, numbers.attributes, strict=True):
        if saved is not None:
            attributes.restore(optimizer, saved, read, say)
    places = {each.name: place for place, each in enumerate(states.parameters.named)}
    entries = _entries(states, source, numbers, places)
    states.optimizer.restart(entries, {places[n] for n in numbers.borders if n in places})
    apart, window = _apart(engine_tensors), HostWindow()
    with torch.no_grad():
        for holding in engine_tensors.trained:
            if not _is_of_model(holding):
                _fill(holding, source, apart, window)
    for each in engine_tensors.idle:
        state = _whole_state(source, numbers, each.name)
        shard = engine_tensors.spec.shard_of(each.parameter)
        if shard is not None:
            state = {key: part_of(value, shard) for key, value in state.items()}
        each.take(state)


def part_of(value: Any, shard: Shard) -> Any:
    """What a rank has of a tensor of the parameter's size; anything else as it is."""
    if isinstance(value, Tensor) and value.ndim and value.numel() == prod(shard.shape):
        return shard.of(value.view(shard.shape))
    return value


def _whole_state(source: CheckpointSource, numbers: OptimizerFields, name: str) -> dict[str, Any]:
    """The state of parameter `name`, as the user's optimizer has it."""
    state = dict(numbers.state.get(name, {}))
    tensors = source.sets.get(OPTIMIZER)
    for full in tensors.specs if tensors is not None else ():
        owner, _, key = full.rpartition(".")
        if owner == name and key != tensor_spans.MASTER:
            assert tensors is not None
            state[key] = tensors.whole(full)
    return state


def _entries(
    states: States, source: CheckpointSource, numbers: OptimizerFields, places: Mapping[str, int]
) -> dict[nn.Parameter, dict[str, Any]]:
    """By parameter its state, tensors as Blanks in the dtype that they will have here."""
    entries: dict[nn.Parameter, dict[str, Any]] = {}
    masters = {
        slot.parameter: part.master.dtype
        for part in states.optimizer.intervals
        for slot in part.bucket.slots
    }
    for name, values in numbers.state.items():
        if name in places:
            entries[_parameter(states, places[name])] = dict(values)
    specs = source.sets[OPTIMIZER].specs if OPTIMIZER in source.sets else {}
    for full, spec in specs.items():
        name, _, key = full.rpartition(".")
        if key == tensor_spans.MASTER or name not in places:
            continue
        number = places[name]
        dtype = _here(
            dtype_of(spec.dtype),
            source.sets[MODEL].specs[source.names[name]].dtype,
            source.has(OPTIMIZER, tensor_spans.state_name(name, tensor_spans.MASTER)),
            masters[number],
        )
        entries.setdefault(_parameter(states, number), {})[key] = Blank(spec.shape, dtype)
    return entries


def _here(saved: torch.dtype, parameter: str, mastered: bool, master: torch.dtype) -> torch.dtype:
    """The dtype of a state: as it was saved, unless masters are of another dtype now."""
    before = torch.float32 if mastered else dtype_of(parameter)
    return master if saved.is_floating_point and saved == before else saved


def _parameter(states: States, number: int) -> nn.Parameter:
    return states.parameters.named[number].parameter


# -- one holding ---------------------------------------------------------------------------


def _apart(engine_tensors: EngineTensors) -> dict[str, NamedParameter]:
    """By name, the parameters whose memory is not in the order of their elements."""
    parameters = engine_tensors.states.parameters
    frozen = [t for slab in parameters.frozen for t in slab.named]
    return {t.name: t for t in [*parameters.named, *frozen] if not t.in_order}


def _fill(
    holding: TensorSpan,
    source: CheckpointSource,
    apart: Mapping[str, NamedParameter],
    window: HostWindow,
) -> None:
    """Read all extents of a holding, span by span; what has no source stays as it is."""
    held = holding.storage
    fills = {
        e.tensor: found
        for e in holding.extents
        if (found := _fill_of(holding, e.tensor, source, apart)) is not None
    }
    known = [extent for extent in holding.extents if extent.tensor in fills]
    if not known:
        return
    fresh = len(known) == len(holding.extents)
    for index, (first, _) in enumerate(held.spans):
        value = held.take(index, fresh=fresh)
        for low, near in window.write(value, fresh=fresh):
            begin = first + low
            _fill_piece(near, clipped(known, begin, begin + near.numel()), fills, fresh=fresh)
        held.put(index, changed=True)


def _fill_piece(
    near: Tensor, parts: Sequence[Extent], fills: Mapping[str, Fill], *, fresh: bool
) -> None:
    if fresh:
        near.zero_()  # padding takes part in updates, and must be nothing
    for part in parts:
        fills[part.tensor](near[part.start : part.end], part.offset)


def _fill_of(
    holding: TensorSpan, name: str, source: CheckpointSource, apart: Mapping[str, NamedParameter]
) -> Fill | None:
    """What fills memory with the elements of a tensor; in its own order, for one of `apart`."""
    found = source.values(holding.kind, name, holding.storage.dtype)
    if found is None:
        return None
    tensors, theirs = found
    keyed = holding.kind in (OPTIMIZER, ISLAND, OUTER)
    parameter = name.rpartition(".")[0] if keyed else name
    named = apart.get(parameter)
    if named is None or holding.as_counted:
        return lambda into, offset: tensors.read(theirs, offset, into)
    laid = named

    @cache  # it comes in several pieces
    def flat() -> Tensor:
        return laid.flattened(tensors.whole(theirs))

    def fill(into: Tensor, offset: int) -> None:
        whole, end = flat(), offset + into.numel()
        into.copy_(whole[offset:end])
        if end == whole.numel():
            flat.cache_clear()  # pieces come in order: one tensor at a time is held whole

    return fill
