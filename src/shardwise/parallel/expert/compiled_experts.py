"""Mixture-of-experts layers as operators that torch.compile keeps in a graph.

Only the values of the router determine how many rows an expert receives. The operators return
tensors whose number of rows is unknown to the compiler (an unbacked symbol), so that a unit with
experts stays one graph, and its experts are compiled:

    tally_experts     counts the rows per expert on all ranks         (T, k) -> order, counts
    send_to_experts   sends rows to the ranks that hold their experts (T k, D) -> (m, D)
    rows_by_expert    returns the rows of each expert                 (m, D) -> n x (m_i, D)
    rows_by_source    is the inverse of rows_by_expert                n x (m_i, D) -> (m, D)
    send_back         is the inverse of send_to_experts               (m, D) -> (T k, D)

Each of the last four is the backward pass of its inverse. As with split layers
(compiled_collectives.py), the compiler keeps operators that communicate in the order of the
program. Exact mode does not use this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from shardwise.layout.bucket_layout import even_cuts
from shardwise.model.recomputation import once
from shardwise.parallel.expert.dispatch import Exchange, Tally
from shardwise.parallel.expert.router_losses import loss_factors
from shardwise.parallel.expert.routing_run import RoutedLayer, RoutingRun
from shardwise.parallel.tensor import compiled_collectives
from shardwise.parallel.tensor.region_collectives import ShardedDim
from shardwise.tiers.copy_stream import to_device


class Layer(RoutedLayer, Protocol):
    """Interface of the layers in graphs, `sw.MoE` and FusedExperts."""

    @property
    def training(self) -> bool:
        """True in training mode."""

    @property
    def run(self) -> RoutingRun | None:
        """The state that the layers of an engine share."""

    def tally(self, experts: Tensor, mask: Tensor | None, *, recording: bool) -> Tally:
        """Count the rows per expert. Collective."""

    def exchange(self, table: list[list[int]]) -> Exchange:
        """Return the exchange of a forward pass with these counts."""


_layers: WeakValueDictionary[int, Layer] = WeakValueDictionary()
"""An operator has no objects among its arguments, so a number stands for the layer."""
_numbers = count()
UNKNOWN = -1
"""A number of rows that is only known when a graph runs."""


@dataclass(frozen=True, eq=False)
class InGraph:
    """What represents a layer in a graph.

    Args:
        number: A scalar, which stands for the layer in operators. It is a tensor, because layers
            that differ in an integer would not share their graphs.
        ranks: The number of ranks that together hold every expert once.
        lanes: The number that stands for the ranks with the same tokens (`--tensor`), this rank's
            place among them, and how many they are.
    """

    number: Tensor
    ranks: int
    lanes: tuple[int, int, int]


def in_graph(layer: Layer, run: RoutingRun) -> InGraph:
    """Define the operators, and return what represents `layer` in graphs."""
    _define()
    number = next(_numbers)
    _layers[number] = layer
    lanes = compiled_collectives.number_of(run.lanes), run.lanes.rank, run.lanes.size
    return InGraph(torch.tensor(number), run.group.size, lanes)


class TracedShare:
    """The tokens that this rank dispatches, as `TokenShare`, in a trace."""

    def __init__(self, tokens: int, lanes: tuple[int, int, int]) -> None:
        self._lanes = lanes
        _, rank, size = lanes
        self._sharded = ShardedDim(-2, tuple(pairwise(even_cuts(tokens, size))))
        first, end = self._sharded.ranges[rank]
        self.number = end - first

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of `whole` (T, n)."""
        number, rank, size = self._lanes
        if size == 1:
            return whole
        return _TakeShare.apply(whole, number, rank, self._sharded)  # type: ignore[no-any-return, no-untyped-call]

    def joined(self, part: Tensor) -> Tensor:
        """Return all ranks' rows as (T, n), from each rank's `part`."""
        number, rank, size = self._lanes
        if size == 1:
            return part
        return compiled_collectives.gather_from_region(part, number, rank, self._sharded)


class _TakeShare(torch.autograd.Function):
    """Takes this rank's tokens. The backward pass gathers the gradients of all tokens."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, number: int, rank: int, sharded: ShardedDim) -> Tensor:
        ctx.args = number, rank, sharded
        return sharded.shard(whole, rank)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        whole = compiled_collectives.gather_from_region(grad.contiguous(), *ctx.args)
        return whole, None, None, None


def attach(output: Tensor, loss: Tensor, own: Tensor, graph: InGraph) -> Tensor:
    """Return `output`, with a backward pass that also computes the gradient of `loss`.

    The backward pass also adds `own`, the counts of this forward pass, to the counts of the step.
    """
    return _Attach.apply(output, loss, own, graph.number)  # type: ignore[no-any-return, no-untyped-call]


class _Attach(torch.autograd.Function):
    """The function of `attach`."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, own: Tensor, layer: Tensor) -> Tensor:
        ctx.save_for_backward(own, layer)
        ctx.dtype = loss.dtype
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        own, layer = ctx.saved_tensors
        seed, drops = torch.ops.shardwise.router_loss_seed(grad, own, layer, ctx.dtype)
        # The experts of other ranks must not receive the gradient of a loss with weight 0, which
        # may be NaN. `where`, because 0 x NaN is NaN.
        return torch.where(drops, torch.zeros_like(grad), grad), seed, None, None


