"""What there is from `hvd.init` to `hvd.shutdown`: who this rank is, its thread, its counts."""

from __future__ import annotations

import os
from collections import Counter

from shardwise import collectives
from shardwise.errors import BadCall
from shardwise.horovod import habits, links
from shardwise.horovod.background import Background
from shardwise.horovod.samples import Samples
from shardwise.launch import launchers
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
            self.world.progress.kept(0, 0)  # commits were counted before
        self.world.progress.stepped(0, self.steps)
        if (recording := recorder.active) is not None:
            recording.stepped(0, self.steps)
        if self.samples is not None:
            self.samples.stepped(self.steps)

    def kept(self) -> None:
        """A restart goes on from here. Where no steps are counted, as with optimizers of the user's
        own, commits are: the launcher gives up a run that gets no further."""
        if not self.steps:
            self.world.progress.stepped(0, self.commits)
        self.world.progress.kept(0, self.steps or self.commits)

    def close(self) -> None:
        """End the thread, and look no longer."""
        if self.eyes is not None:
            self.eyes.close()
        if self.samples is not None:
            self.samples.close()
        self.background.close()


def _hosts(world: World) -> list[list[int]]:
    """The ranks of each host, in the order of their first."""
    mine = world.host, collectives.host_key()
    names = [tuple(each) for each in world.collectives.gather_plain(mine)]
    return [[r for r, n in enumerate(names) if n == name] for name in dict.fromkeys(names)]


def _meet(world: World, timeout: float) -> dict[int, links.Link]:
    """Connect to rank 0, which tells all where it is over the channels that they have. Collective;
    on rank 0 the others by rank."""
    group, secret = world.collectives, world.collectives.status_server.secret
    if world.rank != 0:
        address, port = group.gather_plain(None)[0]
        return {0: links.connect(address, port, secret, world.rank, timeout)}
    address = collectives.address_of(launchers.detect(os.environ))
    with links.listen(address) as listener:
        group.gather_plain((address, listener.getsockname()[1]))
        return links.accept(listener, secret, world.size, timeout)


def enter(world: World) -> None:
    """Make this rank's, of which there is one. Collective."""
    global _current
    _current = Context(world)


def leave() -> None:
    """Close it, if there is one: operations that are on their way fail."""
    global _current
    context, _current = _current, None
    if context is not None:
        context.close()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` not since."""
    return _current is not None


def current() -> Context:
    """This rank's. Raises BadCall before `init`."""
    if _current is None:
        raise BadCall("Horovod has not been initialized; call hvd.init() first.")
    return _current
