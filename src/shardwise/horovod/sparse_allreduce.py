"""Sparse tensors, reduced: the rows of all ranks, put together; and which gradients are sparse.

rank 0   rows 1 4        ─┐
                          ├─ allgather ─▶ 1 4 4 7 ─▶ rows 1 4 7, alike on all ranks
rank 1   rows 4 7        ─┘
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

from shardwise.errors import BadCall
from shardwise.horovod.asking import ReduceOp, ask, wait
from shardwise.horovod.context import current
from shardwise.horovod.handles import Handle
from shardwise.horovod.operations import NARROW
from shardwise.horovod.process_sets import ProcessSet, global_process_set


class SparseHandle(Handle):
    """To call, as Horovod's, which is a function; `synchronize` and `poll` take it as well."""

    def __call__(self) -> Tensor:
        """The result, once it has come."""
        return wait(self)  # type: ignore[no-any-return]


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    *,
    note: Mapping[str, str] | None = None,
) -> SparseHandle:
    """A handle to the mean, or the sum, of every rank's sparse COO `tensor` of one shape; call it.

    Ranks may have different numbers of elements, also none. What comes is coalesced: every place
    that any rank has, once. `note` goes with the request. Raises BadCall for other tensors and ops.
    """
    if tensor.layout != torch.sparse_coo:
        raise BadCall(f"sparse_allreduce of a tensor of layout {tensor.layout}: use hvd.allreduce.")
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise BadCall(f"sparse_allreduce takes hvd.Average or hvd.Sum, not {ReduceOp(op).name}.")
    if tensor.dtype == torch.bool:
        raise BadCall("sparse_allreduce of truth values, which have no sum: convert them first.")
    current().reduces = True
    given = tensor.detach()
    handle = ask(
        "sparse_allreduce",
        [given._indices().t().contiguous(), given._values().contiguous()],
        name,
        process_set,
        made=SparseHandle,
        finish=partial(_put_together, tensor.shape, op, process_set.size()),
        note=note,
        op=ReduceOp(op).name,
        layout=f"a tensor of shape {tuple(tensor.shape)}",
    )
    assert isinstance(handle, SparseHandle)
    return handle


def _put_together(shape: torch.Size, op: ReduceOp, size: int, gathered: Sequence[Tensor]) -> Tensor:
    """The reduction, of the places (count, sparse dims) and the values (count, ...) of all ranks.
    Sums of 16-bit numbers are made in fp32, and rounded once."""
    places, values = gathered
    wide = values.float() if values.dtype in NARROW else values
    total = torch.sparse_coo_tensor(places.t(), wide, shape, check_invariants=False).coalesce()
    if op == ReduceOp.Average:
        whole = not (wide.is_floating_point() or wide.is_complex())
        mean = torch.div(total.values(), size, rounding_mode="trunc" if whole else None)
    else:
        mean = total.values()
    return torch.sparse_coo_tensor(
        total.indices(), mean.to(values.dtype), shape, is_coalesced=True, check_invariants=False
    )


def no_rows(like: Tensor) -> Tensor:
    """A sparse gradient of a parameter, as an embedding would have it that was not used."""
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64, device=like.device),
        torch.empty((0, *like.shape[1:]), dtype=like.dtype, device=like.device),
        like.shape,
        check_invariants=False,
    )


def known_sparse(optimizer: optim.Optimizer) -> set[Tensor]:
    """Parameters of `optimizer` whose gradients are sparse: all of a SparseAdam, and those that an
    nn.Embedding(sparse=True) or EmbeddingBag has.

    Modules are looked for in memory, since an optimizer knows of none; so every rank knows at once,
    and also one whose backward does not come to the embedding.
    """
    params = {param for group in optimizer.param_groups for param in group["params"]}
    if isinstance(optimizer, optim.SparseAdam):
        return params
    return params & set(_weights_of_sparse_embeddings(gc.get_objects()))


def _weights_of_sparse_embeddings(objects: Iterable[Any]) -> Iterator[nn.Parameter]:
    kinds = {*_with_subclasses(nn.Embedding), *_with_subclasses(nn.EmbeddingBag)}
    for one in objects:
        # To ask an object for more than its class may run code of somebody else's.
        if type(one) in kinds and vars(one).get("sparse"):
            weight = one._parameters.get("weight")
            if weight is not None:
                yield weight


def _with_subclasses(kind: type[nn.Module]) -> Iterator[type[nn.Module]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _with_subclasses(below)