def _define() -> None:
    """Define the operators, once. Only a compiled unit needs them, and the compiler's import."""
    compiled_collectives.define()
    if hasattr(torch.ops.shardwise, "tally_experts"):
        return
    define = torch.library.custom_op
    tally = define("shardwise::tally_experts", _tally_experts, mutates_args=())
    tally.register_fake(_tally_shapes)
    send = define("shardwise::send_to_experts", _send_to_experts, mutates_args=())
    send.register_fake(_sent_shape)
    send.register_autograd(_send_to_experts_back, setup_context=_keep_number_of_rows)
    back = define("shardwise::send_back", _send_back, mutates_args=())
    back.register_fake(_sent_shape)
    back.register_autograd(_send_back_back, setup_context=_keep_number_of_rows)
    by_expert = define("shardwise::rows_by_expert", _rows_by_expert, mutates_args=())
    by_expert.register_fake(_part_shapes)
    by_expert.register_autograd(_rows_by_expert_back, setup_context=_keep_number_of_rows)
    by_source = define("shardwise::rows_by_source", _rows_by_source, mutates_args=())
    by_source.register_fake(_joined_shape)
    by_source.register_autograd(_rows_by_source_back, setup_context=_keep_sizes)
    index = define("shardwise::expert_of_row", _expert_of_row, mutates_args=())
    index.register_fake(_index_shape)
    seed = define("shardwise::router_loss_seed", _router_loss_seed, mutates_args=())
    seed.register_fake(_seed_shapes)
    for operator in (tally, send, back):
        compiled_collectives.keep_order(operator)


