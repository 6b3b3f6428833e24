"""Reads a checkpoint's tensors into an engine's states. Each rank reads only its own elements."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.attribute_values import OptimizerAttributes
from shardwise.checkpoint.format import dtype_of
from shardwise.checkpoint.optimizer_fields import OptimizerFields
from shardwise.checkpoint.source import CheckpointSource
from shardwise.checkpoint.spec_view import StatesView
from shardwise.checkpoint.tensor_spans import (
    ATTRIBUTES,
    GROUP,
    MASTER,
    MODEL,
    OPTIMIZER,
    OUTER,
    StoredTensors,
    state_name,
)
from shardwise.checkpoint.tensors import EngineTensors
from shardwise.layout.byte_ranges import clipped
from shardwise.layout.shards import Shard
from shardwise.model.buffers import write
from shardwise.states.optimizer.existing_optimizer_state import Blank
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.tiers.host_window import HostWindow

Fill = Callable[[Tensor, int], None]
"""Fills a 1-D tensor with elements of a saved tensor, starting at the given element."""


def fill_model(engine_tensors: EngineTensors, source: CheckpointSource) -> None:
    """Load the model's tensors, fp32 master weights and moving averages. Collective."""
    spec, states = engine_tensors.spec, engine_tensors.states
    inventory, window = engine_tensors.inventory, HostWindow()
    with torch.no_grad():
        # Other ranks may still be reading the old values from shared memory, so wait for them.
        states.parameters.meet()
        fill_spans(engine_tensors, source, filter(_is_of_model, engine_tensors.trained))
        fill_spans(engine_tensors, source, engine_tensors.frozen())
        # Every rank holds these in full: buffers, and parameters outside flat buffers.
        for name, value in [*inventory.buffers.items(), *inventory.whole.items()]:
            if name not in source.names:
                continue
            tensors, saved_name = source.of_model(name)
            shard = spec.shard_of(value)
            # Copy to a device in chunks, so that a large buffer does not need a full copy on the
            # host.
            if shard is None and value.device.type != "cpu" and value.is_contiguous():
                for first, near in window.write(value.detach().view(-1), fresh=True):
                    tensors.read(saved_name, first, near)
            else:
                read = tensors.whole(saved_name)
                found = read.view(value.shape) if shard is None else part_of(read, shard)
                write(value.detach(), found)
        if spec.placement.is_sharded("optimizer"):
            # This rank has read only its own intervals. Gather the other ranks' intervals as after
            # an update. Launch all gathers before waiting for the first one.
            sent = [states.parameters.publish(i) for i in range(len(states.optimizer.intervals))]
            for handle in sent:
                handle.wait()
            # Other ranks may still be reading this rank's intervals from shared memory.
            for handle in sent:
                handle.reusable()
        states.parameters.settle()


def _is_of_model(held: StoredTensors) -> bool:
    """Return whether a span holds parameters, averages or master weights."""
    master = f".{MASTER}"
    return held.kind != OPTIMIZER or all(e.tensor.endswith(master) for e in held.extents)


def fill_optimizers(
    engine_tensors: EngineTensors,
    source: CheckpointSource,
    numbers: OptimizerFields,
    attributes: OptimizerAttributes,
    say: Callable[[str], None],
) -> None:
    """Replace the optimizers' options, attributes and state with the saved values.

    Args:
        numbers: Decoded optimizer fields of checkpoint.json.
        attributes: Restores the optimizers' attributes.
        say: Called with each warning for the user.
    """
    states = engine_tensors.states
    numbers.take_options(engine_tensors.spec.optimizers)

    def read(name: str) -> Tensor:
        return source.sets[ATTRIBUTES].whole(name)

    # Restore attributes first, because `restart` below copies them from the user's optimizers.
    for optimizer, saved in zip(engine_tensors.spec.optimizers, numbers.attributes, strict=True):
        if saved is not None:
            attributes.restore(optimizer, saved, read, say)
    # `places` does not contain frozen parameters. Their state is loaded at the end.
    places = {frozen.name: place for place, frozen in enumerate(states.parameters.named)}
    entries = _state_entries(states, source, numbers, places)
    states.optimizer.restart(entries, {places[n] for n in numbers.borders if n in places})
    fill_spans(engine_tensors, source, itertools.filterfalse(_is_of_model, engine_tensors.trained))
    for frozen in engine_tensors.frozen_states:
        state = _read_whole_state(source, numbers, frozen.name)
        shard = engine_tensors.spec.shard_of(frozen.parameter)
        if shard is not None:
            state = {key: part_of(value, shard) for key, value in state.items()}
        frozen.take(state)


def part_of(value: Any, shard: Shard) -> Any:
    """Return this rank's part of `value` if it is a tensor with one value per parameter element.

    Returns any other value unchanged.
    """
    if isinstance(value, Tensor) and value.ndim and value.numel() == prod(shard.shape):
        return shard.of(value.view(shard.shape))
    return value


