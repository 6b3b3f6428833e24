"""How each operation is done, once all ranks have agreed on it, with the verbs of a transport."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from shardwise.collectives import Collectives, Handle, Sum
from shardwise.horovod import adasum
from shardwise.horovod.requests import UNEVEN, Request

CHUNK = 1 << 20
"""Elements of every rank that are looked at together where a transport knows sums only."""

NARROW = (torch.float16, torch.bfloat16)


@dataclass
class Job:
    """One operation of this rank: what was asked for, of whom, and the tensors.

    `place` is this rank's among the `members`, `rows` are those of `Verdict`. `sent` are the
    transport's handles: others may read what was given until they are reusable.
    """

    request: Request
    tensors: Sequence[Tensor]
    group: Collectives
    members: Sequence[int]
    rows: Sequence[Sequence[int]]
    in_place: bool = False
    sent: list[Handle] = field(default_factory=list)

    @property
    def place(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def wait(self, handle: Handle) -> None:
        """Wait for a verb of the transport."""
        handle.wait()
        self.sent.append(handle)


def perform(job: Job) -> list[Tensor]:
    """Do what was asked for; the results, one for each tensor.

    A transport of one device alone, as NCCL is, sees copies there of tensors that are elsewhere.
    """
    verb, there = _VERBS[job.request.kind], job.group.small_device
    if there.type == "cpu" or all(tensor.device.type == there.type for tensor in job.tensors):
        return verb(job)
    moved = [tensor.detach().to(there) for tensor in job.tensors]
    results = verb(replace(job, tensors=moved))
    if job.in_place:
        pairs = zip(job.tensors, results, strict=True)
        return [tensor.detach().copy_(result) for tensor, result in pairs]
    homes = [tensor.device for tensor in [*job.tensors, job.tensors[0]]]  # alltoall has one more
    return [result.to(home) for result, home in zip(results, homes, strict=False)]


def zeros_of(request: Request, device: torch.device) -> list[Tensor]:
    """What a rank that has joined gives to an operation of the others; no rows, where ranks may
    have different numbers of them."""
    shapes = request.shapes
    if request.kind in UNEVEN:
        shapes = tuple((0, *shape[1:]) for shape in shapes)
    tensors = zip(shapes, request.dtypes, strict=True)
    here = device if request.device == device.type else torch.device(request.device)
    return [torch.zeros(s, dtype=getattr(torch, d), device=here) for s, d in tensors]


# -- allreduce --------------------------------------------------------------------------------


def _allreduce(job: Job) -> list[Tensor]:
    results = [t.detach() if job.in_place else _copy(t) for t in job.tensors]
    for alike in _by_dtype(results):
        if job.request.op == "Adasum":
            for tensor in alike:
                tensor.copy_(adasum.reduce(tensor, job.group, math.prod(job.request.scale)))
        elif len(alike) == 1 and alike[0].is_contiguous():
            _reduce(job, alike[0].view(-1))
        else:
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            _reduce(job, flat)
            parts = torch.split(flat, [tensor.numel() for tensor in alike])
            for tensor, part in zip(alike, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))
    return results


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those that can be one buffer."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return list(found.values())


def _reduce(job: Job, flat: Tensor) -> None:
    """Make `flat` the reduction of those of all ranks, in place."""
    before, after = job.request.scale
    if job.request.op in _OTHERS:
        _scale(flat, before)
        _reduce_otherwise(job, flat, _OTHERS[job.request.op])
        _scale(flat, after)
    elif _is_floating(flat):
        first, then = _factors(job, flat.dtype)
        if first != 1.0:
            flat.mul_(first)
        job.wait(job.group.all_reduce(flat, Sum(scale=then)))
    else:
        _scale(flat, before)
        job.wait(job.group.all_reduce(flat))
        _divide(job, flat)
        _scale(flat, after)


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _factors(job: Job, dtype: torch.dtype) -> tuple[float, float]:
    """What floating values are multiplied by before their sum, and what the sum is.

    Before it goes the power of two in the user's factor, which rounds nothing: then a sum stays
    finite where all of the factor before it would keep it so. The rest goes into the one rounding
    after it. Sums of fp16 are made in fp32, where none of them overflows.
    """
    before, after = job.request.scale
    first = 1.0
    if before not in (0.0, 1.0) and math.isfinite(before) and dtype != torch.float16:
        most = math.frexp(torch.finfo(dtype).max)[1] - 2
        first = math.ldexp(1.0, max(-most, min(math.frexp(before)[1] - 1, most)))
    mean = job.size if job.request.op == "Average" else 1
    return first, before / first * after / mean


def _divide(job: Job, total: Tensor) -> None:
    """Make a sum of whole numbers their average, cut off towards zero."""
    if job.request.op == "Average":
        total.copy_(torch.div(total, job.size, rounding_mode="trunc"))


def _scale(flat: Tensor, factor: float) -> None:
    """Whole numbers are cut off towards zero."""
    if factor != 1.0:
        flat.copy_(flat.to(torch.float64) * factor)


def _reduce_otherwise(job: Job, flat: Tensor, join: Callable[[Tensor], Tensor]) -> None:
    for part in torch.split(flat, CHUNK):
        rows = part.new_empty((job.size, part.numel()))
        rows[job.place] = part
        _gather(job, rows.view(-1), [part.numel()] * job.size)
        part.copy_(join(rows))


def _product(rows: Tensor) -> Tensor:
    wide = torch.float32 if rows.dtype in NARROW else rows.dtype
    return rows.prod(0, dtype=wide)


def _least(rows: Tensor) -> Tensor:
    return rows.amin(0)


def _greatest(rows: Tensor) -> Tensor:
    return rows.amax(0)


_OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Min": _least,
    "Max": _greatest,
    "Product": _product,
}


# -- the others -------------------------------------------------------------------------------


def _allgather(job: Job) -> list[Tensor]:
    """(rows of this rank, ...) becomes (rows of all ranks, ...)."""
    found = []
    for number, tensor in enumerate(job.tensors):
        rows = [of_rank[number] for of_rank in job.rows]
        whole = tensor.new_empty((sum(rows), *tensor.shape[1:]))
        whole[sum(rows[: job.place]) :][: tensor.shape[0]] = tensor.detach()
        _gather(job, whole.view(-1), [count * math.prod(tensor.shape[1:]) for count in rows])
        found.append(whole)
    return found


def _gather(job: Job, flat: Tensor, lengths: Sequence[int]) -> None:
    """Bring the parts of all ranks into `flat`, where this rank's own lies already."""
    cuts = [0, *accumulate(length * flat.itemsize for length in lengths)]
    job.wait(job.group.all_gather(_bytes(flat), cuts))


