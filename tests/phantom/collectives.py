"""NCCL's collectives on tensors of the device: Gloo moves their bytes, at once or in the wait.

Each communicator has a stream, as in NCCL. A collective is ordered after all work on the current
stream, and a reader of its result is ordered after it only if `wait` was called. Tensors of other
devices, and other backends, use torch's functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from tests.phantom.clocks import Seen
from tests.phantom.memory import is_on_device, span, to_host
from tests.phantom.planting import COLLECTIVE, Planted
from tests.phantom.streams import Device

Group = dist.ProcessGroup | None

NCCL = ("nccl", "cpu:gloo,cuda:nccl")
"""The backends that include NCCL."""


def move_bytes(group: Group, move: Callable[[], Any], writes: Sequence[Tensor]) -> Any:
    """Run the function that moves the bytes of a collective. abortable.py replaces it."""
    del group, writes
    return move()


made: list[dict[str, Any]] = []
"""Keywords of all groups that were made over NCCL."""

calls: Counter[str] = Counter()
sent: Counter[torch.dtype] = Counter()
"""Bytes that this rank has sent in collectives, by dtype."""

_REAL = {
    name: getattr(dist, name)
    for name in (
        "all_gather",
        "all_reduce",
        "all_to_all_single",
        "broadcast",
        "init_process_group",
        "new_group",
        "reduce_scatter",
    )
}


class Work:
    """A collective that no one may treat as complete before `wait`.

    `moving` is Gloo's work, if that runs in parallel with the host, for example because two ranks
    send before they receive. The tensors live until `wait`, as in torch, or until the collective is
    known to be complete.
    """

    _stashed: ClassVar[dict[Work, Sequence[Tensor]]] = {}

    def __init__(self, seen: Seen, moving: Any, tensors: Sequence[Tensor]) -> None:
        self._seen = seen
        self._moving = moving
        for work in [work for work in self._stashed if work.is_completed()]:
            del self._stashed[work]
        self._stashed[self] = tensors

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait, but not the host."""
        del timeout
        moving, self._moving = self._moving, None
        if moving is not None:
            moving.wait()
        if not Planted.leaves_out(COLLECTIVE):
            Device.order.wait(Device.current(), self._seen)
        self._stashed.pop(self, None)
        return True

    def is_completed(self) -> bool:
        """Return whether the host knows that it is complete."""
        return Device.order.has_happened(self._seen)


def _launch(
    name: str,
    group: Group,
    async_op: bool,
    move: Callable[[], Any],
    reads: Sequence[Tensor] = (),
    writes: Sequence[Tensor] = (),
) -> Work | None:
    """Run a collective after the current stream, on its communicator's stream."""
    for tensor in (*reads, *writes):
        assert is_on_device(tensor), f"NCCL moves what is on a GPU: {name} of {tensor.device}"
        assert tensor.is_contiguous(), f"NCCL moves contiguous tensors: {name}"
    order = Device.order
    stream = f"NCCL's stream of {getattr(group, 'group_name', 'all ranks')}"
    with order.lock:
        calls[name] += 1
        for tensor in reads:
            sent[tensor.dtype] += tensor.numel() * tensor.element_size()
        order.wait(stream, order.moment(Device.current()))
        order.kernel(stream, name, map(span, reads), map(span, writes))
        seen = order.moment(stream)
    work = Work(seen, move_bytes(group, move, writes), (*reads, *writes))
    return work if async_op else (work.wait() and None)


def _init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    if backend in NCCL:
        made.append(kwargs)
        backend, kwargs = "gloo", {k: v for k, v in kwargs.items() if k != "device_id"}
    _REAL["init_process_group"](backend, *args, **kwargs)


def _new_group(*args: Any, **kwargs: Any) -> Any:
    if kwargs.get("backend") in NCCL:
        made.append(kwargs)
        kwargs = {k: v for k, v in kwargs.items() if k != "device_id"} | {"backend": "gloo"}
    return _REAL["new_group"](*args, **kwargs)


