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
"""Elements per rank that are gathered at a time, for ops that the transport cannot reduce."""

NARROW = (torch.float16, torch.bfloat16)


@dataclass
class AgreedOperation:
    """An operation that all ranks have agreed on, with this rank's tensors.

    `members` are the ranks that take part, and `rows` their row counts, as in a `Response`. `sent`
    contains handles from the transport: other ranks may read the tensors until these handles are
    reusable.
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
        """Wait for a collective of the transport, and add `handle` to `sent`."""
        handle.wait()
        self.sent.append(handle)


def execute(operation: AgreedOperation) -> list[Tensor]:
    """Execute the operation, and return one result for each tensor."""
    # NCCL only supports one device type, so it gets copies of tensors on other devices.
    run, there = _COLLECTIVES[operation.request.kind], operation.group.small_device
    if there.type == "cpu" or all(tensor.device.type == there.type for tensor in operation.tensors):
        return run(operation)
    moved = [tensor.detach().to(there) for tensor in operation.tensors]
    results = run(replace(operation, tensors=moved))
    if operation.in_place:  # the results are in the copies
        pairs = zip(operation.tensors, results, strict=True)
        return [tensor.detach().copy_(result) for tensor, result in pairs]
    # An alltoall has an additional result, the numbers of rows.
    homes = [tensor.device for tensor in [*operation.tensors, operation.tensors[0]]]
    return [result.to(home) for result, home in zip(results, homes, strict=False)]


def joined_zeros(request: OperationRequest, device: torch.device) -> list[Tensor]:
    """Return the zeros that a rank contributes to `request` after it has called `join`."""
    shapes = request.shapes
    if request.kind in UNEVEN_ROWS:  # no rows, instead of rows of zeros
        shapes = tuple((0, *shape[1:]) for shape in shapes)
    tensors = zip(shapes, request.dtypes, strict=True)
    here = device if request.device == device.type else torch.device(request.device)
    return [torch.zeros(s, dtype=getattr(torch, d), device=here) for s, d in tensors]


# -- allreduce --------------------------------------------------------------------------------


def _allreduce(operation: AgreedOperation) -> list[Tensor]:
    results = [t.detach() if operation.in_place else _copy(t) for t in operation.tensors]
    # Use one collective for all tensors of a dtype, which pays its latency only once.
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in results:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same_dtype in by_dtype.values():
        if operation.request.op == "Adasum":
            scale = math.prod(operation.request.scale)
            for tensor in same_dtype:
                tensor.copy_(adasum_reduce(tensor, operation.group, scale))
        elif len(same_dtype) == 1 and same_dtype[0].is_contiguous():
            # A single contiguous tensor needs no flat copy.
            _reduce(operation, same_dtype[0].view(-1))
        else:
            flat = torch.cat([tensor.reshape(-1) for tensor in same_dtype])
            _reduce(operation, flat)
            parts = torch.split(flat, [tensor.numel() for tensor in same_dtype])
            for tensor, part in zip(same_dtype, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))
    return results


def _reduce(operation: AgreedOperation, flat: Tensor) -> None:
    """Reduce `flat` across all ranks, in place."""
    before, after = operation.request.scale
    if operation.request.op in _REDUCED_ROWS:  # ops that the transport cannot reduce
        _scale(flat, before)
        # Work in chunks, because each rank holds the rows of all ranks at the same time.
        for part in torch.split(flat, CHUNK):
            rows = part.new_empty((operation.size, part.numel()))
            rows[operation.rank] = part
            _gather(operation, rows.view(-1), [part.numel()] * operation.size)
            part.copy_(_REDUCED_ROWS[operation.request.op](rows))
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
    """Return the factors applied to floating-point values before and after their sum."""
    before, after = operation.request.scale
    first = 1.0
    # Multiply by the power of two in the user's factor before the sum. That rounds nothing, and
    # protects the sum from overflow as well as the complete factor would. The rest is part of the
    # single rounding after the sum. Not for fp16, whose sums are computed in fp32 and cannot
    # overflow.
    if before not in (0.0, 1.0) and math.isfinite(before) and dtype != torch.float16:
        most = math.frexp(torch.finfo(dtype).max)[1] - 2
        first = math.ldexp(1.0, max(-most, min(math.frexp(before)[1] - 1, most)))
    mean = operation.size if operation.request.op == "Average" else 1
    return first, before / first * after / mean


def _divide(operation: AgreedOperation, total: Tensor) -> None:
    """For Average, divide a sum of integers by the number of ranks, truncating towards zero."""
    if operation.request.op == "Average":
        total.copy_(torch.div(total, operation.size, rounding_mode="trunc"))


def _scale(flat: Tensor, factor: float) -> None:
    """Multiply integers by `factor`, truncating towards zero."""
    # fp64 represents integers exactly up to 2**53.
    if factor != 1.0:
        flat.copy_(flat.to(torch.float64) * factor)


_REDUCED_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "Min": lambda rows: rows.amin(0),
    "Max": lambda rows: rows.amax(0),
    "Product": lambda rows: rows.prod(
        0, dtype=torch.float32 if rows.dtype in NARROW else rows.dtype
    ),
}


# -- other operations -------------------------------------------------------------------------


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
    """All-gather the parts of all ranks into `flat`, which already contains this rank's part."""
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
    """Return the received rows, and the number of rows from each rank."""
    (tensor,) = operation.tensors
    inner = math.prod(tensor.shape[1:]) * tensor.itemsize
    received = [row[operation.rank] for row in operation.rows]
    out = tensor.new_empty((sum(received), *tensor.shape[1:]))
    counts = [[splits * inner for splits in row] for row in operation.rows]
    given = _bytes(tensor.detach().contiguous().view(-1))
    operation.wait(operation.group.all_to_all(given, counts, _bytes(out.view(-1))))
    return [out, torch.tensor(received, dtype=torch.int32, device=tensor.device)]