def _broadcast(job: Job) -> list[Tensor]:
    found = []
    for given in job.tensors:
        tensor = given.detach() if job.in_place else _copy(given)
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1).contiguous()
        root = job.members.index(job.request.root)
        job.wait(job.group.broadcast(_bytes(flat), root))
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))
        found.append(tensor)
    return found


def _alltoall(job: Job) -> list[Tensor]:
    """Returns what has come, and how many rows from each rank."""
    (tensor,) = job.tensors
    inner = math.prod(tensor.shape[1:]) * tensor.itemsize
    received = [row[job.place] for row in job.rows]
    out = tensor.new_empty((sum(received), *tensor.shape[1:]))
    counts = [[splits * inner for splits in row] for row in job.rows]
    given = _bytes(tensor.detach().contiguous().view(-1))
    job.wait(job.group.all_to_all(given, counts, _bytes(out.view(-1))))
    return [out, torch.tensor(received, dtype=torch.int32, device=tensor.device)]


def _reducescatter(job: Job) -> list[Tensor]:
    """(rows, ...) becomes this rank's rows of the sum; the first ranks have one more."""
    found = []
    for tensor in job.tensors:
        rows = shares(tensor.shape[0], job.size)
        inner = math.prod(tensor.shape[1:])
        out = tensor.new_empty((rows[job.place], *tensor.shape[1:]))
        cuts = [0, *accumulate(count * inner for count in rows)]
        before, after = job.request.scale
        if _is_floating(tensor):
            first, then = _factors(job, tensor.dtype)
            given = tensor.detach() if first == 1.0 else tensor.detach() * first
            flat, how = given.contiguous().view(-1), Sum(scale=then)
            job.wait(job.group.reduce_scatter(flat, cuts, how, into=out.view(-1)))
        else:
            _scale(flat := _copy(tensor).view(-1), before)
            job.wait(job.group.reduce_scatter(flat, cuts, into=out.view(-1)))
            _divide(job, out)
            _scale(out, after)
        found.append(out)
    return found


def shares(rows: int, size: int) -> list[int]:
    """How many of `rows` each of `size` ranks gets: as even as can be, the first ones more."""
    return [rows // size + (place < rows % size) for place in range(size)]


def _barrier(job: Job) -> list[Tensor]:
    """That all have asked for it is the barrier."""
    del job
    return []


_VERBS: dict[str, Callable[[Job], list[Tensor]]] = {
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
    """Contiguous memory as bytes: what is not summed travels so, whatever it is."""
    return flat.view(torch.uint8)