def _all_reduce(
    tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    if not is_on_device(tensor):
        return _REAL["all_reduce"](tensor, op, group, async_op)

    def move() -> Any:
        return _REAL["all_reduce"](to_host(tensor), op, group, True)

    return _launch("all_reduce", group, async_op, move, [tensor], [tensor])


def _broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    if not is_on_device(tensor):
        return _REAL["broadcast"](tensor, src, group, async_op, group_src)

    def move() -> Any:
        return _REAL["broadcast"](to_host(tensor), src, group, True, group_src)

    here = dist.get_rank(None if group_src is None else group)
    sends = here == (src if group_src is None else group_src)
    ends = {"reads": [tensor]} if sends else {"writes": [tensor]}
    return _launch("broadcast", group, async_op, move, **ends)


def _all_gather(
    tensors: Sequence[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False
) -> Any:
    if not is_on_device(tensor):
        return _REAL["all_gather"](tensors, tensor, group, async_op)

    def move() -> None:
        for rank, part in enumerate(
            tensors
        ):  # tensors of different lengths, which Gloo cannot gather
            whole = to_host(tensor).clone() if rank == dist.get_rank(group) else to_host(part)
            if whole.numel():
                _REAL["broadcast"](whole, group_src=rank, group=group)
            to_host(part).copy_(whole)

    # A rank's own part is not written if it is in place.
    written = [part for part in tensors if part.data_ptr() != tensor.data_ptr()]
    return _launch("all_gather", group, async_op, move, [tensor], written)


def _all_gather_single(
    output: Tensor, tensor: Tensor, group: Group = None, async_op: bool = False
) -> Any:
    def move() -> None:
        parts = [torch.empty_like(to_host(tensor)) for _ in range(dist.get_world_size(group))]
        _REAL["all_gather"](parts, to_host(tensor).clone(), group=group)
        to_host(output).view(-1).copy_(torch.cat(parts).view(-1))

    # A rank's own part of the result is not written: NCCL gathers in place.
    place, flat = dist.get_rank(group), output.view(-1)
    first, length = place * tensor.numel(), tensor.numel()
    in_place = tensor.data_ptr() == flat[first:].data_ptr()
    written = [flat[:first], flat[first + length :]] if in_place else [output]
    return _launch("all_gather_single", group, async_op, move, [tensor], written)


def _reduce_scatter_single(
    output: Tensor,
    tensor: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    assert output.dtype == tensor.dtype
    assert output.numel() * size == tensor.numel()

    def move() -> None:
        whole = to_host(tensor).clone().view(-1)
        _REAL["all_reduce"](whole, op, group)
        to_host(output).copy_(whole.chunk(size)[rank].view(output.shape))

    return _launch("reduce_scatter_single", group, async_op, move, [tensor], [output])


def _reduce_scatter(
    output: Tensor,
    tensors: Sequence[Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    def move() -> None:
        for rank, part in enumerate(tensors):
            whole = to_host(part).clone()
            if whole.numel():
                _REAL["all_reduce"](whole, op, group)
            if rank == dist.get_rank(group):
                to_host(output).copy_(whole)

    return _launch("reduce_scatter", group, async_op, move, list(tensors), [output])


def _all_to_all_single(
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    if not is_on_device(tensor):
        return _REAL["all_to_all_single"](
            output, tensor, output_split_sizes, input_split_sizes, group, async_op
        )

    def move() -> None:
        got = torch.empty_like(to_host(output))
        _REAL["all_to_all_single"](
            got, to_host(tensor).clone(), output_split_sizes, input_split_sizes, group
        )
        to_host(output).copy_(got)

    return _launch("all_to_all", group, async_op, move, [tensor], [output])


def install() -> None:
    """Replace torch.distributed's functions in all modules that import them later."""
    functions = {
        "all_gather": _all_gather,
        "all_gather_into_tensor": _all_gather_single,
        "all_gather_single": _all_gather_single,
        "all_reduce": _all_reduce,
        "all_to_all_single": _all_to_all_single,
        "broadcast": _broadcast,
        "init_process_group": _init_process_group,
        "new_group": _new_group,
        "reduce_scatter": _reduce_scatter,
        "reduce_scatter_single": _reduce_scatter_single,
        "reduce_scatter_tensor": _reduce_scatter_single,
    }
    for name, function in functions.items():
        if hasattr(dist, name):
            setattr(dist, name, function)
