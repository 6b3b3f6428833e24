"""Tells Lightning which rank this is: the one that the run has given it."""

from __future__ import annotations

import os

import shardwise as sw
from shardwise.errors import UsageError


class Environment:
    """A ClusterEnvironment of Lightning, by its methods, over a `world` that is joined."""

    creates_processes_externally = True

    def __init__(self, world: sw.World) -> None:
        self._world = world

    @property
    def main_address(self) -> str:
        """The host of rank 0, where a launcher tells of one."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """A port at which nobody listens: the processes have met already."""
        return int(os.environ.get("MASTER_PORT", "29500"))

    @staticmethod
    def detect() -> bool:
        """Lightning does not choose this by itself: the strategy brings it."""
        return False

    def world_size(self) -> int:
        """Return the number of workers of the run."""
        return self._world.size

    def set_world_size(self, size: int) -> None:
        """The launcher has decided that."""

    def global_rank(self) -> int:
        """Return the rank of this worker."""
        return self._world.rank

    def set_global_rank(self, rank: int) -> None:
        """The launcher has decided that."""

    def local_rank(self) -> int:
        """Return the rank among the workers of this host."""
        return self._world.local_rank

    def node_rank(self) -> int:
        """Return the number of this host among those of the run."""
        return self._world.rank // max(self._world.local_size, 1)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Whatever the script says: the launcher has decided that."""

    def teardown(self) -> None:
        """Nothing is held."""


def check_devices(world: sw.World, devices: int, nodes: int, library: str) -> None:
    """Raise UsageError where the script asks for workers that nobody has started; mention another
    number than there are."""
    asked = devices * nodes
    if asked == 1 or asked == world.size:
        return
    wanted = f"devices={devices}" + (f", num_nodes={nodes}" if nodes > 1 else "")
    if world.size == 1:
        raise UsageError(
            f"{library} asks for {wanted}, and this is one process: workers are started from "
            f"outside. Write: shardwise run -n {asked} script.py (or torchrun, srun, mpirun); for "
            "one worker, devices=1."
        )
    world.say_once(
        f"{library}({wanted}) is not followed: this run has {world.size} workers, as it was "
        "started."
    )
