"""Reads full tensors, names and ranks from the libraries that split models."""

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
"""Packages whose optimizers update flat partitions of parameters, which have no names."""

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module"
    r"|_forward_module)(?:\.|$)"
)
"""The name parts that DDP, torch.compile, FSDP1, checkpoint wrappers and Fabric add."""


def rank() -> int:
    """Return this process's rank, which the launcher has set in the environment."""
    return next(int(os.environ[name]) for name in _RANKS if name in os.environ)


def world_size() -> int:
    """Return the size of the script's process group, or 1 if it has none."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def partitioning_library(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the imported package whose optimizers update partitions, or None if there is none."""
    home = type(optimizer).__module__.split(".")[0]
    if home in PARTITIONING:
        return home
    return next((name for name in PARTITIONING if name in sys.modules), None)


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add."""
    return _WRAPPERS.sub("", name)


def number(value: Any) -> float | None:
    """Return a number or one-element tensor as a float, or None for anything else."""
    if isinstance(value, Tensor):
        value = whole(value.detach())
        return float(value) if value.ndim == 0 and not value.is_complex() else None
    return float(value) if isinstance(value, int | float) else None


def whole(values: Tensor) -> Tensor:
    """Return the full tensor if `values` is a DTensor, otherwise `values`.

    Collective for a sharded DTensor.
    """
    full = getattr(values, "full_tensor", None)
    return values if full is None else full()


def local(values: Tensor) -> Tensor:
    """Return this rank's shard if `values` is a DTensor, otherwise `values`."""
    part = getattr(values, "to_local", None)
    return values if part is None else part()


def is_tensor_parallel(model: nn.Module) -> bool:
    """Return whether ranks hold parts of a layer's parameters and process the same rows."""
    from torch.distributed.fsdp import FSDPModule

    meshes = [getattr(p, "device_mesh", None) for p in model.parameters()]
    # FSDP2 uses one mesh axis. With tensor parallelism as well, there are two.
    axes = int(any(isinstance(module, FSDPModule) for module in model.modules()))
    return any(mesh is not None and mesh.ndim > axes for mesh in meshes)


def compiled_modules(models: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the modules inside compiled modules. Hooks on them would cause graph breaks."""
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
    """Context manager in which FSDP1 models have full parameters and gradients.

    Collective for FSDP1 models. Yields whether any of them has `use_orig_params=True`. The
    optimizer state of such models stays sharded. FSDP1's flat parameters are left unchanged (see
    `gathered`).
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
    """Gather a full tensor from the ranks' shards of an FSDP1 flat parameter.

    For any other parameter, return `values` unchanged. FSDP1 has flat parameters unless
    `use_orig_params=True`. Each rank's shard has shape (ceil(numel / ranks),), and the last one
    ends with padding. Collective for a flat parameter.
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
    """Return the gradient that the optimizer would use for the parameter, or None."""
    values = parameter.grad
    if values is None:
        return None
    # A GradScaler leaves unscaling to fused optimizers, and sets `grad_scale` on them.
    scale = getattr(optimizer, "grad_scale", None)
    return values if scale is None else values / scale


def part(kind: str, name: str, values: Tensor, rank: int) -> Part:
    """Return a dense copy of this rank's full tensor as copy number `rank`."""
    values = whole(values.detach())
    if values.is_sparse:
        values = values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return Part(kind, name, values.clone(), copy=rank)


def can_be_recorded(values: Tensor) -> bool:
    """Return whether the tensor's layout can be recorded: dense, sparse or DTensor."""
    return hasattr(values, "full_tensor") or values.is_sparse or can_be_taken(values)


def hash_random_states() -> dict[str, int]:
    """Return a hash of each generator's state, by library."""
    states: dict[str, bytes] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "random": repr(random.getstate()).encode(),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        _, keys, *rest = numpy.random.get_state(legacy=True)
        states["numpy"] = keys.tobytes() + repr(rest).encode()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return {name: _hash(state) for name, state in states.items()}


def hash_generator(generator: torch.Generator) -> int:
    """Return a hash of a generator's state."""
    return _hash(generator.get_state().numpy().tobytes())


def _hash(state: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(state, digest_size=6).digest())


def floating_dtypes(values: Sequence[Tensor]) -> list[str]:
    """Return the names of the tensors' floating-point dtypes, such as "float32"."""
    dtypes = {each.dtype for each in values if each.is_floating_point()}
    return sorted(str(each).removeprefix("torch.") for each in dtypes)
