"""Collectives of tensor-parallel regions as operators that torch.compile keeps in a graph.

region_collectives.py runs the same collectives eagerly. Here each one is an operator of
`torch.library` with a fake implementation and a backward pass, so that a unit stays one graph.

The compiler may reorder operators that do not depend on each other, and ranks whose parts differ
in size may choose different orders. Operators are therefore registered as effects, which the
compiler keeps in the order of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from shardwise.comm import Collectives
from shardwise.model.compilation import Compiler
from shardwise.parallel.tensor.region_collectives import (
    ShardedDim,
    all_gathered,
    all_reduced,
    reduce_scattered,
)
from shardwise.parallel.tensor.sequence_parallel import TOKEN_DIM, split_tokens

_groups: WeakValueDictionary[int, Collectives] = WeakValueDictionary()
"""An operator has no objects among its arguments, so a number stands for the group."""


def number_of(group: Collectives) -> int:
    """Return the number that stands for `group` in operators, and define the operators."""
    define()
    for number, known in _groups.items():
        if known is group:
            return number
    number = max(_groups, default=-1) + 1
    _groups[number] = group
    return number


def group_of(number: int) -> Collectives:
    """Return the group that `number` stands for."""
    return _groups[number]


def keep_order(operator: Any) -> None:
    """Register `operator` as an effect, which the compiler keeps in the order of the program."""
    # torch 2.9 has no public function for effects.
    from torch._higher_order_ops import effects

    effects._register_effectful_op(operator._opoverload, effects._EffectType.ORDERED)


def in_order(compiler: Compiler) -> Compiler:
    """Return `compiler`, whose graphs run effects in the order of the program."""

    def compile_unit(unit: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        compiled = compiler(unit, forward)

        def call(*args: Any, **kwargs: Any) -> Any:
            # Not when the engine is created: the import takes seconds, and the first call needs it.
            if not torch.compiler.is_compiling():
                keep_order_in_inductor()
            return compiled(*args, **kwargs)

        return call

    return compile_unit


@cache
def keep_order_in_inductor() -> None:
    """Have inductor keep the order of effects, which torch 2.11 to 2.13 do not.

    They record that order under the names of buffers, and look for it under those of operations.
    Ranks whose parts differ in size would then run independent collectives in different orders.
    """
    from torch._higher_order_ops.effects import with_effects
    from torch._inductor.lowering import lowerings
    from torch._inductor.virtualized import V

    lower = lowerings[with_effects]

    def lower_in_order(*args: Any, **kwargs: Any) -> Any:
        before, earlier = len(V.graph.operations), list(V.graph.effectful_ops.values())
        result = lower(*args, **kwargs)
        # Older versions keep the order, and have no `additional_star_deps`.
        if hasattr(V.graph, "additional_star_deps"):
            names = [each.get_name() for each in earlier]
            for operation in V.graph.operations[before:]:
                V.graph.additional_star_deps[operation.get_operation_name()].update(names)
        return result

    lowerings[with_effects] = lower_in_order


def copy_to_region(value: Tensor, number: int) -> Tensor:
    """Return a copy of `value`, identical on all ranks, that each rank may use differently."""
    return _CopyToRegion.apply(value, number)  # type: ignore[no-any-return, no-untyped-call]


def copies(values: Sequence[Tensor], number: int) -> list[Tensor]:
    """Copy several values like `copy_to_region`, so that one all-reduce sums all gradients.

    compiled_sequences.py replaces the operator, and could not replace a traced Function.
    """
    return torch.ops.shardwise.copies(values, number)  # type: ignore[no-any-return]


def reduce_from_region(value: Tensor, number: int, allowed: int = -1) -> Tensor:
    """Return the sum of `value` over all ranks, on all ranks.

    `allowed` is only for the check of a graph (compiled_units.py).
    """
    return torch.ops.shardwise.all_reduce(value, number, allowed)  # type: ignore[no-any-return]


def gather_from_region(part: Tensor, number: int, rank: int, sharded: ShardedDim) -> Tensor:
    """Gather a split tensor that all ranks then use in the same way."""
    edges = [0, *(end for _, end in sharded.ranges)]
    # The traced backward pass takes the part of one rank. With the rank among the arguments, ranks
    # do not share graphs in torch's cache on disk.
    return torch.ops.shardwise.all_gather(part, sharded.dim, edges, number, rank)  # type: ignore[no-any-return]


class _CopyToRegion(torch.autograd.Function):
    """An operator would have to copy the memory. A Function may return a view."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, number: int) -> Tensor:
        ctx.number = number
        # User code does not call this operator, so it marks the start of a region in a graph.
        return torch.ops.aten.alias.default(value)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.ops.shardwise.all_reduce(grad, ctx.number, -1), None


