"""Executes an operation that all ranks have agreed on, with the collectives of a transport."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from shardwise.comm import Collectives, Handle, Sum
from shardwise.horovod.coordinator import UNEVEN_ROWS, OperationRequest
from shardwise.layout import sum_tree

CHUNK = 1 << 20
"""Elements of every rank that are gathered at once, for ops that the transport cannot reduce."""

NARROW = (torch.float16, torch.bfloat16)


@dataclass
class AgreedOperation:
    """One agreed operation on this rank, with its tensors.

    `rank` is this rank's among the `members`, `rows` are those of `Response`. `sent` has the
    transport's handles: other ranks may read the given tensors until these are reusable.
    """

    request: OperationRequest
    tensors: Sequence[Tensor]
    group: Collectives
    members: Sequence[int]
    rows: Sequence[Sequence[int]]
    in_place: bool = False
    sent: list[Handle] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def wait(self, handle: Handle) -> None:
        """Wait for a collective of the transport, and keep its handle in `sent`."""
        handle.wait()
        self.sent.append(handle)


def execute(operation: AgreedOperation) -> list[Tensor]:
    """Execute the operation; returns one result for each tensor.

    A transport for one type of device alone, as NCCL is, gets copies there of tensors that are
    elsewhere.
    """
    run, there = _COLLECTIVES[operation.request.kind], operation.group.small_device
    if there.type == "cpu" or all(tensor.device.type == there.type for tensor in operation.tensors):
        return run(operation)
    moved = [tensor.detach().to(there) for tensor in operation.tensors]
    results = run(replace(operation, tensors=moved))
    if operation.in_place:
        pairs = zip(operation.tensors, results, strict=True)
        return [tensor.detach().copy_(result) for tensor, result in pairs]
    homes = [
        tensor.device for tensor in [*operation.tensors, operation.tensors[0]]
    ]  # alltoall has one more
    return [result.to(home) for result, home in zip(results, homes, strict=False)]


def joined_zeros(request: OperationRequest, device: torch.device) -> list[Tensor]:
    """The zeros with which a rank that has joined takes part; without rows, where rows may
    differ."""
    shapes = request.shapes
    if request.kind in UNEVEN_ROWS:
        shapes = tuple((0, *shape[1:]) for shape in shapes)
    tensors = zip(shapes, request.dtypes, strict=True)
    here = device if request.device == device.type else torch.device(request.device)
    return [torch.zeros(s, dtype=getattr(torch, d), device=here) for s, d in tensors]


# -- allreduce --------------------------------------------------------------------------------


def _allreduce(operation: AgreedOperation) -> list[Tensor]:
    results = [t.detach() if operation.in_place else _copy(t) for t in operation.tensors]
    for alike in _by_dtype(results):
        if operation.request.op == "Adasum":
            for tensor in alike:
                tensor.copy_(
                    adasum_reduce(tensor, operation.group, math.prod(operation.request.scale))
                )
        elif len(alike) == 1 and alike[0].is_contiguous():
            _reduce(operation, alike[0].view(-1))
        else:
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            _reduce(operation, flat)
            parts = torch.split(flat, [tensor.numel() for tensor in alike])
            for tensor, part in zip(alike, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))
    return results


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors that can share a buffer."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return list(found.values())


def _reduce(operation: AgreedOperation, flat: Tensor) -> None:
    """Reduce `flat` over all ranks, in place."""
    before, after = operation.request.scale
    if operation.request.op in _JOINED_BY_GATHER:
        _scale(flat, before)
        _reduce_by_gather(operation, flat, _JOINED_BY_GATHER[operation.request.op])
        _scale(flat, after)
    elif _is_floating(flat):
        first, then = _factors(operation, flat.dtype)
        if first != 1.0:
            flat.mul_(first)
        operation.wait(operation.group.all_reduce(flat, Sum(scale=then)))
    else:
        _scale(flat, before)
        operation.wait(operation.group.all_reduce(flat))
        _divide(operation, flat)
        _scale(flat, after)


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _factors(operation: AgreedOperation, dtype: torch.dtype) -> tuple[float, float]:
    """The factors of floating values before their sum and after it.

    Before it goes the power of two in the user's factor, which rounds nothing: then a sum stays
    finite where all of the factor before it would keep it so. The rest goes into the one rounding
    after it. Sums of fp16 are made in fp32, where none of them overflows.
    """
    before, after = operation.request.scale
    first = 1.0
    if before not in (0.0, 1.0) and math.isfinite(before) and dtype != torch.float16:
        most = math.frexp(torch.finfo(dtype).max)[1] - 2
        first = math.ldexp(1.0, max(-most, min(math.frexp(before)[1] - 1, most)))
    mean = operation.size if operation.request.op == "Average" else 1
    return first, before / first * after / mean


def _divide(operation: AgreedOperation, total: Tensor) -> None:
    """Divide a sum of integers by the number of ranks if the op is Average, truncating towards
    zero."""
    if operation.request.op == "Average":
        total.copy_(torch.div(total, operation.size, rounding_mode="trunc"))


def _scale(flat: Tensor, factor: float) -> None:
    """Multiply integers by `factor`, truncating towards zero."""
    if factor != 1.0:
        flat.copy_(flat.to(torch.float64) * factor)


def _reduce_by_gather(
    operation: AgreedOperation, flat: Tensor, join: Callable[[Tensor], Tensor]
) -> None:
    for part in torch.split(flat, CHUNK):
        rows = part.new_empty((operation.size, part.numel()))
        rows[operation.rank] = part
        _gather(operation, rows.view(-1), [part.numel()] * operation.size)
        part.copy_(join(rows))


def _product(rows: Tensor) -> Tensor:
    wide = torch.float32 if rows.dtype in NARROW else rows.dtype
    return rows.prod(0, dtype=wide)


def _minimum(rows: Tensor) -> Tensor:
    return rows.amin(0)


def _maximum(rows: Tensor) -> Tensor:
    return rows.amax(0)


_JOINED_BY_GATHER: dict[str, Callable[[Tensor], Tensor]] = {
    "Min": _minimum,
    "Max": _maximum,
    "Product": _product,
}


# -- the others -------------------------------------------------------------------------------


def _allgather(operation: AgreedOperation) -> list[Tensor]:
    """Gather (rows of this rank, ...) into (rows of all ranks, ...)."""
    found = []
    for number, tensor in enumerate(operation.tensors):
        rows = [of_rank[number] for of_rank in operation.rows]
        whole = tensor.new_empty((sum(rows), *tensor.shape[1:]))
        whole[sum(rows[: operation.rank]) :][: tensor.shape[0]] = tensor.detach()
        _gather(operation, whole.view(-1), [count * math.prod(tensor.shape[1:]) for count in rows])
        found.append(whole)
    return found


def _gather(operation: AgreedOperation, flat: Tensor, lengths: Sequence[int]) -> None:
    """All-gather the parts of all ranks into `flat`, which holds this rank's own already."""
    cuts = [0, *accumulate(length * flat.itemsize for length in lengths)]
    operation.wait(operation.group.all_gather(_bytes(flat), cuts))


