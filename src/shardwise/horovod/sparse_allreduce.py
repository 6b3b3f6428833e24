"""Reduces sparse COO tensors by gathering their rows, and finds parameters with sparse gradients.

rank 0   rows 1 4        ─┐
                          ├─ allgather ─▶ 1 4 4 7 ─▶ rows 1 4 7 on all ranks
rank 1   rows 4 7        ─┘
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn, optim

from shardwise.errors import BadCall
from shardwise.horovod.context import current
from shardwise.horovod.execution import NARROW
from shardwise.horovod.operation_handle import OperationHandle
from shardwise.horovod.operations import ReduceOp, submit, wait
from shardwise.horovod.process_sets import ProcessSet, global_process_set


class SparseHandle(OperationHandle):
    """A handle that can also be called, as in Horovod. `synchronize` and `poll` accept it too."""

    def __call__(self) -> Tensor:
        """Wait for the result and return it."""
        return wait(self)  # type: ignore[no-any-return]


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    *,
    note: Mapping[str, str] | None = None,
) -> SparseHandle:
    """Request the mean or sum of every rank's sparse COO tensor.

    Args:
        tensor: Sparse COO tensor of the same shape on every rank. Ranks may have different numbers
            of elements, including none.
        name: Name of the operation, the same on all ranks (default: a number).
        op: hvd.Average or hvd.Sum.
        process_set: The ranks that take part.
        note: Text for rank 0 that is sent with the request.

    Returns:
        A handle; call it to wait for the result. The result is coalesced, so each index occurs
        once.

    Raises:
        BadCall: If the tensor is dense or boolean, or if `op` is not supported.

    Example:
        ```python
        handle = hvd.sparse_allreduce_async(weight.grad, name="embedding")
        weight.grad = handle()
        ```
    """
    if tensor.layout != torch.sparse_coo:
        raise BadCall(
            f"sparse_allreduce of a tensor of layout {tensor.layout}, which is not sparse COO: use "
            "hvd.allreduce."
        )
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise BadCall(f"sparse_allreduce needs hvd.Average or hvd.Sum, not {ReduceOp(op).name}.")
    if tensor.dtype == torch.bool:
        raise BadCall("sparse_allreduce cannot sum booleans: convert them to integers first.")
    current().reduces = True
    given = tensor.detach()
    handle = submit(
        "sparse_allreduce",
        [given._indices().t().contiguous(), given._values().contiguous()],
        name,
        process_set,
        handle_type=SparseHandle,
        finish=partial(_combine_rows, tensor.shape, op, process_set.size()),
        note=note,
        op=ReduceOp(op).name,
        layout=f"a tensor of shape {tuple(tensor.shape)}",
    )
    assert isinstance(handle, SparseHandle)
    return handle


def _combine_rows(shape: torch.Size, op: ReduceOp, size: int, gathered: Sequence[Tensor]) -> Tensor:
    """Reduce all ranks' indices (count, sparse dims) and values (count, ...) to a sparse tensor."""
    places, values = gathered
    # 16-bit values are summed in fp32 and rounded once, as in a dense allreduce.
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


def empty_sparse_gradient(like: Tensor) -> Tensor:
    """Return a sparse gradient without rows, for an embedding weight `like` that is unused."""
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64, device=like.device),
        torch.empty((0, *like.shape[1:]), dtype=like.dtype, device=like.device),
        like.shape,
        check_invariants=False,
    )


def sparse_parameters(optimizer: optim.Optimizer) -> set[Tensor]:
    """Return the parameters of `optimizer` that have sparse gradients.

    These are all parameters of a SparseAdam optimizer, and the weights of nn.Embedding(sparse=True)
    and nn.EmbeddingBag(sparse=True).
    """
    params = {param for group in optimizer.param_groups for param in group["params"]}
    if isinstance(optimizer, optim.SparseAdam):
        return params
    # An optimizer does not know its modules, so search for them in memory. Waiting for the first
    # gradients would not help: a rank whose backward pass does not reach the embedding would never
    # know that its gradient is sparse.
    kinds = {*_with_subclasses(nn.Embedding), *_with_subclasses(nn.EmbeddingBag)}
    weights = {
        one._parameters.get("weight")
        for one in gc.get_objects()
        # Use `type`, because isinstance and attributes of an unknown object may run foreign code.
        if type(one) in kinds and vars(one).get("sparse")
    }
    return params & weights


def _with_subclasses(kind: type[nn.Module]) -> Iterator[type[nn.Module]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _with_subclasses(below)
