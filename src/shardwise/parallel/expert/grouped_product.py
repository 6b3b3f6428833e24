"""Runs all of a rank's experts at once, with one grouped matrix product per linear layer.

A loop over experts launches every kernel once per expert. `torch.nn.functional.grouped_mm`
multiplies each group of rows by its own matrix in one kernel:

    rows (n, D) sorted by expert   | expert 0 | expert 1 |   expert 2   |
    weights (E, D, H)                   W0         W1          W2

The experts may be modules of any class. The first expert's `forward` runs on the rows of all
experts, and each of its linear layers becomes a grouped product with the weights of all experts.
This is correct if experts differ only in their weights, use weights only in linear layers, and
process each row independently. A trial in fp64 checks these conditions. If it fails, the layer
keeps its loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from shardwise.parallel.tensor.known_modules import signature
from shardwise.tiers.copy_stream import to_device
from shardwise.world.cpu_generators import preserved

DTYPES = (torch.bfloat16,)
"""Dtypes of the grouped kernel on CUDA."""

ALIGNMENT = 16
"""The kernel needs rows that start at multiples of this many bytes."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Product = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor | None]], Tensor]
"""Maps rows, weights and biases of a linear layer of all experts to its output."""


class _CannotGroup(Exception):
    """Raised if the experts use a parameter outside linear layers."""


class GroupedExperts:
    """Decides whether a layer's experts can run at once, and runs them."""

    def __init__(self) -> None:
        self._checked: dict[tuple[object, ...], bool] = {}
        """Results of trials, by the mode and the experts' modules."""

    def __call__(
        self, experts: Sequence[nn.Module], rows: Tensor, sizes: Sequence[int]
    ) -> Tensor | None:
        """Return the experts' outputs, or None if they need a loop.

        Args:
            experts: The experts, none of which is empty on this rank.
            rows: (n, D), sorted by expert.
            sizes: The number of rows of each expert.
        """
        if len(sizes) < 2 or not sum(sizes) or not allows(rows, experts):
            return None
        modules = [module for expert in experts for module in expert.modules()]
        if any(getattr(module, name) for module in modules for name in _HOOKS):
            return None  # a hook must see the rows of its own expert
        # A user may replace layers of experts, for example by adapters.
        key = experts[0].training, *modules
        if key not in self._checked:
            self._checked[key] = are_groupable(experts)
        if not self._checked[key]:
            return None
        ends = to_device(torch.tensor(list(accumulate(sizes)), dtype=torch.int32), rows.device)
        # Rows to the index of their expert, for biases.
        owners = torch.repeat_interleave(
            torch.arange(len(sizes), device=rows.device),
            to_device(torch.tensor(sizes), rows.device),
            output_size=len(rows),
        )

        def product(
            x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
        ) -> Tensor:
            dtype = _dtype_of(x)
            y: Tensor = _GroupedLinear.apply(x.to(dtype), ends, tuple(sizes), *weights)  # type: ignore[no-untyped-call]
            if biases[0] is None:
                return y
            stacked = torch.stack([b for b in biases if b is not None]).to(dtype)
            return y + stacked.index_select(0, owners)

        with _LinearOfAll(experts, product):
            outputs: Tensor = experts[0](rows)
        return outputs


def allows(rows: Tensor, experts: Sequence[nn.Module]) -> bool:
    """Return whether torch has a grouped kernel for these experts' device and dtype."""
    if rows.device.type != "cuda" or not hasattr(F, "grouped_mm"):
        return False
    if _dtype_of(rows) not in DTYPES:
        return False
    unit = ALIGNMENT // _dtype_of(rows).itemsize
    return all(n % unit == 0 for p in experts[0].parameters() if p.ndim == 2 for n in p.shape)


def _dtype_of(rows: Tensor) -> torch.dtype:
    kind = rows.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype


