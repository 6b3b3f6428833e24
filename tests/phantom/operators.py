"""Runs every device operation immediately on the host's views, in the order of its stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.phantom.memory import is_on_device, span, to_device, to_host
from tests.phantom.streams import Device

aten = torch.ops.aten

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # type: ignore[attr-defined]

WAITING = {
    "_local_scalar_dense",
    "_unique2",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
"""Operations whose result the host needs before it continues."""

VIEWS = (
    "_reshape_alias",
    "as_strided",
    "set_",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
    "unfold",
    "view",
    "view.dtype",
    "view_as_complex",
    "view_as_real",
)
"""Operations that look at no values, because the CPU's versions know nothing of the memory."""


def leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the items of arguments, with those in lists."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from leaves(value)
        else:
            yield value


def written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to, by its schema."""
    schema = op._schema
    if not schema.is_mutable:
        return []
    values = (
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return [leaf for leaf in leaves(values) if isinstance(leaf, Tensor)]


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on tensors of the device that has no special function below."""
    name = op._schema.name.partition("::")[2]
    views = _Views()
    low_args = tuple(views.lowered(value) for value in _unwrapped(op, args))
    low_kwargs = {key: views.lowered(value) for key, value in kwargs.items()}
    targets = [t for t in written(op, args, kwargs) if is_on_device(t)]
    known = {id(target) for target in targets}
    _kernel(name, [x for x, _ in views.pairs if id(x) not in known], targets)
    with torch._C._AutoDispatchBelowAutograd(), _draws(op):  # type: ignore[attr-defined]
        out = op(*low_args, **low_kwargs)
    for tensor, view in views.pairs:
        if view.shape != tensor.shape:  # `out=` of another size
            aten.set_.source_Tensor.redispatch(_CPU, tensor, to_device(view))
    if isinstance(out, (list, tuple)):
        return type(out)(views.raised(name, result) for result in out)
    return views.raised(name, out)


def _unwrapped(op: Any, args: Sequence[Any]) -> Iterator[Any]:
    """Replace a Python number by the tensor that torch has made of it."""
    for value, argument in zip(args, op._schema.arguments, strict=False):
        is_number = isinstance(value, (bool, int, float)) and str(argument.type) == "Tensor"
        wide = torch.float64 if isinstance(value, float) else None
        yield torch.tensor(value, dtype=wide) if is_number else value


@contextmanager
def _draws(op: Any) -> Iterator[None]:
    """Context manager that makes CPU operations draw from the device's generator."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        yield
        return
    of_device, of_host = torch.cuda.default_generators[0], torch.default_generator
    before = of_host.get_state()
    of_host.set_state(of_device.get_state())
    try:
        yield
    finally:
        of_device.set_state(of_host.get_state())
        of_host.set_state(before)


def _kernel(name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
    Device.order.kernel(Device.current(), name, map(span, reads), map(span, writes))
    if name in WAITING:
        Device.order.synchronize(Device.order.moment(Device.current()), name)


class _Views:
    """Yield an operation's tensors on the device, with the host's views of them."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def lowered(self, value: Any) -> Any:
        """Convert an argument for the CPU's operation."""
        if is_on_device(value):
            view = to_host(value)
            self.pairs.append((value, view))
            return view
        if isinstance(value, (list, tuple)):
            return [self.lowered(each) for each in value]
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def raised(self, name: str, result: Any) -> Any:
        """Return the device's tensor of a result: the one passed in, or a new one."""
        if not isinstance(result, Tensor):
            return result
        for tensor, view in self.pairs:
            if result is view:
                return tensor
        storage = result.untyped_storage().data_ptr()
        if result.numel() and any(storage == v.untyped_storage().data_ptr() for _, v in self.pairs):
            raise NotImplementedError(f"a view, {name}, is not among operators.VIEWS")
        tensor = to_device(result)
        Device.order.result(Device.current(), name, span(tensor))
        return tensor


def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy a tensor; the host waits unless told not to, or if memory is not pinned."""
    order = Device.order
    ends = {(x.device.type == "cuda") for x in (target, source)}
    name = "copy" if len(ends) == 1 else "copy up" if is_on_device(target) else "copy down"
    order.kernel(Device.current(), name, [span(source)], [span(target)])
    on_host = [x for x in (target, source) if not is_on_device(x)]
    pinned = all(order.is_pinned(x.untyped_storage().data_ptr()) for x in on_host)
    if on_host and not (non_blocking and pinned):
        order.synchronize(order.moment(Device.current()), f"{name}, blocking")
    with torch._C._AutoDispatchBelowAutograd():  # type: ignore[attr-defined]
        low = [to_host(x) if is_on_device(x) else x for x in (target, source)]
        aten.copy_.default(*low)
    return target


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    return copy_(target, source, non_blocking)


def _to_copy(
    source: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    del layout
    like = to_host(source) if is_on_device(source) else source.detach()
    up = torch.device(device or source.device).type == "cuda"
    out = torch.empty_like(
        like,
        dtype=dtype or source.dtype,
        memory_format=memory_format or torch.preserve_format,
        pin_memory=bool(pin_memory) and not up,
    )
    return copy_(to_device(out) if up else out, source, non_blocking)


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    form = memory_format or torch.contiguous_format
    return to_device(torch.empty(size, dtype=dtype, memory_format=form))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return to_device(torch.empty_strided(size, stride, dtype=dtype))


def _as_on_cpu(op: Any) -> Any:
    return lambda *args, **kwargs: op.redispatch(_CPU, *args, **kwargs)


_libraries: list[torch.library.Library] = []


def install() -> None:
    """Register these functions with torch's dispatcher for tensors of the device."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(run, "CUDA")
    single = torch.library.Library("aten", "IMPL")
    for name in VIEWS:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        single.impl(name, _as_on_cpu(op), "CUDA")
    for name, function in (
        ("copy_", copy_),
        ("_copy_from", _copy_from),
        ("_to_copy", _to_copy),
        # One kernel for many tensors; torch would split the call otherwise.
        ("_foreach_copy_", partial(run, aten._foreach_copy_.default)),
        ("_foreach_mul.Tensor", partial(run, aten._foreach_mul.Tensor)),
        ("empty.memory_format", _empty),
        ("empty_strided", _empty_strided),
    ):
        single.impl(name, function, "CUDA")
    _libraries.extend((everything, single))
