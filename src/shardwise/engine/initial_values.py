"""Gives all ranks rank 0's initial values, and memory to what was built without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from shardwise.comm import Collectives
from shardwise.model import meta
from shardwise.model.buffers import write
from shardwise.states.parameters.named_parameters import NamedParameter


def make_alike(tensors: Iterable[Tensor], group: Collectives) -> None:
    """Give every rank rank 0's values of `tensors`. Collective."""
    if group.size == 1:
        return
    with torch.no_grad():
        for tensor in tensors:
            value = tensor.detach().contiguous().clone().view(-1).view(torch.uint8)
            if value.numel():
                # Some buffers are on the CPU where NCCL moves only what is on a GPU.
                value = value.to(_reached(value, group))
                group.broadcast(value).wait()
                write(tensor, value.to(tensor.device).view(tensor.dtype).view(tensor.shape))


def _reached(value: Tensor, group: Collectives) -> torch.device:
    """The device from which `group` moves `value`: its own, unless the group is of GPUs only."""
    return group.small_device if value.device.type == "cpu" else value.device


def fill_unrecorded(models: Sequence[nn.Module], say: Callable[[str], None]) -> None:
    """Fill what was built on the meta device outside of `on_meta`, by `reset_parameters`.

    Buffers too, which `on_meta` leaves real. Raises ModelError for a module that has no
    `reset_parameters`, or whose own leaves some of them unset.
    """
    names = []
    for model in models:
        for path, module in model.named_modules():
            if any(map(_is_unrecorded, [*module._parameters.values(), *module._buffers.values()])):
                names += [f"{path}.{name}" for name in meta.materialise_by_reset(module)]
    if names:
        say(
            f"shardwise: {len(names)} tensor(s) of the model had no memory and no record "
            f"({names[0]} ...): they start from reset_parameters, not from the values of a plain "
            "build. Build the model inside with sw.on_meta() for those."
        )


def _is_unrecorded(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_meta and not meta.is_deferred(tensor)


def make_all_real(located: Iterable[NamedParameter], device: torch.device) -> None:
    """Give every parameter that was built inside `on_meta` its values, on `device`."""
    for named in located:
        if named.parameter.is_meta:
            value = meta.materialise(named.parameter, named.alias)
            meta.make_real(named.parameter, value.to(device))


def value_of(named: NamedParameter, group: Collectives, peers: Collectives) -> Tensor:
    """A parameter's starting value: rank 0's where it has no memory yet, of the first island's
    `group`. Collective then."""
    parameter = named.parameter
    if not parameter.is_meta:
        return parameter.detach()
    if group.rank == 0 and peers.rank == 0:
        value = meta.materialise(parameter, named.alias).contiguous().to(named.device)
    else:
        value = torch.empty(named.shape, dtype=parameter.dtype, device=named.device)
    among = [peers, group] if group.rank == 0 else [group]
    for each in among:
        if each.size > 1 and value.numel():
            each.broadcast(value.view(-1).view(torch.uint8)).wait()
    return value
