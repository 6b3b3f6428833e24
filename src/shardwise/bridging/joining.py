"""Joins a run under a library that reads its rank from environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist

import shardwise as sw
from shardwise.config import FIELDS, OF_THE_ENGINE, Settings, flag, resolve, sources
from shardwise.engine.user_objects import living
from shardwise.errors import UsageError
from shardwise.net import error_file
from shardwise.world import initialize

SETTINGS = frozenset(FIELDS)
"""The keyword arguments of a bridge that are Shardwise settings."""


def join(
    settings: Mapping[str, Any],
    library: str,
    *,
    in_parts: bool = False,
    splits_sequences: bool = False,
) -> sw.World:
    """Return the world of this process. Calls `sw.init` with `settings` if the script has not.

    Raises UsageError for islands, and for settings that contradict a run that this process has
    already joined. Unless `in_parts` is true, also raises UsageError if a replica spans several
    ranks, as with `--tensor`. Unless `splits_sequences` is true, raises it for `--context`.
    """
    given = {name: value for name, value in settings.items() if name not in OF_THE_ENGINE}
    world = joined()
    if world is None:
        error_file.watch_exceptions()
        settled = resolve(sources(os.environ, given))[0]
        _refuse(settled, library, in_parts=in_parts, splits_sequences=splits_sequences)
        # These libraries seed and save generators themselves, so Shardwise does not reseed them.
        # The exception is a replica with several ranks, which must draw the same random numbers in
        # each step.
        world = sw.init(**{"reseed": settled.tensor * settled.pipeline > 1, **given})
    else:
        _refuse(world.settings, library, in_parts=in_parts, splits_sequences=splits_sequences)
        _refuse_late(world, given, library)
    _set_environment(world)
    _mention_one_process(world)
    return world


def joined() -> sw.World | None:
    """Return the world that this process has joined, or None if it has not joined a run."""
    with suppress(UsageError):
        return sw.world()
    return None


def _refuse_late(world: sw.World, given: Mapping[str, Any], library: str) -> None:
    """Raise UsageError if a setting differs from the running world's."""
    for name, value in given.items():
        found = world.device.type if name == "device" else getattr(world.settings, name)
        if found != value:
            raise UsageError(
                f"{name}={value!r} is too late: this process has already joined its run. Pass it "
                f"to the first of shardwise.init(...) and {library}, or as a flag."
            )


def divide(world: sw.World, library: str, **axes: int) -> None:
    """After joining the run, divide each replica across `pipeline` or `tensor` ranks. Collective.

    Raises UsageError on all ranks if any of them has an engine.
    """
    # Use `world.any`, because the ranks' garbage collectors may have collected different engines.
    if initialize.mesh_after(world, axes) != world.mesh and world.any(bool(living)):
        raise UsageError(
            f"{library} is too late: an engine already trains a model with other values of "
            "--pipeline or --tensor. Close that engine first, or pass --pipeline and --tensor as "
            "flags."
        )
    initialize.divide(world, axes)


def _refuse(settings: Settings, library: str, *, in_parts: bool, splits_sequences: bool) -> None:
    """Raise UsageError for settings that conflict with a library's own data loading or steps."""
    if settings.islands != 1:
        raise UsageError(
            f"{library} cannot be combined with --islands {settings.islands}: it averages over all "
            "workers at each step, but islands step independently. Leave the flag out, or write "
            "the loop with sw.Engine."
        )
    if settings.context > 1 and not splits_sequences:
        raise UsageError(
            f"{library} cannot be combined with --context {settings.context}: it does not cut the "
            "sequences of its batches. Leave the flag out, or write the loop with sw.Engine and "
            "world.share."
        )
    for name in ("step_tokens", "micro_batch_tokens"):
        if (count := getattr(settings, name)) is not None:
            raise UsageError(
                f"{library} cannot be combined with {flag(name)} {count}: its steps have a fixed "
                "number of samples. Leave the flag out. For texts of different lengths, use the "
                'library\'s own means: in a Trainer train_sampling_strategy="group_by_length", in '
                "TRL packing=True. Or write the loop with sw.Loader(tokens=..., length=...) and "
                "sw.Engine."
            )
    for name in () if in_parts else ("tensor", "pipeline"):
        if (size := getattr(settings, name)) > 1:
            raise UsageError(
                f"{library} cannot be combined with --{name} {size}: it gives every worker "
                "different batches, but the workers of a replica need the same batch. Leave the "
                "flag out (--zero 3 shards models that are too large for one worker), or write the "
                "loop with sw.Engine."
            )


def _mention_one_process(world: sw.World) -> None:
    """Explain how to start several ranks if `accelerate launch` has started only one."""
    # On the CPU without MPI, it starts one process for any --num_processes, and sets MASTER_ADDR.
    launched = {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys()
    if world.size == 1 and launched and "WORLD_SIZE" not in os.environ:
        world.say_once(
            "accelerate launch has started one process: on the CPU without MPI it ignores "
            "--num_processes. To start several, write shardwise run -n 2 script.py, or torchrun "
            "--nproc-per-node=2 script.py."
        )


def _set_environment(world: sw.World) -> None:
    """Set the variables from which Accelerate and torch's libraries read rank and device."""
    if world.device.type == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    else:
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(world.device)
    if not dist.is_initialized():
        return  # a single process without a launcher needs no variables
    # Nothing listens at MASTER_ADDR. Libraries only check that it is set, and use the existing
    # process group.
    first = world.broadcast_object(world.host)
    variables = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "MASTER_ADDR": first,
        "MASTER_PORT": 29500,
    }
    for name, value in variables.items():
        os.environ.setdefault(name, str(value))
