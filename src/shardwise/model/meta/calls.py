"""Turns a call of torch into an operation on the tape: what it reads, writes and makes."""

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
    default_generator,
    exchanged,
    kept,
    leaves,
)

_aten = torch.ops.aten

# What these write does not depend on what was there.
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
    """What the schema of an operation says."""

    written: frozenset[int | str]  # positions and keywords
    makes: bool  # has results with memory of their own
    queries: bool  # has results that are no tensors, or whose sizes depend on values
    moves: bool  # changes where a tensor points, not what is in memory
    random: bool

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
    """A call of torch that is put on the tape, and what it reads and writes."""

    def __init__(self, function: OpOverload, args: Any, kwargs: Any) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.kind = CallSchema.of(function)
        self.leaves = leaves((args, kwargs))
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        written = [args[k] for k in self.kind.written if isinstance(k, int) and k < len(args)]
        written += [kwargs[key] for key in self.kind.written if key in kwargs]
        self.written = {id(leaf) for leaf in leaves(written) if isinstance(leaf, Tensor)}
        self.deferred = any(deferred_record(tensor) for tensor in self.tensors)

    def run(self) -> Any:
        """Call as it is."""
        return self.function(*self.args, **self.kwargs)

    def exchanged(self, function: Callable[[Any], Any]) -> RecordedCall:
        """The same call with other arguments."""
        args, kwargs = exchanged(function, self.args), exchanged(function, self.kwargs)
        return RecordedCall(self.function, args, kwargs)

    def generator(self) -> torch.Generator:
        """What a random one draws from."""
        given = [leaf for leaf in self.leaves if isinstance(leaf, torch.Generator)]
        return given[0] if given else default_generator(self.device())

    def device(self) -> torch.device:
        """Where a plain build would put the results; torch may name meta for a deferred tensor."""
        for leaf in self.leaves:
            if isinstance(leaf, torch.device) and leaf.type != "meta":
                return leaf
        # Of the tensor with most dimensions: torch lets 0-dim tensors of the CPU mix with others.
        for tensor in sorted(self.tensors, key=Tensor.dim, reverse=True):
            record = deferred_record(tensor)
            return record.device if record else tensor.device
        return torch.device("cpu")

    def values_for_meta(self) -> bool:
        """Whether it brings known values to the meta device, as torch does for indices."""
        return (
            any(isinstance(leaf, torch.device) and leaf.type == "meta" for leaf in self.leaves)
            and not any(tensor.is_meta for tensor in self.tensors)
            and not self.kind.random
            and self.function not in _EMPTY
        )

    def can_be_recorded(self) -> bool:
        """Whether each tensor is plain memory with values."""
        return all(
            tensor.layout is torch.strided
            and not (tensor.is_conj() or tensor.is_neg())
            and not (tensor.is_meta and record_of(tensor) is None)
            for tensor in self.tensors
        )

    def changes_records(self) -> bool:
        """Whether it makes memory, or writes into memory that has a record."""
        return self.kind.makes or any(
            record_of(tensor) for tensor in self.tensors if id(tensor) in self.written
        )

    def writes_real(self) -> bool:
        """Whether it writes into real memory."""
        return any(id(tensor) in self.written and not tensor.is_meta for tensor in self.tensors)


class TapeEntry:
    """Builds the operation of a call before it runs, and records what it made after."""

    def __init__(self, call: RecordedCall) -> None:
        self._call = call
        self._records: list[StorageRecord | None] = []
        self._memories: list[RecordedMemory] = []
        self._places: dict[int, int] = {}
        # The state before the call, so that the operation can be repeated without those before it.
        seed = None
        if call.kind.random:
            generator = call.generator()
            seed = RecordedDraws(generator.device, generator.get_state())
        if not call.can_be_recorded():
            raise ModelError(
                f"on_meta cannot record {call.function} of a parameter and a tensor that is "
                "sparse, lazily conjugated or without values: keep such tensors out of it."
            )
        args, kwargs = exchanged(self._argument, call.args), exchanged(self._argument, call.kwargs)
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
            # No operation tells how to make it: keep a copy of its values.
            content, layout = kept(leaf)
            self._memories.append(RecordedMemory(content, layout.bytes(), leaf.device, written))
            self._records.append(None)
            return TensorArgument(len(self._memories) - 1, layout)
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
        """Need no content where a whole memory is overwritten and nothing else reads it."""
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
        """Hang the contents that the operation made on what it wrote and on its results.

        `device` is the one of deferred results.
        """
        written = self.operation.written()
        for slot, index in enumerate(written):
            record = self._records[index]
            if record is not None:
                record.content = Content(self.operation, slot)
        for tensor in self._call.tensors:
            record = record_of(tensor) if id(tensor) in self._call.written else None
            if record is not None and not tensor.is_meta:
                record.present = record.content
        # A result in the memory of an argument is a view: that memory has a record already.
        known = {_address(t) for t in self._call.tensors if t.layout is torch.strided}
        for index, result in enumerate(leaves(results)):
            if not isinstance(result, Tensor) or result.layout is not torch.strided:
                continue
            if _address(result) in known or (result.is_meta and device is None):
                continue
            known.add(_address(result))
            size = result.untyped_storage().nbytes()
            self.operation.made.append(AllocatedStorage(index, Layout.of(result), size))
            slot = len(written) + len(self.operation.made) - 1
            content = Content(self.operation, slot)
            present = None if result.is_meta else content
            set_record(result, StorageRecord(content, device or result.device, present))


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