def _tally_experts(
    experts: Tensor,
    mask: Tensor | None,
    layer: Tensor,
    share: int,
    table_shape: Sequence[int],
    dtype: torch.dtype,
    recording: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Count the rows per expert, as `MoE.tally`.

    Returns:
        Six tensors. With --tensor, t is the number of tokens that this rank dispatches.

        - order: (t k,) int64, the order of the copies by expert.
        - inverse: (t k,) int64, the inverse permutation.
        - valid: (T,) bool, False for padding.
        - factors: (E + 1,), the factors of the router losses, or zeros without losses.
        - table: (ranks, E) int64 on the CPU, the number of rows of each rank.
        - own: (E,) int64 on the CPU, added to the counts of the step by the backward pass.
    """
    del share
    found = _layers[int(layer)]
    tally = found.tally(experts, mask, recording=recording)
    valid = experts.new_ones(experts.shape[0], dtype=torch.bool)
    if tally.valid is not None:
        valid.copy_(tally.valid)
    factors = experts.new_zeros(table_shape[1] + 1, dtype=dtype)
    if found.has_losses:
        factors = to_device(loss_factors(tally.everyone, experts.shape[1], dtype), experts.device)
    # Kept, because the backward pass of a recomputed unit gets the second result.
    own = once(lambda: torch.tensor(tally.own) * found.training)
    return tally.copies.order, tally.copies.inverse, valid, factors, torch.tensor(tally.table), own


def _tally_shapes(
    experts: Tensor,
    mask: Tensor | None,
    layer: Tensor,
    share: int,
    table_shape: Sequence[int],
    dtype: torch.dtype,
    recording: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    del mask, recording
    copies, (ranks, number) = share * experts.shape[1], table_shape
    return (
        experts.new_empty(copies),
        experts.new_empty(copies),
        experts.new_empty(experts.shape[0], dtype=torch.bool),
        experts.new_empty(number + 1, dtype=dtype),
        layer.new_empty(ranks, number),
        layer.new_empty(number),
    )


def _exchange(layer: Tensor, table: Tensor) -> Exchange:
    return _layers[int(layer)].exchange(table.tolist())


def _send_to_experts(rows: Tensor, table: Tensor, layer: Tensor, number: int) -> Tensor:
    """Send `rows`, sorted by expert. Those after the last that is counted are padding."""
    del number
    exchange = _exchange(layer, table)
    return exchange.to_experts(rows[: exchange.number_sent], None)


def _send_back(rows: Tensor, table: Tensor, layer: Tensor, number: int) -> Tensor:
    """Send the experts' outputs back. Returns `number` rows. The rows of padding are 0."""
    return _padded(_exchange(layer, table).back(rows), number)


def _rows_by_expert(
    rows: Tensor, table: Tensor, layer: Tensor, sizes: Sequence[int]
) -> list[Tensor]:
    """Return the rows of each expert; with one entry in `sizes`, all rows sorted by expert.

    Fused kernels may need at least one row, so if no rows are received, the result is a row of
    zeros.
    """
    exchange = _exchange(layer, table)
    number = sum(exchange.sizes)
    by_expert = exchange.by_expert(rows[:number])
    if len(sizes) > 1:
        return [torch.cat(blocks) for blocks in by_expert]
    return [_padded(torch.cat([block for blocks in by_expert for block in blocks]), max(number, 1))]


def _rows_by_source(parts: Sequence[Tensor], table: Tensor, layer: Tensor, number: int) -> Tensor:
    """Return the rows of `parts`, sorted by source rank, and zeros up to `number` rows."""
    exchange = _exchange(layer, table)
    if len(parts) == 1:
        parts = torch.split(parts[0][: sum(exchange.sizes)], exchange.sizes)
    return _padded(exchange.by_source(parts), number)


def _padded(rows: Tensor, number: int) -> Tensor:
    rest = number - len(rows)
    return torch.cat([rows, rows.new_zeros(rest, rows.shape[1])]) if rest else rows


def _expert_of_row(rows: Tensor, table: Tensor, layer: Tensor) -> Tensor:
    """Return each row's expert as an index into this rank's experts, (m, 1) int64."""
    sizes = torch.tensor(_exchange(layer, table).sizes)
    sizes[0] += len(rows) - sizes.sum()  # a row of zeros
    repeats = to_device(sizes, rows.device)
    experts = torch.arange(len(sizes), device=rows.device)
    return torch.repeat_interleave(experts, repeats, output_size=len(rows)).unsqueeze(1)


def _router_loss_seed(
    grad: Tensor, own: Tensor, layer: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the router losses, and whether to drop `grad`. Count the tokens.

    `grad` places the operator in the backward pass.
    """
    found = _layers[int(layer)]
    run = found.run
    assert run is not None
    found.step_counts.add(own.tolist())
    # A second pass through the same graph (--guard, several losses) must not count again. NumPy,
    # because autograd would refuse a saved tensor whose version has changed.
    own.numpy()[:] = 0
    values = []
    for value, kind in ((run.loss_seed, dtype), (run.drops, torch.bool)):
        if isinstance(value, Tensor):
            values.append(value.detach().to(grad.device, kind, copy=True).reshape(()))
        else:
            values.append(torch.full((), value, dtype=kind, device=grad.device))
    seed, drops = values
    if not (run.is_split or found.has_losses):
        drops = torch.zeros_like(drops)
    return seed, drops


def _seed_shapes(
    grad: Tensor, own: Tensor, layer: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    del own, layer
    return grad.new_empty((), dtype=dtype), grad.new_empty((), dtype=torch.bool)


def _index_shape(rows: Tensor, table: Tensor, layer: Tensor) -> Tensor:
    return layer.new_empty(rows.shape[0], 1, device=rows.device)


def _known(size: int) -> int:
    if isinstance(size, int) and size == UNKNOWN:
        return torch.library.get_ctx().new_dynamic_size()  # type: ignore[return-value]  # an int in a graph
    return size


def _sent_shape(rows: Tensor, table: Tensor, layer: Tensor, number: int) -> Tensor:
    del table, layer
    return rows.new_empty(_known(number), rows.shape[1])


def _part_shapes(rows: Tensor, table: Tensor, layer: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    del table, layer
    return [rows.new_empty(_known(size), rows.shape[1]) for size in sizes]


def _joined_shape(parts: Sequence[Tensor], table: Tensor, layer: Tensor, number: int) -> Tensor:
    del table, layer
    return parts[0].new_empty(number, parts[0].shape[1])


def _keep_number_of_rows(ctx: Any, inputs: Any, output: Any) -> None:
    del output
    rows, table, layer, _ = inputs
    ctx.save_for_backward(table, layer)
    ctx.number = rows.shape[0]


def _keep_sizes(ctx: Any, inputs: Any, output: Tensor) -> None:
    del output
    parts, table, layer, _ = inputs
    ctx.save_for_backward(table, layer)
    ctx.sizes = [part.shape[0] for part in parts]


def _send_to_experts_back(ctx: Any, grad: Tensor) -> Any:
    operator = torch.ops.shardwise.send_back
    return operator(grad, *ctx.saved_tensors, ctx.number), None, None, None


def _send_back_back(ctx: Any, grad: Tensor) -> Any:
    operator = torch.ops.shardwise.send_to_experts
    return operator(grad, *ctx.saved_tensors, ctx.number), None, None, None


def _rows_by_expert_back(ctx: Any, grads: Sequence[Tensor]) -> Any:
    operator = torch.ops.shardwise.rows_by_source
    return operator(grads, *ctx.saved_tensors, ctx.number), None, None, None


def _rows_by_source_back(ctx: Any, grad: Tensor) -> Any:
    operator = torch.ops.shardwise.rows_by_expert
    return operator(grad, *ctx.saved_tensors, ctx.sizes), None, None, None
