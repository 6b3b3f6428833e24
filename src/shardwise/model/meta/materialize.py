"""Materialises deferred parameters: makes the values of one after another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ModelError
from shardwise.model.meta.storage_records import check_unwritten, deferred_record, value_of


def is_deferred(parameter: Tensor) -> bool:
    """Whether `parameter` was built inside `on_meta`, and `materialise` can make its values."""
    return deferred_record(parameter) is not None


def materialise(parameter: Tensor, name: str = "A parameter") -> Tensor:
    """The values that a plain build gives `parameter`, in memory of their own; no gradient.

    Same shape, strides and dtype, on the device of a plain build. May be called for any parameter
    in any order and again; random generators stay as they are. `name` is for the message.

    Raises ModelError for a parameter that was not built inside `on_meta`, that was written after
    it, or whose operations cannot be repeated.
    """
    record = deferred_record(parameter)
    if record is None:
        raise ModelError(
            f"{name} of shape {tuple(parameter.shape)} on {parameter.device} has no recorded "
            "values: build the model, and copy or cast it, inside `with shardwise.on_meta():`."
        )
    check_unwritten(parameter, record, name)
    try:
        return value_of(parameter.detach(), record)
    except ModelError as error:
        raise ModelError(f"{name} of shape {tuple(parameter.shape)}: {error}") from error


def materialise_by_reset(module: nn.Module) -> list[str]:
    """Fill what `module` itself holds on the meta device by its `reset_parameters`.

    For models that were built under `torch.device("meta")` and have no recorded values. Draws from
    the present generators, so the values are not those of a plain build. Returns the names of the
    parameters and buffers that were filled. Raises ModelError where the module has no
    `reset_parameters`, or that leaves some of them unset.
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
            f"{', '.join(empty)} of {kind} are on the meta device and it has no reset_parameters "
            "to fill them: build the model inside `with shardwise.on_meta():`."
        )
    for tensor in empty.values():
        # NaN shows what reset_parameters leaves unset.
        value = torch.empty_like(tensor, device="cpu")
        is_inexact = value.is_floating_point() or value.is_complex()
        make_real(tensor, value.fill_(torch.nan) if is_inexact else value.zero_())
    if empty:
        reset()
    missed = [name for name, tensor in empty.items() if bool(tensor.isnan().any())]
    if missed:
        raise ModelError(
            f"{kind}.reset_parameters leaves {', '.join(missed)} unset: build the model inside "
            "`with shardwise.on_meta():`."
        )
    return list(empty)


def make_real(tensor: Tensor, value: Tensor) -> None:
    """Give the object `tensor` the memory of `value`, whatever device it was on.

    The object stays the same one, with its class, attributes, hooks and requires_grad, so modules,
    optimizers and ties that hold it need not know. Its gradient is dropped, and a graph of forward
    that was made before refuses backward. Raises ModelError when a view or a graph holds it as it
    was.
    """
    if not _alone(tensor):
        raise ModelError(
            f"A tensor of shape {tuple(tensor.shape)} on {tensor.device} cannot be given memory: "
            "a view of it, or a graph that saved it, is alive. Make such tensors inside no_grad, "
            "and weight norm by torch.nn.utils.parametrizations."
        )
    fresh = value.detach().requires_grad_(tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, fresh)
    # Hooks are known to Python and to autograd; assigning tells the latter again.
    tensor._backward_hooks = tensor._backward_hooks
    tensor._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks


def _alone(tensor: Tensor) -> bool:
    """Whether nothing in autograd holds `tensor`, but for graphs, which are told to refuse."""
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    if count == 1:
        return True
    if count > 2 or not (tensor.is_leaf and tensor.requires_grad):
        return False
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    if tensor._use_count() > 2:  # type: ignore[attr-defined]
        return False  # the node is new, so what holds the tensor is something else
    node.register_prehook(_refuse_backward)
    return True


def _refuse_backward(gradients: object) -> None:
    raise ModelError(
        "backward of a graph that was made before its parameters had memory: call the model "
        "again after the engine has taken it over."
    )
