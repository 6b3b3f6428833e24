"""Reads whole tensors, names and ranks of the libraries that split models."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwise.world.tensor_log import Part

LIBRARIES = {"accelerate", "deepspeed", "horovod", "lightning", "transformers", "trl"}
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?:\.|$)"
)
"""What DDP, torch.compile, FSDP1 and checkpoint wrappers put into names."""


def rank() -> int:
    """Return this process's rank from the variables of its launcher."""
    return next(int(os.environ[name]) for name in _RANKS if name in os.environ)


def world_size() -> int:
    """Return the number of ranks of the script's process group; 1 without one."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def plain_name(name: str) -> str:
    """Return a parameter's name without what wrappers put into it."""
    return _WRAPPERS.sub("", name)


def number(value: Any) -> float | None:
    """Return a number or a tensor of one element as float; None for anything else."""
    if isinstance(value, Tensor):
        value = whole(value.detach())
        return float(value) if value.ndim == 0 else None
    return float(value) if isinstance(value, int | float) else None


def whole(values: Tensor) -> Tensor:
    """Return the whole tensor of a DTensor, else the tensor. Collective for a sharded DTensor."""
    full = getattr(values, "full_tensor", None)
    return values if full is None else full()


def local(values: Tensor) -> Tensor:
    """Return the part of a DTensor that this rank has, else the tensor."""
    part = getattr(values, "to_local", None)
    return values if part is None else part()


def is_tensor_parallel(model: torch.nn.Module) -> bool:
    """Return whether ranks have parts of a layer's parameters and compute with the same rows."""
    from torch.distributed.fsdp import FSDPModule

    meshes = [getattr(p, "device_mesh", None) for p in model.parameters()]
    # FSDP2 has one axis of the mesh; with tensor parallelism as well there are two.
    axes = int(any(isinstance(module, FSDPModule) for module in model.modules()))
    return any(mesh is not None and mesh.ndim > axes for mesh in meshes)


@contextmanager
def full_parameters(models: Iterable[torch.nn.Module]) -> Iterator[bool]:
    """Let the parameters and gradients of FSDP1 models be full tensors inside the block.

    Collective for such models. Yields whether there is one; its optimizer state stays in parts.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    sharded = [model for model in models if isinstance(model, FullyShardedDataParallel)]
    with ExitStack() as stack:
        for model in sharded:
            stack.enter_context(
                FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True)
            )
        yield bool(sharded)


def gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient that an optimizer would use for a parameter; None without one."""
    return parameter.grad


def part(kind: str, name: str, values: Tensor, rank: int) -> Part:
    """Return a tensor as this rank has it, whole, as copy number `rank`."""
    return Part(kind, name, whole(values.detach()), copy=rank)
