"""Gives the parameters of a trial values only while an operation uses them.

A trial needs random weights of known seeds, and a comparison of their gradients. Neither has to be
in memory at once: matrices are drawn again for each operation, and of each gradient only a product
with a random vector is kept. A trial therefore needs memory for about one matrix and its gradient,
however large the model is. Vectors are small, and keep their values.

    linear(x, weight)   ──▶  draw the weight, multiply, free it
    its backward pass   ──▶  draw the same weight, multiply, free it
    the gradient        ──▶  multiply by a random vector, free it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


@dataclass(frozen=True)
class _Weight:
    """The storage of a parameter, and the normal distribution that its values are drawn from."""

    storage: torch.UntypedStorage
    size: int
    seed: int
    mean: float
    deviation: float

    def allocate(self) -> None:
        """Allocate the storage, which costs little time and memory until it is filled."""
        self.storage.resize_(self.size * 8)

    def draw(self) -> None:
        """Allocate the storage, and fill it with the same numbers as every other time."""
        self.allocate()
        # A new tensor, because autograd rejects changes to the one that it has saved.
        flat = torch.empty(0, dtype=torch.float64, device=self.storage.device)
        flat.set_(self.storage, 0, (self.size,))  # type: ignore[call-overload]
        flat.normal_(self.mean, self.deviation, generator=_generator(flat.device, self.seed))


class DrawnWeights(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives values to the parameters that this object created, for each operation that uses one.

    A context manager. Enter it for the forward pass and for the backward pass.

    Args:
        device: The device of the parameters.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._weights: dict[int, _Weight] = {}
        """Maps the addresses of storages to their weights."""
        self._vectors: dict[int, Tensor] = {}
        self._sketches: dict[nn.Parameter, Tensor] = {}
        self._reads = _KeepsRead(self)

    def __enter__(self) -> DrawnWeights:
        self._reads.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._reads.__exit__(*error)  # type: ignore[no-untyped-call]

    def keep(self, tensor: Tensor) -> None:
        """Give `tensor` its values until the end of the trial, if it is a matrix or a view."""
        weight = self._weights.pop(tensor.untyped_storage()._cdata, None)
        if weight is not None:
            with _disable_current_modes():  # another mode may replace random numbers
                weight.draw()

    def parameter_like(self, shapes: Tensor, *, centre: float) -> nn.Parameter:
        """Return an fp64 parameter, which has values only during operations if it is a matrix.

        Args:
            shapes: A tensor of the parameter's shape.
            centre: The mean of the parameter's values.
        """
        seed = len(self._sketches)
        parameter = nn.Parameter(self._empty(shapes.shape))
        storage = parameter.untyped_storage()
        is_matrix = shapes.ndim > 1
        # About the scale of usual initial values, so that deep models stay finite.
        deviation = max(shapes.shape[1:].numel(), 1) ** -0.5 if is_matrix else 0.1
        weight = _Weight(storage, shapes.numel(), seed, centre, deviation)
        if is_matrix:
            storage.resize_(0)
            self._weights[storage._cdata] = weight
        else:
            # Fused norms in C++ may read their weight without an operation that this mode sees.
            weight.draw()
        self._sketches[parameter] = self._empty(shapes.shape[: shapes.ndim - is_matrix]).zero_()
        vector = self._vector(shapes.size(-1)) if is_matrix else None

        def take(reached: Tensor) -> None:
            grad, reached.grad = reached.grad, None
            assert grad is not None
            grad = grad.to_dense() if grad.layout is not torch.strided else grad
            self._sketches[parameter] += grad if vector is None else grad @ vector

        parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
        return parameter

    def _vector(self, width: int) -> Tensor:
        """Return the random vector (width,) that the rows of gradients are multiplied by.

        It is drawn here, because draws in the backward pass may be replaced by fixed numbers.
        """
        if width not in self._vectors:
            draw = _generator(self._device, _VECTORS + width)
            self._vectors[width] = self._empty((width,)).normal_(generator=draw)
        return self._vectors[width]

    def _empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(shape, dtype=torch.float64, device=self._device)

    def sketch_of(self, parameter: nn.Parameter) -> Tensor:
        """Return the parameter's gradient, with each row multiplied by a random vector.

        The vectors have the same values on all ranks. A sum of sketches is the sketch of a sum.

        Returns:
            The parameter's shape without the last dimension, or with it if it is the only one.
        """
        return self._sketches[parameter]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        used = {
            weight.seed: weight
            for leaf in pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
            and leaf.layout is torch.strided
            and (weight := self._weights.get(leaf.untyped_storage()._cdata)) is not None
        }
        for weight in used.values():
            # To make a view, torch checks the size of the storage, but reads nothing.
            weight.allocate() if func.overloadpacket in _VIEWS else weight.draw()
        try:
            return func(*args, **kwargs)
        finally:
            for weight in used.values():
                weight.storage.resize_(0)


class _KeepsRead(TorchFunctionMode):
    """Keeps the values of matrices that are read by code which a dispatch mode does not see.

    Examples are `print` and kernels of Triton, which call `data_ptr`. They would read freed memory.
    """

    def __init__(self, weights: DrawnWeights) -> None:
        super().__init__()
        self._weights = weights

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _READS:
            self._weights.keep(args[0])
        return func(*args, **(kwargs or {}))


_VIEWS = {
    torch.ops.aten.alias,
    torch.ops.aten.detach,
    torch.ops.aten.expand,
    torch.ops.aten.t,
    torch.ops.aten.transpose,
    torch.ops.aten.unsqueeze,
    torch.ops.aten.view,
}

_READS = {Tensor.__repr__, Tensor.__dlpack__, Tensor.data_ptr, Tensor.numpy, Tensor.tolist}

_VECTORS = 1 << 32
"""Added to the seeds of the vectors, which must be independent of the weights."""


def _generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)
