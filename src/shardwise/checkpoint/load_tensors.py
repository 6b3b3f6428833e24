"""Loads tensors from a checkpoint into the states: each rank reads what it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint import tensor_spans
from shardwise.checkpoint.attribute_values import OptimizerAttributes
from shardwise.checkpoint.format import dtype_of
from shardwise.checkpoint.optimizer_fields import OptimizerFields
from shardwise.checkpoint.source import CheckpointSource
from shardwise.checkpoint.spec_view import States
from shardwise.checkpoint.tensor_spans import (
    ATTRIBUTES,
    ISLAND,
    MODEL,
    OPTIMIZER,
    OUTER,
    TensorSpan,
)
from shardwise.checkpoint.tensors import EngineTensors
from shardwise.layout.byte_ranges import Extent, clipped
from shardwise.layout.shards import Shard
from shardwise.model.buffers import write
from shardwise.states.optimizer.existing_optimizer_state import Blank
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.tiers.host_window import HostWindow

Fill = Callable[[Tensor, int], None]
"""Fills a flat tensor with the elements of one tensor from the given one on."""


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
            # Only this rank's intervals were read: those of the others come by the gather that also
            # follows an update. All are started before the first is waited for.
            sent = [states.parameters.publish(i) for i in range(len(states.optimizer.intervals))]
            for handle in sent:
                handle.wait()
            for handle in sent:
                handle.reusable()
        states.parameters.settle()


def fill_spans(
    engine_tensors: EngineTensors, source: CheckpointSource, spans: Iterable[TensorSpan]
) -> None:
    """Read all elements of `spans`; what the checkpoint lacks stays as it is."""
    apart, window = _apart(engine_tensors), HostWindow()
    with torch.no_grad():
        for held in spans:
            _fill(held, source, apart, window)


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
        tensors, theirs = source.of_model(name)
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
        number, dtype = places[name], dtype_of(spec.dtype)
        held = dtype_of(source.sets[MODEL].specs[source.names[name]].dtype)
        mastered = source.has(OPTIMIZER, tensor_spans.state_name(name, tensor_spans.MASTER))
        # State that had the dtype of its master follows the master to another precision.
        if dtype.is_floating_point and dtype == (torch.float32 if mastered else held):
            dtype = masters[number]
        entries.setdefault(_parameter(states, number), {})[key] = Blank(spec.shape, dtype)
    return entries


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
    # If all of it is read, its old bytes need not come from their tier first.
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
