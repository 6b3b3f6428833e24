"""Deferred initialisation: builds models that are larger than memory.

    with sw.on_meta():
        model = Model()

Inside the block, each parameter moves to the meta device as soon as it is created. The operations
that fill it are recorded on a tape. For random operations, the tape also stores their generator's
state. `materialise` replays the operations of a single parameter. The parameter's values, and the
generators' states after the block, are therefore bit-identical to a plain build with the same seed.
(torchdistX's deferred initialisation uses the same method.)

Costs:

- Time: that of a plain build, because random numbers must be drawn to advance the generators, and
  that of the replay.
- Memory: one parameter at a time, all buffers, and 5 KB per random operation that a parameter still
  needs. Values that no torch operation inside the block has computed (NumPy arrays, loaded files)
  cannot be recomputed, so they stay in memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.overrides import TorchFunctionMode

from shardwise.model.meta.recorder import ConstructionRecorder
from shardwise.model.meta.storage_records import (
    StorageRecord,
    check_unwritten,
    deferred_record,
    record_of,
    set_record,
    value_of,
)

_active = threading.local()


@contextmanager
def on_meta() -> Iterator[None]:
    """Context manager that builds models whose parameters have no storage. Buffers are real.

    Shapes, dtypes, names, ties and the state of random generators are the same as in a plain build.
    Inside the block, a parameter reports the device that it would have in a plain build, and
    reading its value computes the value temporarily. Everything that changes a parameter
    (initialisation, `.to(dtype)`, `load_state_dict`) must be inside the block, because later
    changes are not recorded. A tensor that is computed from a parameter and stored as a plain
    attribute stays on the meta device. Register such a tensor as a buffer.

    Raises:
        ModelError: If an operation cannot be recorded, or a parameter was written between two
            blocks.

    Example:
        >>> import shardwise as sw
        >>> from torch import nn
        >>> with sw.on_meta():
        ...     model = nn.Linear(4, 2)
        >>> model.weight.is_meta
        True
    """
    if _recorder() is not None:
        yield
        return
    recorder = _active.recorder = ConstructionRecorder()
    # Buffers stay real, because they are small and a model's constructor may read them.
    hook = register_module_buffer_registration_hook(_keep_buffer_real)  # type: ignore[arg-type]
    try:
        with _defer_parameters() as parameters, _PlainAnswers(recorder, parameters), recorder:
            yield
        # Record the version of each parameter: later writes are not on the tape, and would be lost
        # when the parameter gets its memory.
        for parameter in (alive for reference in parameters if (alive := reference()) is not None):
            if (record := deferred_record(parameter)) is not None:
                record.versions.add(parameter._version)
        parameters.clear()  # a weak reference would prevent torch.utils.swap_tensors
    finally:
        hook.remove()
        _active.recorder = None


class _PlainAnswers(TorchFunctionMode):
    """Makes deferred tensors behave as if the model had been built on a real device."""

    def __init__(self, recorder: ConstructionRecorder, parameters: list[weakref.ref[Any]]) -> None:
        super().__init__()
        self._recorder = recorder
        self._parameters = parameters

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._recorder.quiet or not args:
            return func(*args, **kwargs)
        record = deferred_record(args[0])
        if func == _SET_DATA:
            return func(args[0], self._data_for(args[0], record, args[1]))
        if func in _ANSWERS and record is not None:
            return _ANSWERS[func](record)
        if func in _EXPORTING:
            return self._call_exporting(record, func, args, kwargs)
        if func in _INDEXING and record is not None:
            args = (args[0], _index(args[1]), *args[2:])
            if func is Tensor.__setitem__ and not isinstance(args[2], Tensor):
                args = (args[0], args[1], torch.tensor(args[2], dtype=args[0].dtype))
        return func(*args, **kwargs)

    def _data_for(self, taker: Tensor, record: StorageRecord | None, value: Tensor) -> Tensor:
        """Return `value` as the new data of `taker`: deferred if `taker` is deferred, else real."""
        other = deferred_record(value)
        with self._recorder.working():
            if record is not None:
                # `taker` may be from an earlier block. Check its record for later writes before it
                # is replaced.
                check_unwritten(taker, record)
                self._parameters.append(weakref.ref(taker))
                return self._recorder.defer(value)
            return value if other is None else value_of(value.detach(), other)

    def _call_exporting(
        self, record: StorageRecord | None, func: Any, args: Any, kwargs: Any
    ) -> Any:
        """Call a function that exports memory, for example to NumPy.

        The recorder cannot see writes to exported memory.
        """
        tensor = args[0]
        if record is not None:
            with self._recorder.working():
                tensor = value_of(tensor.detach(), record)
        elif record_of(tensor) is not None:
            set_record(tensor, None)
        return func(tensor, *args[1:], **kwargs)


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_ANSWERS: dict[Any, Callable[[StorageRecord], Any]] = {
    torch.Tensor.device.__get__: lambda record: record.device,
    torch.Tensor.is_meta.__get__: lambda record: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda record: record.device.type == "cpu",  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: lambda record: record.device.type == "cuda",  # type: ignore[attr-defined]
}
_EXPORTING = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__}
_INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}


def _index(index: Any) -> Any:
    """Return `index` with its lists and arrays converted to tensors."""
    # torch would convert them inside the recorder, which would put them on the meta device.
    if isinstance(index, tuple):
        return tuple(_index(item) for item in index)
    return torch.as_tensor(index) if isinstance(index, (list, np.ndarray)) else index


@contextmanager
def _defer_parameters() -> Iterator[list[weakref.ref[Any]]]:
    """Context manager that defers the data of every new nn.Parameter. Yields these parameters."""
    plain = nn.Parameter.__dict__["__new__"]
    parameters: list[weakref.ref[Any]] = []

    def deferred(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        recorder = _recorder()
        if recorder is None or recorder.quiet or type(data) not in (Tensor, nn.Parameter):
            return plain.__func__(cls, data, requires_grad)
        with recorder.working():
            parameter = plain.__func__(cls, recorder.defer(data), requires_grad)
        parameters.append(weakref.ref(parameter))
        return parameter

    # Patch globally, because modules call nn.Parameter directly. `_recorder` limits the effect to
    # one thread.
    nn.Parameter.__new__ = staticmethod(deferred)  # type: ignore[method-assign]
    try:
        yield parameters
    finally:
        nn.Parameter.__new__ = plain  # type: ignore[method-assign]


def _keep_buffer_real(module: nn.Module, name: str, buffer: Tensor | None) -> Tensor | None:
    """Return real values for a newly registered `buffer`, and stop recording it. Used as a hook."""
    del module, name
    recorder = _recorder()
    if recorder is None or buffer is None:
        return None
    with recorder.working():
        record = deferred_record(buffer)
        if record is not None:
            return value_of(buffer.detach(), record)
        if record_of(buffer) is not None:
            set_record(buffer, None)
        return None


def _recorder() -> ConstructionRecorder | None:
    """Return the recorder of this thread's current `on_meta` block, or None outside such blocks."""
    recorder: ConstructionRecorder | None = getattr(_active, "recorder", None)
    return recorder
