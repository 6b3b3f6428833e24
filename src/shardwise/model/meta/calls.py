"""Converts a torch call into an operation on the tape, with its inputs, writes and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from shardwise.errors import ModelError
from shardwise.model.meta.storage_records import (
    StorageRecord,
    deferred_record,
    record_of,
    set_record,
)
from shardwise.model.meta.tape import (
    AllocatedStorage,
    Content,
    Layout,
    RecordedDraws,
    RecordedMemory,
    TapedOperation,
    TensorArgument,
    copy_content,
    default_generator,
    leaves,
    map_leaves,
)

_aten = torch.ops.aten

# The results of these operations do not depend on the previous content of the memory.
_OVERWRITES = frozenset(
    getattr(packet, name)
    for packet in (
        _aten.zero_,
        _aten.fill_,
        _aten.copy_,
        _aten.uniform_,
        _aten.normal_,
        _aten.random_,
        _aten.exponential_,
        _aten.log_normal_,
        _aten.cauchy_,
        _aten.geometric_,
    )
    for name in packet.overloads()  # type: ignore[no-untyped-call]
)

_EMPTY = frozenset((_aten.empty.memory_format, _aten.empty_strided.default))


@dataclass(frozen=True)
class CallSchema:
    """Properties of an operation that follow from its schema."""

    written: frozenset[int | str]  # positions and keywords
    makes: bool  # has results that own memory
    queries: bool  # has results that are not tensors, or whose sizes depend on values
    moves: bool  # changes the memory that a tensor refers to, not its content
    random: bool  # draws from a generator

    @staticmethod
    @cache
    def of(function: OpOverload) -> CallSchema:
        schema, tags = function._schema, function.tags
        tensors = [result for result in schema.returns if "Tensor" in str(result.type)]
        return CallSchema(
            frozenset(
                argument.name if argument.kwarg_only else position
                for position, argument in enumerate(schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ),
            any(result.alias_info is None for result in tensors),
            len(tensors) < len(schema.returns)
            or torch.Tag.dynamic_output_shape in tags
            or torch.Tag.data_dependent_output in tags,
            torch.Tag.inplace_view in tags,
            torch.Tag.nondeterministic_seeded in tags,
        )


class RecordedCall:
    """A torch call to record, with the tensors that it reads and writes."""

    def __init__(self, function: OpOverload, args: Any, kwargs: Any) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.kind = CallSchema.of(function)
        self.leaves = leaves((args, kwargs))
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        # Arguments that the schema marks as written, by position or by keyword.
        written = [args[k] for k in self.kind.written if isinstance(k, int) and k < len(args)]
        written += [kwargs[key] for key in self.kind.written if key in kwargs]
        self.written = {id(leaf) for leaf in leaves(written) if isinstance(leaf, Tensor)}
        self.deferred = any(deferred_record(tensor) for tensor in self.tensors)

    def run(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    def map_arguments(self, function: Callable[[Any], Any]) -> RecordedCall:
        """Return the same call with `function` applied to all arguments."""
        args, kwargs = map_leaves(function, self.args), map_leaves(function, self.kwargs)
        return RecordedCall(self.function, args, kwargs)

    def generator(self) -> torch.Generator:
        """Return the generator that a random call uses."""
        generators = [leaf for leaf in self.leaves if isinstance(leaf, torch.Generator)]
        return generators[0] if generators else default_generator(self.device())

    def device(self) -> torch.device:
        """Return the device that the results would have in a plain build, instead of meta."""
        for leaf in self.leaves:
            if isinstance(leaf, torch.device) and leaf.type != "meta":
                return leaf
        # The tensor with the most dims decides, because torch mixes 0-dim CPU tensors with any
        # device.
        for tensor in sorted(self.tensors, key=Tensor.dim, reverse=True):
            record = deferred_record(tensor)
            return record.device if record else tensor.device
        return torch.device("cpu")

    def values_for_meta(self) -> bool:
        """Return whether the call copies known values to the meta device.

        torch makes such copies of indices.
        """
        return (
            any(isinstance(leaf, torch.device) and leaf.type == "meta" for leaf in self.leaves)
            and not any(tensor.is_meta for tensor in self.tensors)
            and not self.kind.random
            and self.function not in _EMPTY
        )

    def can_be_recorded(self) -> bool:
        """Return whether every tensor is strided, not lazily conjugated, and has values."""
        return all(
            tensor.layout is torch.strided
            and not (tensor.is_conj() or tensor.is_neg())
            and not (tensor.is_meta and record_of(tensor) is None)
            for tensor in self.tensors
        )

    def changes_records(self) -> bool:
        """Return whether the call allocates memory, or writes to memory that has a record."""
        return self.kind.makes or any(
            record_of(tensor) for tensor in self.tensors if id(tensor) in self.written
        )

    def writes_real(self) -> bool:
        return any(id(tensor) in self.written and not tensor.is_meta for tensor in self.tensors)


class TapeEntry:
    """Builds the tape's operation before a call runs, and records the results afterwards."""

    def __init__(self, call: RecordedCall) -> None:
        self._call = call
        self._records: list[StorageRecord | None] = []
        self._memories: list[RecordedMemory] = []
        self._places: dict[int, int] = {}
        # Save the generator state before the call, so that the call can be repeated without earlier
        # draws.
        seed = None
        if call.kind.random:
            generator = call.generator()
            seed = RecordedDraws(generator.device, generator.get_state())
        if not call.can_be_recorded():
            raise ModelError(
                f"on_meta cannot record {call.function} of a parameter with a tensor that is "
                "sparse, lazily conjugated or without values. Avoid such tensors in the block."
            )
        args, kwargs = (
            map_leaves(self._argument, call.args),
            map_leaves(self._argument, call.kwargs),
        )
        self._forget_overwritten(leaves((args, kwargs)))
        self.operation = TapedOperation(call.function, args, kwargs, self._memories, seed)

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return None
        if isinstance(leaf, torch.device):
            return self._call.device()
        if not isinstance(leaf, Tensor):
            return leaf
        written = id(leaf) in self._call.written
        record = record_of(leaf)
        if record is None:
            # No recorded operation creates this tensor, so copy its values.
            content, layout = copy_content(leaf)
            self._memories.append(RecordedMemory(content, layout.bytes(), leaf.device, written))
            self._records.append(None)
            return TensorArgument(len(self._memories) - 1, layout)
        # Two arguments that are views of the same storage share one memory, so that a write is
        # visible through both.
        place = self._places.setdefault(id(record), len(self._memories))
        if place == len(self._memories):
            size = leaf.untyped_storage().nbytes()
            self._memories.append(RecordedMemory(record.content, size, record.device, written))
            self._records.append(record)
        elif written:
            old = self._memories[place]
            self._memories[place] = RecordedMemory(old.content, old.size, old.device, True)
        return TensorArgument(place, Layout.of(leaf))

    def _forget_overwritten(self, arguments: Sequence[Any]) -> None:
        """Drop the old content of memory that the call overwrites completely without reading it."""
        if self._call.function not in _OVERWRITES or not isinstance(arguments[0], TensorArgument):
            return
        target = arguments[0]
        alone = (
            sum(isinstance(a, TensorArgument) and a.memory == target.memory for a in arguments) == 1
        )
        old = self._memories[target.memory]
        if alone and target.layout.fills(old.size):
            self._memories[target.memory] = RecordedMemory(None, old.size, old.device, True)

    def finish(self, results: Any, *, device: torch.device | None = None) -> None:
        """Attach the new contents to the written arguments and to the results.

        Args:
            results: Results of the call.
            device: Device of deferred results.
        """
        written = self.operation.written()
        # Slots of contents: first the written memories, then the allocated storages.
        for slot, index in enumerate(written):
            record = self._records[index]
            if record is not None:
                record.content = Content(self.operation, slot)
        for tensor in self._call.tensors:
            record = record_of(tensor) if id(tensor) in self._call.written else None
            if record is not None and not tensor.is_meta:
                # The call ran on this real tensor, so its memory is up to date.
                record.present = record.content
        # A result in the memory of an argument is a view, whose memory already has a record.
        known = {_address(t) for t in self._call.tensors if t.layout is torch.strided}
        for index, result in enumerate(leaves(results)):
            if not isinstance(result, Tensor) or result.layout is not torch.strided:
                continue
            if _address(result) in known or (result.is_meta and device is None):
                continue
            known.add(_address(result))
            size = result.untyped_storage().nbytes()
            self.operation.allocated.append(AllocatedStorage(index, Layout.of(result), size))
            slot = len(written) + len(self.operation.allocated) - 1
            content = Content(self.operation, slot)
            present = None if result.is_meta else content
            set_record(result, StorageRecord(content, device or result.device, present))


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