def are_groupable(experts: Sequence[nn.Module]) -> bool:
    """Return whether the experts differ only in their weights, and a trial of two succeeds.

    The trial runs the first expert's `forward` with random weights in fp64: once on all rows, and
    once on each expert's rows. The outputs and the gradients of the rows must be equal.
    """
    if len({signature(expert) for expert in experts}) > 1:
        return False
    generator = torch.Generator().manual_seed(0)
    sizes = [3, 4]
    drawn: dict[int, list[Tensor]] = {}

    def weights_like(own: Tensor) -> list[Tensor]:
        if id(own) not in drawn:
            drawn[id(own)] = [
                torch.randn(own.shape, generator=generator, dtype=torch.float64) for _ in sizes
            ]
        return drawn[id(own)]

    def linear_of(index: int | None) -> Product:
        """Return a linear layer of expert `index`, or of both experts, each on its own rows."""

        def product(
            x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
        ) -> Tensor:
            bias = biases[0]
            drawn_weights = weights_like(weights[0])
            drawn_biases: Sequence[Tensor | None] = [None for _ in sizes]
            if bias is not None:
                drawn_biases = weights_like(bias)
            indices = range(len(sizes)) if index is None else [index]
            parts = torch.split(x, sizes) if index is None else (x,)
            return torch.cat(
                [
                    F.linear(part, drawn_weights[i], drawn_biases[i])
                    for i, part in zip(indices, parts, strict=True)
                ]
            )

        return product

    width = next((p.shape[1] for p in experts[0].parameters() if p.ndim == 2), None)
    if width is None:
        return False
    rows = torch.randn(sum(sizes), width, generator=generator, dtype=torch.float64)

    def results(runs: Sequence[tuple[int | None, Tensor]]) -> list[Tensor]:
        outputs = []
        for index, part in runs:
            with _LinearOfAll(experts, linear_of(index), is_trial=True):
                outputs.append(experts[0](part))
        output = torch.cat(outputs)
        slope = torch.linspace(-1.0, 1.0, output.numel(), dtype=output.dtype).view_as(output)
        inputs = [part for _, part in runs]
        return [output.detach(), torch.cat(torch.autograd.grad(output, inputs, slope))]

    # The script's random numbers must not depend on whether there is a trial.
    with preserved(), torch.enable_grad(), torch.autocast(rows.device.type, enabled=False):
        try:
            whole = results([(None, rows.clone().requires_grad_())])
            pieces = [part.clone().requires_grad_() for part in torch.split(rows, sizes)]
            parts = results(list(enumerate(pieces)))
        except (_CannotGroup, RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            return False
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-9)
        for a, b in zip(whole, parts, strict=True)
    )


class _LinearOfAll(TorchFunctionMode):
    """Context manager inside which `product` computes the linear layers of the first expert.

    Any other use of its parameters raises _CannotGroup. In a trial, dropout does nothing.
    """

    def __init__(
        self, experts: Sequence[nn.Module], product: Product, *, is_trial: bool = False
    ) -> None:
        super().__init__()
        self._product, self._is_trial = product, is_trial
        columns = zip(*(expert.parameters() for expert in experts), strict=True)
        self._of_all = {id(column[0]): column for column in columns}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options: dict[str, Any] = kwargs or {}
        if func is F.linear:
            x, weight, *bias = (*args, *options.values())
            own = bias[0] if bias else None
            if id(weight) not in self._of_all or (own is not None and id(own) not in self._of_all):
                raise _CannotGroup
            weights = self._of_all[id(weight)]
            biases: Sequence[Tensor | None] = [None for _ in weights]
            if own is not None:
                biases = self._of_all[id(own)]
            return self._product(x, weights, biases)
        if self._is_trial and func is F.dropout:
            return args[0]
        is_read = getattr(func, "__name__", "") == "__get__"  # a shape or a dtype
        if not is_read and any(id(each) in self._of_all for each in (*args, *options.values())):
            raise _CannotGroup
        return func(*args, **options)


class _GroupedLinear(torch.autograd.Function):
    """Multiplies each group of rows by the transposed weight of its own expert."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, ends: Tensor, sizes: tuple[int, ...], *weights: Tensor
    ) -> Tensor:
        # Saves the parameters and stacks them again in the backward pass, because a saved stack
        # would hold a second copy of all experts until then.
        ctx.save_for_backward(rows, ends, *weights)
        ctx.sizes = sizes
        stacked = torch.stack(weights).to(rows.dtype)  # (E, H, D)
        return F.grouped_mm(rows.contiguous(), stacked.transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()  # (n, H)
        of_rows = None
        if ctx.needs_input_grad[0]:
            stacked = torch.stack(weights).to(rows.dtype)
            of_rows = F.grouped_mm(grad, stacked, offs=ends)
        if not any(ctx.needs_input_grad[3:]):
            return of_rows, None, None, *(None for _ in weights)
        of_weights = F.grouped_mm(grad.t(), rows.contiguous(), offs=ends)  # (E, H, D)
        for index, size in enumerate(ctx.sizes):
            if not size:  # some kernels skip empty groups, and leave memory uninitialised
                of_weights[index].zero_()
        each = of_weights.to(weights[0].dtype).unbind(0)
        return of_rows, None, None, *each
