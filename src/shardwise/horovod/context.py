"""From `hvd.init` to `hvd.shutdown`: who this rank is, its thread, its process sets."""

from __future__ import annotations

import atexit
import os
import random
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shardwise import collectives, config, launch
from shardwise import world as worlds
from shardwise.errors import BadCall, UsageError
from shardwise.horovod import habits, links
from shardwise.horovod.background import Background
from shardwise.horovod.samples import Samples
from shardwise.timeline import recorder
from shardwise.world import World

_current: Context | None = None


class Context:
    """This rank between init and shutdown. `hosts` are the ranks of each host."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.hosts = _hosts(world)
        timeout = world.settings.timeout
        group = collectives.for_thread(world.collectives, timeout)
        found = _meet(world, timeout) if world.size > 1 else {}
        device, warn_after = world.device, world.settings.warn_after
        self.background = Background(group, found, device, timeout, warn_after)
        self.numbers: Counter[str] = Counter()
        """By kind of operation, how many had no name."""
        self.steps = self.commits = 0
        self.asked_size = False
        self.reduces = False
        """Whether this rank has ever asked for a reduction."""
        self.eyes: habits.Eyes | None = None
        if world.size > 1:
            self.eyes = habits.Eyes(world.rank, self.background.see, lambda: self.reduces)
        self.samples = Samples(world.step_log) if world.step_log.is_on else None

    def stepped(self) -> None:
        """A DistributedOptimizer has made a step: what a restart may lose."""
        self.steps += 1
        if self.steps == 1:
            self.world.telling.kept(0, 0)  # commits were counted before
        self.world.telling.stepped(0, self.steps)
        if (recording := recorder.active) is not None:
            recording.stepped(0, self.steps)
        if self.samples is not None:
            self.samples.stepped(self.steps)

    def kept(self) -> None:
        """A restart goes on from here. Where no steps are counted, as with optimizers of the user's
        own, commits are: the launcher gives up a run that gets no further."""
        if not self.steps:
            self.world.telling.stepped(0, self.commits)
        self.world.telling.kept(0, self.steps or self.commits)

    def close(self) -> None:
        """End the thread, and look no longer."""
        if self.eyes is not None:
            self.eyes.close()
        if self.samples is not None:
            self.samples.close()
        self.background.close()


def _hosts(world: World) -> list[list[int]]:
    """The ranks of each host, in the order of their first."""
    names = world.gather((world.host, collectives.host_key()))
    return [[r for r, n in enumerate(names) if n == name] for name in dict.fromkeys(names)]


def _meet(world: World, timeout: float) -> dict[int, links.Link]:
    """Connect to rank 0, which tells all where it is over the channels that they have. Collective;
    on rank 0 the others by rank."""
    if world.rank != 0:
        nothing: Any = None
        address, port, secret = world.broadcast_object(nothing)
        return {0: links.connect(address, port, secret, world.rank, timeout)}
    address = collectives.address_of(launch.detect(os.environ))
    with links.listen(address) as listener:
        place = address, listener.getsockname()[1], secrets.token_hex(16)
        world.broadcast_object(place)
        return links.accept(listener, place[2], world.size, timeout)


def init(
    comm: Sequence[int] | None = None, process_sets: Sequence[Any] | str | None = None
) -> None:
    """Join the other ranks, whoever launched them; once more does nothing.

    `process_sets` are made at once; "dynamic" is as Horovod has it, and always so here. Random
    numbers are left alone, unlike by `shardwise.init`; where that was called, its world is used.
    Raises BadCall for a communicator that is not all ranks, LaunchError where they do not meet.
    """
    global _current
    if _current is not None:
        return
    world = _world()
    if comm is not None and list(comm) != list(range(world.size)):
        raise BadCall(
            f"hvd.init({comm!r}): start the ranks that you want, or use hvd.ProcessSet for some of "
            "them; mpi4py's communicators are not used."
        )
    if not world.engines:
        _tell_of_idle_settings(world)
    _current = Context(world)
    atexit.register(shutdown)
    from shardwise.horovod.process_sets import add_process_set  # which needs what is made here

    for members in process_sets if isinstance(process_sets, Sequence) else ():
        if not isinstance(members, str):
            add_process_set(members)


def _world() -> World:
    """That of the script, or a new one with the random numbers as they are."""
    try:
        return worlds.current()
    except UsageError:
        states = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
            world = worlds.init()
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
    global _current
    context, _current = _current, None
    if context is not None:
        atexit.unregister(shutdown)
        context.close()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` not since."""
    return _current is not None


def current() -> Context:
    """This rank's. Raises BadCall before `init`."""
    if _current is None:
        raise BadCall("Horovod has not been initialized; call hvd.init() first.")
    return _current
