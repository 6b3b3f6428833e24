"""Joins the run under a library that finds out by environment variables which rank it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist

import shardwise as sw
from shardwise.config import FIELDS, OF_THE_ENGINE, Settings, resolve, sources
from shardwise.engine.user_objects import living
from shardwise.errors import UsageError
from shardwise.net import error_file
from shardwise.world import initialize

SETTINGS = frozenset(FIELDS)
"""The keywords of a bridge that are settings of Shardwise."""


def join(settings: Mapping[str, Any], library: str, *, in_parts: bool = False) -> sw.World:
    """The world of this process, which is made by `sw.init` where the script has not called it.

    Generators stay the script's own then, since these libraries seed and save them themselves. Of
    `settings`, those of a run go to `sw.init`. Raises UsageError for settings of a run that has
    begun, for islands, and for a model in parts unless `library` knows of them: with `in_parts`
    what its workers draw in common is seeded by the step.
    """
    given = {name: value for name, value in settings.items() if name not in OF_THE_ENGINE}
    world = joined()
    if world is None:
        error_file.watch_exceptions()
        settled = resolve(sources(os.environ, given))[0]
        _refuse(settled, library, in_parts=in_parts)
        world = sw.init(**{"reseed": settled.tensor * settled.pipeline > 1, **given})
    else:
        _refuse(world.settings, library, in_parts=in_parts)
        _refuse_late(world, given, library)
    _tell_environment(world)
    _mention_one_process(world)
    return world


def joined() -> sw.World | None:
    """The world that this process has joined already; None before."""
    with suppress(UsageError):
        return sw.world()
    return None


def _refuse_late(world: sw.World, given: Mapping[str, Any], library: str) -> None:
    """Raise UsageError for a setting that the run has begun without."""
    for name, value in given.items():
        found = world.device.type if name == "device" else getattr(world.settings, name)
        if found != value:
            raise UsageError(
                f"{name}={value!r} comes too late: this process has joined its run already. "
                f"Give it to the first of shardwise.init(...) and {library}, or as a flag."
            )


def divide(world: sw.World, library: str, **axes: int) -> None:
    """Let a replica be of `pipeline` or `tensor` workers from now on: for libraries that say so
    after they have joined the run. Collective. Raises UsageError on all workers where an engine of
    one trains already: which engines are left is up to each worker's garbage collector."""
    if initialize.mesh_after(world, axes) != world.mesh and world.any(bool(living)):
        raise UsageError(
            f"{library} comes too late: an engine trains already whose model is divided otherwise. "
            "Close that one before, or give --pipeline and --tensor as flags."
        )
    initialize.divide(world, axes)


def _refuse(settings: Settings, library: str, *, in_parts: bool) -> None:
    """Raise UsageError for a run whose workers do not step together, and for one whose replicas are
    of several workers, but `in_parts`."""
    if settings.islands != 1:
        raise UsageError(
            f"{library} with --islands {settings.islands}: it averages over all workers, and those "
            "of other islands make steps of their own. Leave the flag out, or write the loop with "
            "sw.Engine."
        )
    for name in () if in_parts else ("tensor", "pipeline"):
        if (size := getattr(settings, name)) > 1:
            raise UsageError(
                f"{library} with --{name} {size}: it gives every worker batches of its own, and "
                "the workers of a replica need the same. Leave the flag out (--zero 3 shards "
                "models that are too large for one), or write the loop with sw.Engine."
            )


def _mention_one_process(world: sw.World) -> None:
    """Say how several workers are started where `accelerate launch` was asked for some, and has
    started one: it does so on the CPU without MPI, and sets the address where they would meet."""
    launched = {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys()
    if world.size == 1 and launched and "WORLD_SIZE" not in os.environ:
        world.say_once(
            "accelerate launch has started one process, whatever --num_processes says, as it does "
            "on the CPU without MPI. For several: shardwise run -n 2 script.py, or torchrun "
            "--nproc-per-node=2 script.py."
        )


def _tell_environment(world: sw.World) -> None:
    """Set the variables by which torch's libraries know a rank, where its launcher sets others.

    Nobody listens at MASTER_ADDR: the process group is made, and is taken over as it is. Where
    Accelerate computes is said by variables of its own.
    """
    if world.device.type == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    else:
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(world.device)
    if not dist.is_initialized():
        return  # one process without a launcher, which needs none
    first = world.broadcast_object(world.host)
    told = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "MASTER_ADDR": first,
        "MASTER_PORT": 29500,
    }
    for name, value in told.items():
        os.environ.setdefault(name, str(value))
