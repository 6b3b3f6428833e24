"""Implements deepspeed.comm: torch's collectives between the workers, under DeepSpeed's names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, is_available, is_initialized

import shardwise as sw
from shardwise.bridging.joining import join
from shardwise.world import exit_handlers

__all__ = ["ReduceOp", "init_distributed", "is_available", "is_initialized"]


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: Any = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the run. Collective. Any launcher may have started the ranks.

    The arguments are ignored, because the launcher determines the transport and the ranks.
    """
    del dist_backend, auto_mpi_discovery, distributed_port, verbose, timeout, init_method
    del dist_init_required, config, rank, world_size
    join_run({})


def join_run(settings: Mapping[str, Any]) -> sw.World:
    """Join the run, ensure that torch has a process group, and return the world. Collective."""
    if "LOCAL_SIZE" in os.environ:  # the name in DeepSpeed's launcher
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["LOCAL_SIZE"])
    world = join(settings, "shardwise.deepspeed", in_parts=True)
    # Shardwise itself needs no group for a single process. But scripts call torch's collectives,
    # and read the ranks from the environment.
    if world.size == 1 and not dist.is_initialized():
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
        exit_handlers.register(lambda: dist.is_initialized() and dist.destroy_process_group())
        join(settings, "shardwise.deepspeed", in_parts=True)
    return world


def get_rank(group: Any = None) -> int:
    """Return this worker's rank, within `group` if it is given."""
    return dist.get_rank(group)


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks, within `group` if it is given."""
    return dist.get_world_size(group)


def get_local_rank() -> int:
    """Return this worker's rank on its host."""
    return sw.world().local_rank


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Return the global rank of the worker with rank `group_rank` in `group`."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_world_group() -> Any:
    """Return the group of all workers."""
    return dist.group.WORLD


def new_group(ranks: list[int]) -> Any:
    """Return a group of the workers in `ranks`. Collective on all workers."""
    return dist.new_group(ranks)


def destroy_process_group(group: Any = None) -> None:
    """Leave `group`. The process leaves the group of all ranks when it exits."""
    if group is not None:
        dist.destroy_process_group(group)


def barrier(group: Any = None, async_op: bool = False, **options: Any) -> Any:
    """Wait for the other ranks."""
    del options
    return dist.barrier(group, async_op=async_op)


def inference_all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None) -> Any:
    """Reduce `tensor` in the same way as all_reduce."""
    return dist.all_reduce(tensor, op, group)


_OWN = ("prof", "log_name", "debug")
"""Arguments for DeepSpeed's log, which torch's functions do not have."""


def _plain(name: str) -> Callable[..., Any]:
    of_torch = getattr(dist, name)

    @wraps(of_torch)
    def call(*arguments: Any, **options: Any) -> Any:
        for own in _OWN:
            options.pop(own, None)
        return of_torch(*arguments, **options)

    return call


_OF_TORCH = (
    *("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("broadcast", "broadcast_object_list", "gather", "scatter", "monitored_barrier"),
    *("send", "recv", "isend", "irecv", "all_reduce_coalesced", "batch_isend_irecv"),
)
globals().update({name: _plain(name) for name in _OF_TORCH})
__all__ += [*_OF_TORCH, "barrier", "destroy_process_group", "get_global_rank", "get_local_rank"]
__all__ += ["get_rank", "get_world_group", "get_world_size", "inference_all_reduce", "new_group"]