def _broadcast(operation: AgreedOperation) -> list[Tensor]:
    found = []
    for given in operation.tensors:
        tensor = given.detach() if operation.in_place else _copy(given)
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1).contiguous()
        root = operation.members.index(operation.request.root)
        operation.wait(operation.group.broadcast(_bytes(flat), root))
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))
        found.append(tensor)
    return found


def _alltoall(operation: AgreedOperation) -> list[Tensor]:
    """Returns the received rows, and how many came from each rank."""
    (tensor,) = operation.tensors
    inner = math.prod(tensor.shape[1:]) * tensor.itemsize
    received = [row[operation.rank] for row in operation.rows]
    out = tensor.new_empty((sum(received), *tensor.shape[1:]))
    counts = [[splits * inner for splits in row] for row in operation.rows]
    given = _bytes(tensor.detach().contiguous().view(-1))
    operation.wait(operation.group.all_to_all(given, counts, _bytes(out.view(-1))))
    return [out, torch.tensor(received, dtype=torch.int32, device=tensor.device)]


def _reducescatter(operation: AgreedOperation) -> list[Tensor]:
    """Reduce (rows, ...) to this rank's rows of the sum; the first ranks have one more."""
    found = []
    for tensor in operation.tensors:
        rows = row_counts(tensor.shape[0], operation.size)
        inner = math.prod(tensor.shape[1:])
        out = tensor.new_empty((rows[operation.rank], *tensor.shape[1:]))
        cuts = [0, *accumulate(count * inner for count in rows)]
        before, after = operation.request.scale
        if _is_floating(tensor):
            first, then = _factors(operation, tensor.dtype)
            given = tensor.detach() if first == 1.0 else tensor.detach() * first
            flat, how = given.contiguous().view(-1), Sum(scale=then)
            operation.wait(operation.group.reduce_scatter(flat, cuts, how, into=out.view(-1)))
        else:
            _scale(flat := _copy(tensor).view(-1), before)
            operation.wait(operation.group.reduce_scatter(flat, cuts, into=out.view(-1)))
            _divide(operation, out)
            _scale(out, after)
        found.append(out)
    return found


def row_counts(rows: int, size: int) -> list[int]:
    """Rows for each of `size` ranks: as even as can be, the first ones one more."""
    return [rows // size + (place < rows % size) for place in range(size)]


def _barrier(operation: AgreedOperation) -> list[Tensor]:
    """Do nothing: the barrier is that all ranks have requested it."""
    del operation
    return []


_COLLECTIVES: dict[str, Callable[[AgreedOperation], list[Tensor]]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
    "sparse_allreduce": _allgather,
    "barrier": _barrier,
}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _bytes(flat: Tensor) -> Tensor:
    """View contiguous memory as bytes, for collectives that do not sum: any dtype goes."""
    return flat.view(torch.uint8)


def adasum_reduce(tensor: Tensor, group: Collectives, scale: float = 1.0) -> Tensor:
    """The adaptive sum of every rank's floating `tensor`, times `scale`: gradients that point the
    same way are averaged, those at right angles added.

        a + b  becomes  (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

    for two ranks, and so on for pairs of pairs (Maleki et al. 2020, "Scaling Distributed Training
    with Adaptive Summation"). Dot products are of whole tensors, in fp64. The result has the
    tensor's shape and is equal on all ranks. `group` has a power of two of ranks.
    """
    rows = tensor.new_empty((group.size, tensor.numel()))
    rows[group.rank] = tensor.reshape(-1)
    cuts = [rank * tensor.numel() for rank in range(group.size + 1)]
    group.all_gather(rows.view(-1), cuts).reusable()
    total: Tensor = sum_tree.fold(list(rows.double()), adasum_pair)
    return total.mul(scale).to(tensor.dtype).view(tensor.shape)


def adasum_pair(a: Tensor, b: Tensor) -> Tensor:
    """The adaptive sum of two flat tensors."""
    dot = torch.dot(a, b)
    return _adasum_factor(dot, a) * a + _adasum_factor(dot, b) * b


def _adasum_factor(dot: Tensor, of: Tensor) -> Tensor:
    """The factor of `of`: 1 where it is zero, and adds nothing."""
    square = torch.dot(of, of)
    return torch.where(square > 0, 1 - dot / (2 * square), torch.ones_like(square))