def _read_whole_state(
    source: CheckpointSource, numbers: OptimizerFields, name: str
) -> dict[str, Any]:
    """Return the saved state of parameter `name` by key, with full tensors."""
    state = dict(numbers.state.get(name, {}))
    tensors = source.sets.get(OPTIMIZER)
    for full in tensors.specs if tensors is not None else ():
        # Parameter names may contain dots, but keys do not, so split at the last dot.
        owner, _, key = full.rpartition(".")
        if owner == name and key != MASTER:
            assert tensors is not None
            state[key] = tensors.whole(full)
    return state


def _state_entries(
    states: StatesView,
    source: CheckpointSource,
    numbers: OptimizerFields,
    places: Mapping[str, int],
) -> dict[nn.Parameter, dict[str, Any]]:
    """Return the saved state of each parameter, with a Blank in place of each tensor.

    A Blank has the tensor's shape, and the dtype that this run uses for the tensor.
    """
    entries: dict[nn.Parameter, dict[str, Any]] = {}
    masters = {
        slot.parameter: part.master.dtype
        for part in states.optimizer.intervals
        for slot in part.bucket.slots
    }
    parameters = {t.name: t.parameter for t in states.parameters.named}
    for name, values in numbers.state.items():
        if name in places:
            entries[parameters[name]] = dict(values)
    specs = source.sets[OPTIMIZER].specs if OPTIMIZER in source.sets else {}
    for full, spec in specs.items():
        name, _, key = full.rpartition(".")
        if key == MASTER or name not in places:
            continue
        dtype = dtype_of(spec.dtype)
        held = dtype_of(source.sets[MODEL].specs[source.names[name]].dtype)
        mastered = source.has(OPTIMIZER, state_name(name, MASTER))
        # State that was saved in its master's dtype uses this run's dtype for masters, which may
        # differ because the precision has changed.
        if dtype.is_floating_point and dtype == (torch.float32 if mastered else held):
            dtype = masters[places[name]]
        entries.setdefault(parameters[name], {})[key] = Blank(spec.shape, dtype)
    return entries


# -- spans ---------------------------------------------------------------------------------


def fill_spans(
    engine_tensors: EngineTensors, source: CheckpointSource, spans: Iterable[StoredTensors]
) -> None:
    """Fill `spans` from the checkpoint. Tensors that it does not contain are left unchanged."""
    parameters, window = engine_tensors.states.parameters, HostWindow()
    frozen = [t for slab in parameters.frozen for t in slab.named]
    # Parameters whose memory order differs from the order of their elements (channels_last).
    reordered = {t.name: t for t in [*parameters.named, *frozen] if not t.in_order}
    with torch.no_grad():
        for held in spans:
            storage = held.storage
            fills = {
                e.tensor: found
                for e in held.extents
                if (found := _fill_function(held, e.tensor, source, reordered)) is not None
            }
            known = [extent for extent in held.extents if extent.tensor in fills]
            # If everything is overwritten, the old values need not be read from a slower tier.
            fresh = len(known) == len(held.extents)
            for number, (first, _) in enumerate(storage.spans if known else ()):
                value = storage.take(number, fresh=fresh)
                for low, near in window.write(value, fresh=fresh):
                    if fresh:
                        near.zero_()  # updates include the padding, so it must be zero
                    begin = first + low
                    for part in clipped(known, begin, begin + near.numel()):
                        fills[part.tensor](near[part.start : part.end], part.offset)
                storage.put(number, changed=True)


def _fill_function(
    held: StoredTensors,
    name: str,
    source: CheckpointSource,
    reordered: Mapping[str, NamedParameter],
) -> Fill | None:
    """Return a function that fills memory with elements of the tensor `name`.

    Returns None if the checkpoint does not contain the tensor.

    Args:
        reordered: Parameters whose memory order differs from the order in the file, by name.
    """
    found = source.values(held.kind, name, held.storage.dtype)
    if found is None:
        return None
    tensors, saved_name = found
    keyed = held.kind in (OPTIMIZER, GROUP, OUTER)
    parameter = reordered.get(name.rpartition(".")[0] if keyed else name)
    if parameter is None or held.as_counted:
        return lambda into, offset: tensors.read(saved_name, offset, into)
    named = parameter

    @cache  # `fill` is called once per chunk, but must read the tensor only once
    def flat() -> Tensor:
        return named.flattened(tensors.whole(saved_name))

    def fill(into: Tensor, offset: int) -> None:
        whole, end = flat(), offset + into.numel()
        # copy_ converts the dtype if the checkpoint was saved in a different precision.
        into.copy_(whole[offset:end])
        if end == whole.numel():
            # Chunks arrive in order, so this was the last one. Free the full tensor.
            flat.cache_clear()

    return fill
