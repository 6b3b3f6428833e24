"""Makes experts compute the same bits on any number of ranks (`--exact`).

Usually an expert multiplies the rows of all ranks at once, so rounding depends on the number of
ranks. In exact mode, a rank runs its experts separately on the rows of each micro-shard, which it
receives from one source rank. All products then have the shapes that they have on one worker. The
gradients of the micro-shards are added in the tree of `layout/sum_tree.py`:

    source rank       0      1      2      3
    gradients         g0  +  g1     g2  +  g3
                          └─── + ────┘            a node of the tree, which is summed further
                                                  over the ranks with the same experts, and turns

Consecutive ranks exchange rows, and run consecutive micro-shards, so their sum is a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UsageError
from shardwise.layout import sum_tree
from shardwise.world.randomness import generator_of, seed_from


class _PerShard(torch.autograd.Function):
    """Returns views of a parameter, one per micro-shard. Adds their gradients in the tree."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, number: int, summed: set[int]) -> Any:
        ctx.args = id(parameter), summed
        return tuple(parameter.view_as(parameter) for _ in range(number))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        key, summed = ctx.args
        if key in summed:
            # autograd would add the two calls' sums. On one worker it adds the two calls of each
            # micro-shard first, which rounds differently.
            raise UsageError(
                "--exact with --expert: a mixture-of-experts layer ran twice before this backward "
                "pass, so the order of its sums would depend on the number of workers. Call the "
                "model once per backward pass, or start without --expert."
            )
        summed.add(key)
        return sum_tree.fold(grads, torch.add), None, None


class _Fresh(torch.autograd.Function):
    """Copies rows, and their gradient, to memory of their own.

    Matrix products may round differently if memory is aligned differently, and the alignment of a
    view of a larger buffer depends on the rows before it.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone(memory_format=torch.contiguous_format)


def fresh(rows: Tensor) -> Tensor:
    """Return a copy of `rows`, whose gradient is copied too."""
    return _Fresh.apply(rows)  # type: ignore[no-any-return, no-untyped-call]


def run_each(
    modules: Iterable[nn.Module],
    parts: Sequence[Tensor],
    compute: Callable[[int, Tensor], Tensor],
    summed: set[int],
) -> Tensor:
    """Run `compute(number, part)` for each micro-shard's rows, and concatenate the outputs.

    Args:
        modules: The experts that `compute` runs.
        parts: The rows of each micro-shard, in the order of the micro-shards.
        compute: Returns the outputs for the rows of one micro-shard.
        summed: The ids of the parameters that this backward pass has added up.
    """
    inside = [module for each in modules for module in each.modules()]
    owned = dict.fromkeys(p for module in inside for p in module._parameters.values())
    trained = [p for p in owned if p is not None and p.requires_grad] * torch.is_grad_enabled()
    views: dict[nn.Parameter, Sequence[Tensor]]
    if len(parts) == 1:
        # Autograd adds nothing up. But autocast casts a parameter once for all its uses, and a view
        # once for each of them, which rounds the sum of their gradients differently.
        views = {p: (p.view_as(p),) for p in trained}
    else:
        views = {p: _PerShard.apply(p, len(parts), summed) for p in trained}  # type: ignore[no-untyped-call]
    outputs = []
    for number, part in enumerate(parts):
        with _in_place_of({p: each[number] for p, each in views.items()}, inside):
            outputs.append(compute(number, part))
    return torch.cat(outputs)


@contextmanager
def _in_place_of(
    views: Mapping[nn.Parameter, Tensor], modules: Sequence[nn.Module]
) -> Iterator[None]:
    """Context manager in which `modules` compute with `views` of their parameters."""
    replaced = [
        (module, key, parameter)
        for module in modules
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter in views
    ]
    try:
        for module, key, parameter in replaced:
            module._parameters[key] = views[parameter]  # type: ignore[assignment]
        yield
    finally:
        for module, key, parameter in replaced:
            module._parameters[key] = parameter


@contextmanager
def own_stream(device: torch.device, *coordinates: int) -> Iterator[None]:
    """Context manager that seeds the device's generator with `coordinates`, and restores it.

    Dropout in an expert then depends on the micro-shard and the expert, and not on the other
    experts of this rank.
    """
    generator = generator_of(device)
    before = generator.get_state()
    generator.manual_seed(seed_from("expert", *coordinates))
    try:
        yield
    finally:
        generator.set_state(before)


@contextmanager
def without_draws(device: torch.device) -> Iterator[None]:
    """Context manager that raises UsageError if its block draws random numbers."""
    generator = generator_of(device)
    before = generator.get_state()
    yield
    if not torch.equal(generator.get_state(), before):
        raise UsageError(
            "--exact: experts that share tensors (E, ...) drew random numbers, such as for "
            "dropout, and each worker draws for its own experts. Set dropout inside the experts "
            "to 0, or build the layer with sw.MoE(router, experts, top_k=2)."
        )
