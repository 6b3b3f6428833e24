"""Broadcasts rank 0's initial values to all ranks, and materialises tensors on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from shardwise.comm import Collectives
from shardwise.model import meta
from shardwise.model.buffers import write
from shardwise.states.parameters.named_parameters import NamedParameter


def make_alike(tensors: Iterable[Tensor], group: Collectives) -> None:
    """Broadcast rank 0's values of `tensors` to every rank. Collective."""
    if group.size == 1:
        return
    with torch.no_grad():
        for tensor in tensors:
            # Clone, because the tensor may be expanded or shared, and a broadcast writes into its
            # argument.
            value = tensor.detach().contiguous().clone().view(-1).view(torch.uint8)
            if value.numel():
                # Send bytes, which every transport supports. NCCL sends only tensors on a GPU, but
                # some buffers are on the CPU.
                value = value.to(group.small_device if value.device.type == "cpu" else value.device)
                group.broadcast(value).wait()
                write(tensor, value.to(tensor.device).view(tensor.dtype).view(tensor.shape))


def fill_unrecorded(models: Sequence[nn.Module], say: Callable[[str], None]) -> None:
    """Initialise meta tensors that were created outside `on_meta`, by calling `reset_parameters`.

    Also initialises buffers. Raises ModelError if a module with such tensors has no
    `reset_parameters`, or if `reset_parameters` leaves some of them uninitialised.
    """
    names = []
    for model in models:
        for path, module in model.named_modules():
            tensors = [*module._parameters.values(), *module._buffers.values()]
            # `on_meta` records how to compute each value; these tensors have no such record.
            if any(t is not None and t.is_meta and not meta.is_deferred(t) for t in tensors):
                names += [f"{path}.{name}" for name in meta.materialise_by_reset(module)]
    if names:
        say(
            f"shardwise: {len(names)} tensor(s) of the model were built on the meta device "
            f"({names[0]} ...): reset_parameters initialises them, so they differ from a normal "
            "build. For the same values, build the model inside: with sw.on_meta()."
        )


def make_all_real(located: Iterable[NamedParameter], device: torch.device) -> None:
    """Materialise on `device` all parameters that were created inside `on_meta`."""
    for named in located:
        # Parameters that are not on the meta device keep their values.
        if named.parameter.is_meta:
            value = meta.materialise(named.parameter, named.alias)
            meta.make_real(named.parameter, value.to(device))


def value_of(named: NamedParameter, group: Collectives, peers: Collectives) -> Tensor:
    """Return the initial value of a parameter.

    If the parameter is on the meta device, the call is collective: rank 0 of the first island in
    `peers` computes the value and broadcasts it to all ranks.
    """
    parameter = named.parameter
    if not parameter.is_meta:
        return parameter.detach()
    if group.rank == 0 and peers.rank == 0:
        value = meta.materialise(parameter, named.alias).contiguous().to(named.device)
    else:
        value = torch.empty(named.shape, dtype=parameter.dtype, device=named.device)
    # Broadcast between the islands' first ranks, then inside each island.
    route = [peers, group] if group.rank == 0 else [group]
    for each in route:
        if each.size > 1 and value.numel():
            each.broadcast(value.view(-1).view(torch.uint8)).wait()
    return value
