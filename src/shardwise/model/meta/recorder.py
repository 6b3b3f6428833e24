"""Records the operations that build a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import ModelError
from shardwise.model.meta.calls import RecordedCall, TapeEntry
from shardwise.model.meta.storage_records import (
    StorageRecord,
    deferred_record,
    keep_present,
    record_of,
    set_record,
    value_of,
)
from shardwise.model.meta.tape import (
    Layout,
    copy_content,
    give_back,
    map_leaves,
    new_storage,
    perform,
    replay,
)

_META = torch.device("meta")


class ConstructionRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records every operation inside an `on_meta` block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.quiet = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.quiet or not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        with self.working():
            return self._perform(RecordedCall(func, args, kwargs))

    @contextmanager
    def working(self) -> Iterator[None]:
        """Context manager in which operations (the recorder's own) go unrecorded."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before

    def defer(self, tensor: Tensor) -> Tensor:
        """Return the deferred twin of a real tensor. A meta tensor is returned unchanged."""
        if tensor.is_meta or tensor.layout is not torch.strided:
            return tensor
        record = record_of(tensor)
        layout, size = Layout.of(tensor), tensor.untyped_storage().nbytes()
        if record is None:
            content, layout = copy_content(tensor)
            record, size = StorageRecord(content, tensor.device), layout.bytes()
        twin = layout.view(new_storage(size, _META))
        set_record(twin, record)
        give_back(size)
        return twin

    def _perform(self, call: RecordedCall) -> Any:
        for tensor in call.tensors:
            # If the deferred twin of a real tensor was written, update the real tensor.
            record = None if tensor.is_meta else record_of(tensor)
            if record is not None and record.present != record.content:
                tensor.untyped_storage().copy_(replay(record.content))
                record.present = record.content
        # Check this first, because such a call changes the tensor's storage.
        if call.kind.moves:
            return self._move(call)
        if call.values_for_meta():
            device = call.device()
            call_on_device = call.map_arguments(
                lambda leaf: device if isinstance(leaf, torch.device) else leaf
            )
            return map_leaves(self._deferred_result, self._perform(call_on_device))
        if not call.deferred:
            return self._plain(call)
        if call.kind.queries or call.writes_real():
            return self._for_real(call)
        return self._deferred(call) if call.changes_records() else call.run()

    def _deferred_result(self, result: Any) -> Any:
        return self.defer(result) if isinstance(result, Tensor) else result

    def _plain(self, call: RecordedCall) -> Any:
        """Run and record a call without deferred arguments."""
        if not call.changes_records():
            return call.run()
        if not call.can_be_recorded():
            results = call.run()
            for tensor in call.tensors:
                if id(tensor) in call.written:
                    keep_present(tensor)
            return results
        entry = TapeEntry(call)
        results = call.run()
        entry.finish(results)
        return results

    def _deferred(self, call: RecordedCall) -> Any:
        """Record a call without running it. A random call must still advance its generator."""
        # before the call, because the entry records the arguments' contents
        entry = TapeEntry(call)
        try:
            results = call.map_arguments(_as_meta).run()
        except NotImplementedError:  # its output shapes depend on values
            return self._for_real(call)
        # Later draws must match a plain build, so advance the generator as if the values had been
        # computed.
        if call.kind.random:
            perform(entry.operation, call.generator())
        entry.finish(results, device=call.device())
        return results

    def _for_real(self, call: RecordedCall) -> Any:
        """Run a call on its deferred arguments' real values, because its result is needed now."""
        entry = TapeEntry(call)
        storages: dict[int, UntypedStorage] = {}
        stand_ins: list[tuple[Tensor, Tensor]] = []

        def real(leaf: Any) -> Any:
            record = deferred_record(leaf)
            if record is None:
                return leaf
            if id(record) not in storages:
                storages[id(record)] = replay(record.content)
            stand_ins.append((Layout.of(leaf).view(storages[id(record)]), leaf))
            return stand_ins[-1][0]

        device = call.device()
        call_on_device = call.map_arguments(
            lambda leaf: device if isinstance(leaf, torch.device) else leaf
        )
        results = call_on_device.map_arguments(real).run()
        # In-place calls return their argument. Return the user's tensor, not the temporary one.
        originals = {id(stand_in): leaf for stand_in, leaf in stand_ins}
        results = map_leaves(lambda result: originals.get(id(result), result), results)
        entry.finish(results)
        return results

    def _move(self, call: RecordedCall) -> Any:
        """Run an operation that moves a tensor to different memory: `t_`, `set_`, `resize_`."""
        target = call.tensors[0]
        record = deferred_record(target)
        if record is None:
            return call.map_arguments(
                lambda leaf: leaf if (r := deferred_record(leaf)) is None else value_of(leaf, r)
            ).run()
        before = target.untyped_storage().nbytes()
        results = call.map_arguments(self._deferred_result).run()
        moved = record_of(target)
        if moved is None or (moved is record and target.untyped_storage().nbytes() != before):
            raise ModelError(
                f"{call.function} replaced the storage of a parameter, which on_meta cannot "
                "record. Assign a new nn.Parameter instead."
            )
        return results


def _as_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return _META
    if isinstance(leaf, Tensor) and not leaf.is_meta:
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=_META)
    return leaf