def define() -> None:
    """Define the operators, once. Only a compiled unit needs them, and the compiler's import."""
    if hasattr(torch.ops.shardwise, "all_reduce"):
        return
    all_reduce = torch.library.custom_op("shardwise::all_reduce", _all_reduce, mutates_args=())
    all_reduce.register_fake(lambda value, number, allowed: _contiguous_like(value))
    all_reduce.register_autograd(lambda ctx, grad: (grad, None, None))
    all_gather = torch.library.custom_op("shardwise::all_gather", _all_gather, mutates_args=())
    all_gather.register_fake(_gathered_shape)
    all_gather.register_autograd(_take_part, setup_context=_keep_range)
    copies = torch.library.custom_op("shardwise::copies", _copies, mutates_args=())
    copies.register_fake(lambda values, number: [_contiguous_like(each) for each in values])
    copies.register_autograd(_sum_grads, setup_context=_keep_number)
    scatter = torch.library.custom_op("shardwise::scatter_tokens", _scatter_tokens, mutates_args=())
    scatter.register_fake(_part_shape)
    scatter.register_autograd(_gather_grad, setup_context=_keep_tokens)
    reduce_scatter = torch.library.custom_op(
        "shardwise::reduce_scatter_tokens", _reduce_scatter_tokens, mutates_args=()
    )
    reduce_scatter.register_fake(_part_shape)
    reduce_scatter.register_autograd(_gather_grad, setup_context=_keep_tokens)
    gather = torch.library.custom_op("shardwise::gather_tokens", _gather_tokens, mutates_args=())
    gather.register_fake(_tokens_shape)
    gather.register_autograd(_scatter_grad, setup_context=_keep_place)
    # Copies and scatters do not communicate in the forward pass.
    for operator in (all_reduce, all_gather, reduce_scatter, gather):
        keep_order(operator)


def _all_reduce(value: Tensor, number: int, allowed: int) -> Tensor:
    del allowed
    return all_reduced(value, _groups[number])


def _contiguous_like(value: Tensor) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _copies(values: Sequence[Tensor], number: int) -> list[Tensor]:
    del number
    return [value.clone(memory_format=torch.contiguous_format) for value in values]


def _keep_number(ctx: Any, inputs: Any, output: Any) -> None:
    del output
    ctx.number = inputs[1]


def _sum_grads(ctx: Any, grads: Sequence[Tensor]) -> Any:
    # Use one collective for all gradients, because its latency costs more than the copy.
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    total = torch.ops.shardwise.all_reduce(flat, ctx.number, -1)
    sums = torch.split(total, [grad.numel() for grad in grads])
    return [
        part.view(grad.shape).to(grad.dtype) for part, grad in zip(sums, grads, strict=True)
    ], None


def _all_gather(part: Tensor, dim: int, edges: Sequence[int], number: int, rank: int) -> Tensor:
    del rank
    return all_gathered(part, _groups[number], ShardedDim(dim, tuple(pairwise(edges))))


def _gathered_shape(part: Tensor, dim: int, edges: Sequence[int], number: int, rank: int) -> Tensor:
    del number, rank
    return part.new_empty(ShardedDim(dim, tuple(pairwise(edges))).whole_shape(part.shape))


def _keep_range(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, ctx.dim, edges, _, rank = inputs
    ctx.first, ctx.end = edges[rank], edges[rank + 1]


def _take_part(ctx: Any, grad: Tensor) -> Any:
    part = grad.narrow(ctx.dim, ctx.first, ctx.end - ctx.first).contiguous()
    return part, None, None, None, None


# Operators on tensors that are split by tokens. Sizes may be symbolic, so they have no ranges among
# their arguments. `place` consists of the group's number, this rank, and the number of ranks.


def _scatter_tokens(value: Tensor, place: Sequence[int]) -> Tensor:
    _, rank, size = place
    sharded = split_tokens(value.shape[TOKEN_DIM], size)
    return sharded.shard(value, rank).clone(memory_format=torch.contiguous_format)


def _reduce_scatter_tokens(value: Tensor, place: Sequence[int]) -> Tensor:
    number, _, size = place
    return reduce_scattered(value, _groups[number], split_tokens(value.shape[TOKEN_DIM], size))


def _gather_tokens(part: Tensor, tokens: int, place: Sequence[int], sums: bool) -> Tensor:
    del sums
    number, _, size = place
    return all_gathered(part, _groups[number], split_tokens(tokens, size))


def part_of(value: Tensor, place: Sequence[int]) -> Tensor:
    """Return an empty tensor with the shape of this rank's tokens of `value`."""
    _, rank, size = place
    shape = list(value.shape)
    # The first ranks get one extra token each, as in `split_tokens`. The length may be symbolic.
    shape[TOKEN_DIM] = (shape[TOKEN_DIM] + size - 1 - rank) // size
    return value.new_empty(shape)


def _part_shape(value: Tensor, place: Sequence[int]) -> Tensor:
    return part_of(value, place)


def _tokens_shape(part: Tensor, tokens: int, place: Sequence[int], sums: bool) -> Tensor:
    del place, sums
    shape = list(part.shape)
    shape[TOKEN_DIM] = tokens
    return part.new_empty(shape)


def _keep_tokens(ctx: Any, inputs: Any, output: Tensor) -> None:
    del output
    value, ctx.place = inputs
    ctx.tokens = value.shape[TOKEN_DIM]


def _gather_grad(ctx: Any, grad: Tensor) -> Any:
    return torch.ops.shardwise.gather_tokens(grad, ctx.tokens, ctx.place, False), None


def _keep_place(ctx: Any, inputs: Any, output: Tensor) -> None:
    del output
    _, _, ctx.place, ctx.sums = inputs


def _scatter_grad(ctx: Any, grad: Tensor) -> Any:
    operators = torch.ops.shardwise
    take = operators.reduce_scatter_tokens if ctx.sums else operators.scatter_tokens
    return take(grad, ctx.place), None, None, None