def _reducescatter(operation: AgreedOperation) -> list[Tensor]:
    """Reduce (rows, ...) to this rank's rows of the sum. The first ranks may get one extra row."""
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
            # Scale a copy, because the caller's tensor must not change.
            _scale(flat := _copy(tensor).view(-1), before)
            operation.wait(operation.group.reduce_scatter(flat, cuts, into=out.view(-1)))
            _divide(operation, out)
            _scale(out, after)
        found.append(out)
    return found


def row_counts(rows: int, size: int) -> list[int]:
    """Return each rank's number of rows. The first ranks may have one extra row."""
    return [rows // size + (place < rows % size) for place in range(size)]


_COLLECTIVES: dict[str, Callable[[AgreedOperation], list[Tensor]]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
    "sparse_allreduce": _allgather,
    "barrier": lambda _: [],  # already done when the coordinator answers
}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _bytes(flat: Tensor) -> Tensor:
    """View contiguous memory as bytes, so that collectives that do not sum accept any dtype."""
    return flat.view(torch.uint8)


def adasum_reduce(tensor: Tensor, group: Collectives, scale: float = 1.0) -> Tensor:
    """Return the adaptive sum of every rank's floating-point `tensor`, times `scale`.

    An adaptive sum averages gradients of the same direction, and adds orthogonal ones. For two
    ranks,

        a + b  becomes  (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

    The same formula then combines pairs of ranks, pairs of pairs, and so on (Maleki et al. 2020,
    "Scaling Distributed Training with Adaptive Summation", https://arxiv.org/abs/2006.02924). Dot
    products cover full tensors and are computed in fp64. The result has the tensor's shape and is
    identical on all ranks. The number of ranks in `group` must be a power of two.
    """
    # Every rank gathers all tensors and folds them in the same tree, so the result is the same on
    # all ranks. Exchanging halves would send less, but requires point-to-point messages.
    rows = tensor.new_empty((group.size, tensor.numel()))
    rows[group.rank] = tensor.reshape(-1)
    cuts = [rank * tensor.numel() for rank in range(group.size + 1)]
    group.all_gather(rows.view(-1), cuts).reusable()
    total: Tensor = sum_tree.fold(list(rows.double()), adasum_pair)
    return total.mul(scale).to(tensor.dtype).view(tensor.shape)


def adasum_pair(a: Tensor, b: Tensor) -> Tensor:
    """Return the adaptive sum of two flat tensors."""
    dot = torch.dot(a, b)
    return _adasum_factor(dot, a) * a + _adasum_factor(dot, b) * b


def _adasum_factor(dot: Tensor, of: Tensor) -> Tensor:
    """Return the factor of the vector `of` in an adaptive sum."""
    square = torch.dot(of, of)
    # Any factor is correct for a zero tensor; 1 avoids the division by 0.
    return torch.where(square > 0, 1 - dot / (2 * square), torch.ones_like(square))
