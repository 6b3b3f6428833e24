"""Describes the rank of this process in Lightning's terms."""

from __future__ import annotations

import os

import shardwise as sw
from shardwise.errors import UsageError


class Environment:
    """Lightning's ClusterEnvironment for `world`, the run that this process has joined."""

    creates_processes_externally = True

    def __init__(self, world: sw.World) -> None:
        self._world = world

    @property
    def main_address(self) -> str:
        """The host of rank 0, if the launcher provides it."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """An unused port, because Lightning requires one. The processes are already connected."""
        return int(os.environ.get("MASTER_PORT", "29500"))

    @staticmethod
    def detect() -> bool:
        """Return False, because only the strategy selects this environment."""
        return False

    def world_size(self) -> int:
        """Return the number of workers of the run."""
        return self._world.size

    def set_world_size(self, size: int) -> None:
        """No-op, because the launcher has set the world size."""

    set_global_rank = set_world_size

    def global_rank(self) -> int:
        """Return the rank of this worker."""
        return self._world.rank

    def local_rank(self) -> int:
        """Return the rank of this worker on its host."""
        return self._world.local_rank

    def node_rank(self) -> int:
        """Return the index of this host."""
        return self._world.rank // max(self._world.local_size, 1)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any values, because the launcher has already chosen the devices."""

    def teardown(self) -> None:
        """No-op, because this environment holds no resources."""


def check_devices(world: sw.World, devices: int, nodes: int, library: str) -> None:
    """Compare the requested devices with the run.

    Raises UsageError if the script requests several ranks but the run has only one. If the numbers
    differ in any other way, prints a message.
    """
    requested = devices * nodes
    if requested == 1 or requested == world.size:
        return
    wanted = f"devices={devices}" + (f", num_nodes={nodes}" if nodes > 1 else "")
    if world.size == 1:
        raise UsageError(
            f"{library} requests {wanted}, but this is a single process, and the strategy does "
            f"not start workers. Write: shardwise run -n {requested} script.py (or torchrun, "
            "srun, mpirun). For one worker, write devices=1."
        )
    world.say_once(
        f"{library}({wanted}) is ignored: this run was started with {world.size} workers."
    )
