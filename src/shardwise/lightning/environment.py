"""Tells Lightning the rank of this process in the run."""

from __future__ import annotations

import os

import shardwise as sw
from shardwise.errors import UsageError


class Environment:
    """Implements Lightning's ClusterEnvironment over a joined `world`."""

    creates_processes_externally = True

    def __init__(self, world: sw.World) -> None:
        self._world = world

    @property
    def main_address(self) -> str:
        """The host of rank 0, if the launcher names it."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """An unused port: the processes are connected already."""
        return int(os.environ.get("MASTER_PORT", "29500"))

    @staticmethod
    def detect() -> bool:
        """Return False: only the strategy chooses this environment."""
        return False

    def world_size(self) -> int:
        """Return the number of workers of the run."""
        return self._world.size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher has decided that."""

    set_global_rank = set_world_size

    def global_rank(self) -> int:
        """Return the rank of this worker."""
        return self._world.rank

    def local_rank(self) -> int:
        """Return the rank among the workers of this host."""
        return self._world.local_rank

    def node_rank(self) -> int:
        """Return the number of this host."""
        return self._world.rank // max(self._world.local_size, 1)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any values: the launcher has decided."""

    def teardown(self) -> None:
        """Do nothing."""


def check_devices(world: sw.World, devices: int, nodes: int, library: str) -> None:
    """Raise UsageError if the script asks for several ranks and there is one; mention other
    differences."""
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
