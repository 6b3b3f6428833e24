"""`hvd.init` and `hvd.shutdown`."""

import atexit
import os
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shardwise import config
from shardwise.errors import BadCall, UsageError
from shardwise.horovod import context, habits
from shardwise.horovod.process_sets import add_process_set
from shardwise.initialize import init as init_world
from shardwise.world import World
from shardwise.world import current as current_world


def init(
    comm: Sequence[int] | None = None, process_sets: Sequence[Any] | str | None = None
) -> None:
    """Join the other ranks, whoever launched them; once more does nothing.

    `process_sets` are made at once; "dynamic" is as Horovod has it, and always so here. Random
    numbers are left alone, unlike by `shardwise.init`; where that was called, its world is used.
    Raises BadCall for a communicator that is not all ranks, LaunchError where they do not meet.
    """
    if context.is_initialized():
        return
    world = _world()
    world.expect_no_engine()
    if comm is not None and list(comm) != list(range(world.size)):
        raise BadCall(
            f"hvd.init({comm!r}): start the ranks that you want, or use hvd.ProcessSet for some of "
            "them; mpi4py's communicators are not used."
        )
    if not world.engines:
        _tell_of_idle_settings(world)
    context.enter(world)
    atexit.register(shutdown)
    for members in process_sets if isinstance(process_sets, Sequence) else ():
        if not isinstance(members, str):
            add_process_set(members)


def _world() -> World:
    """That of the script, or a new one with the random numbers as they are."""
    try:
        return current_world()
    except UsageError:
        states = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
            world = init_world()
        random.setstate(states[0])
        np.random.set_state(states[1])
        return world


def _tell_of_idle_settings(world: World) -> None:
    """Of those that were given beside the script: by a flag, the environment or a file."""
    line = habits.without_effect(config.winning(config.sources(os.environ, {})))
    if line:
        world.say_once(line)


def shutdown() -> None:
    """Leave: operations that are on their way fail, here and where they wait for this rank. The
    thread has ended when it returns."""
    atexit.unregister(shutdown)
    context.leave()
