"""Reads whole tensors, names and ranks of the libraries that split models."""

from __future__ import annotations

import hashlib
import os
import random
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.layout.fingerprints import can_be_taken
from shardwise.world.tensor_log import Part

LIBRARIES = {"accelerate", "deepspeed", "horovod", "lightning", "transformers", "trl"}
PARTITIONING = ("deepspeed", "apex", "megatron", "fairscale", "colossalai")
"""Packages whose optimizers step on flat partitions of parameters, which have no names."""

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module"
    r"|_forward_module)(?:\.|$)"
)
"""What DDP, torch.compile, FSDP1, checkpoint wrappers and Fabric put into names."""


def rank() -> int:
    """Return this process's rank from the variables of its launcher."""
    return next(int(os.environ[name]) for name in _RANKS if name in os.environ)


def world_size() -> int:
    """Return the number of ranks of the script's process group; 1 without one."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def partitioning_library(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the imported package whose optimizers step on partitions; None without one."""
    home = type(optimizer).__module__.split(".")[0]
    if home in PARTITIONING:
        return home
    return next((name for name in PARTITIONING if name in sys.modules), None)


def plain_name(name: str) -> str:
    """Return a parameter's name without what wrappers put into it."""
    return _WRAPPERS.sub("", name)


def number(value: Any) -> float | None:
    """Return a number or a tensor of one element as float; None for anything else."""
    if isinstance(value, Tensor):
        value = whole(value.detach())
        return float(value) if value.ndim == 0 and not value.is_complex() else None
    return float(value) if isinstance(value, int | float) else None


def whole(values: Tensor) -> Tensor:
    """Return the whole tensor of a DTensor, else the tensor. Collective for a sharded DTensor."""
    full = getattr(values, "full_tensor", None)
    return values if full is None else full()


def local(values: Tensor) -> Tensor:
    """Return the part of a DTensor that this rank has, else the tensor."""
    part = getattr(values, "to_local", None)
    return values if part is None else part()


def is_tensor_parallel(model: nn.Module) -> bool:
    """Return whether ranks have parts of a layer's parameters and compute with the same rows."""
    from torch.distributed.fsdp import FSDPModule

    meshes = [getattr(p, "device_mesh", None) for p in model.parameters()]
    # FSDP2 has one axis of the mesh; with tensor parallelism as well there are two.
    axes = int(any(isinstance(module, FSDPModule) for module in model.modules()))
    return any(mesh is not None and mesh.ndim > axes for mesh in meshes)


def compiled_modules(models: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the modules inside torch.compile's, whose hooks would break its graphs."""
    # Importing torch._dynamo takes a second, and without it nothing is compiled.
    frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    if frame is None:
        return set()
    return {
        inner
        for model in models
        for module in model.modules()
        if isinstance(module, frame.OptimizedModule)
        for inner in module._orig_mod.modules()
    }


@contextmanager
def full_parameters(models: Iterable[nn.Module]) -> Iterator[bool]:
    """Let the parameters and gradients of FSDP1 models be full tensors inside the block.

    Collective for such models. Yields whether there is one with `use_orig_params=True`; its
    optimizer state stays in parts. FSDP1's flat parameters stay as they are: see `gathered`.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    # An FSDP1 module may be inside of another one, such as a LightningModule.
    roots = [
        root
        for model in models
        for root in FullyShardedDataParallel.fsdp_modules(model, root_only=True)
    ]
    sharded = [root for root in roots if root._use_orig_params]
    with ExitStack() as stack:
        for root in sharded:
            stack.enter_context(
                FullyShardedDataParallel.summon_full_params(root, writeback=False, with_grads=True)
            )
        yield bool(sharded)


def gathered(values: Tensor, parameter: Tensor) -> Tensor:
    """Return a whole tensor from the intervals of an FSDP1 flat parameter; other tensors as is.

    FSDP1 has flat parameters without `use_orig_params=True`. Each rank has an interval, shape
    (ceil(numel / ranks),), and the last interval ends with padding. Collective for such a
    parameter.
    """
    full = getattr(parameter, "_unpadded_unsharded_size", None)
    if full is None:
        return values
    if values.numel() >= full.numel():
        return values.reshape(-1)[: full.numel()]
    if values.numel() * world_size() >= full.numel() + 16 * world_size():
        raise NotImplementedError(
            "verify --stock: FSDP1 shards over a part of the ranks. Pass use_orig_params=True."
        )
    group = torch.distributed.group.WORLD
    parts = [torch.empty_like(values) for _ in range(world_size())]
    torch.distributed.all_gather(parts, values.contiguous(), group=group)
    return torch.cat([part.reshape(-1) for part in parts])[: full.numel()]


def gradient(parameter: Tensor, optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Return the gradient that an optimizer would use for a parameter; None without one."""
    values = parameter.grad
    if values is None:
        return None
    # A GradScaler leaves the division to fused optimizers, and tells them the scale.
    scale = getattr(optimizer, "grad_scale", None)
    return values if scale is None else values / scale


def part(kind: str, name: str, values: Tensor, rank: int) -> Part:
    """Return a copy of a tensor as this rank has it, whole, as copy number `rank`."""
    values = whole(values.detach())
    if values.is_sparse:
        values = values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return Part(kind, name, values.clone(), copy=rank)


def can_be_recorded(values: Tensor) -> bool:
    """Return whether a tensor is dense, sparse or a DTensor, and not, for example, nested."""
    return hasattr(values, "full_tensor") or values.is_sparse or can_be_taken(values)


def hash_random_states() -> dict[str, int]:
    """Return a hash of the state of each generator that a script may draw from, by library."""
    states: dict[str, bytes] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "random": repr(random.getstate()).encode(),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        _, keys, *rest = numpy.random.get_state(legacy=True)
        states["numpy"] = keys.tobytes() + repr(rest).encode()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return {
        name: int.from_bytes(hashlib.blake2b(state, digest_size=6).digest())
        for name, state in states.items()
    }


def floating_dtypes(values: Sequence[Tensor]) -> list[str]:
    """Return the names of the floating-point dtypes of tensors, such as "float32"."""
    dtypes = {each.dtype for each in values if each.is_floating_point()}
    return sorted(str(each).removeprefix("torch.") for each in dtypes)
