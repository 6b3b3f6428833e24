"""Materialises deferred parameters, one at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ModelError
from shardwise.model.meta.storage_records import check_unwritten, deferred_record, value_of


def is_deferred(parameter: Tensor) -> bool:
    """Return whether `parameter` was built inside `on_meta`, so that `materialise` can fill it."""
    return deferred_record(parameter) is not None


def materialise(parameter: Tensor, name: str = "A parameter") -> Tensor:
    """Return the values that `parameter` would have in a plain build, in new memory.

    Shape, strides, dtype and device are the same as in a plain build. The result does not require
    grad. Parameters may be materialised in any order and repeatedly. Random generators do not
    change.

    Args:
        parameter: A parameter that was built inside `on_meta`.
        name: Name of the parameter for error messages.

    Raises:
        ModelError: If the parameter was not built inside `on_meta`, if it was written to after that
            block, or if its operations cannot be replayed.
    """
    record = deferred_record(parameter)
    if record is None:
        raise ModelError(
            f"{name} of shape {tuple(parameter.shape)} on {parameter.device} has no recorded "
            "values. Build the model, and copy or cast it, inside `with shardwise.on_meta():`."
        )
    check_unwritten(parameter, record, name)
    try:
        return value_of(parameter.detach(), record)
    except ModelError as error:
        raise ModelError(f"{name} of shape {tuple(parameter.shape)}: {error}") from error


def materialise_by_reset(module: nn.Module) -> list[str]:
    """Fill the meta tensors that `module` itself owns by calling its `reset_parameters`.

    Use this for models that were built under `torch.device("meta")`, which have no recorded values.
    The call draws from the current generators, so the values differ from those of a plain build.

    Returns:
        The names of the parameters and buffers that were filled.

    Raises:
        ModelError: If the module has no `reset_parameters`, or if that leaves some tensors unset.
    """
    held = {**module._parameters, **module._buffers}
    empty = {
        name: tensor
        for name, tensor in held.items()
        if tensor is not None and tensor.is_meta and not is_deferred(tensor)
    }
    kind = type(module).__name__
    reset: Any = getattr(module, "reset_parameters", None)
    if empty and reset is None:
        raise ModelError(
            f"{', '.join(empty)} of {kind} are on the meta device, and it has no reset_parameters "
            "to fill them. Build the model inside `with shardwise.on_meta():`."
        )
    for tensor in empty.values():
        # NaN marks elements that reset_parameters leaves unset.
        value = torch.empty_like(tensor, device="cpu")
        is_inexact = value.is_floating_point() or value.is_complex()
        make_real(tensor, value.fill_(torch.nan) if is_inexact else value.zero_())
    if empty:
        reset()
    missed = [name for name, tensor in empty.items() if bool(tensor.isnan().any())]
    if missed:
        raise ModelError(
            f"{kind}.reset_parameters leaves {', '.join(missed)} unset. Build the model inside "
            "`with shardwise.on_meta():`."
        )
    return list(empty)


def make_real(tensor: Tensor, value: Tensor) -> None:
    """Assign the memory of `value`, on any device, to the object `tensor`.

    The object keeps its identity, class, attributes, hooks and requires_grad, so modules,
    optimizers and ties that refer to it stay valid. Its gradient is dropped, and backward passes
    through earlier graphs raise. Raises ModelError if a view or a graph holds the old memory.
    """
    if not _is_unshared(tensor):
        raise ModelError(
            f"A tensor of shape {tuple(tensor.shape)} on {tensor.device} cannot be given memory, "
            "because a view of it, or a graph that saved it, is alive. Create such tensors inside "
            "no_grad, and apply weight norm with torch.nn.utils.parametrizations."
        )
    fresh = value.detach().requires_grad_(tensor.requires_grad)
    # Swap the C++ tensors underneath the Python objects, as torch.utils.swap_tensors does.
    torch._C._swap_tensor_impl(tensor, fresh)
    # Python and autograd both store the hooks. The assignment registers them with autograd again.
    tensor._backward_hooks = tensor._backward_hooks
    tensor._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks


def _is_unshared(tensor: Tensor) -> bool:
    """Return whether no view and no usable graph refers to `tensor`.

    If a graph refers to it only through its gradient node, install a hook that makes backward
    passes through that graph raise.
    """
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    # The use count is that of the C++ tensor: 1 for the Python object, 1 more for its gradient
    # node.
    if count == 1:
        return True
    if count > 2 or not (tensor.is_leaf and tensor.requires_grad):
        return False
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    if tensor._use_count() > 2:  # type: ignore[attr-defined]
        return False  # the node was just created, so something else holds the tensor
    node.register_prehook(_refuse_backward)
    return True


def _refuse_backward(gradients: object) -> None:
    raise ModelError(
        "backward was called on a graph that was built before the parameters were allocated. "
        "Call the model again after sw.Engine(...)."
    )
