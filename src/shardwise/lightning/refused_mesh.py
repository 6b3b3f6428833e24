"""Answers scripts for ModelParallelStrategy that ask for its device mesh."""

from __future__ import annotations

from typing import Any, NoReturn

from shardwise.errors import UsageError

MODEL_PARALLEL = ("ModelParallel", "model_parallel")
"""How the names of strategies begin that give a module a mesh."""


class NoDeviceMesh(UsageError, AttributeError):
    """There is no device mesh; an AttributeError, so that `hasattr` and `getattr` find none."""


def refuse(asked: str) -> NoReturn:
    """Raise NoDeviceMesh for the attribute that the script has `asked` for."""
    raise NoDeviceMesh(
        f"{asked} belongs to ModelParallelStrategy, and this run trains by shardwise, which splits "
        "the model itself. Leave fully_shard(...) out and start with --zero 3; in place of "
        "parallelize_module(...) write the loop with sw.Engine and start with --tensor."
    )


class RefusedMesh:
    """Stands where a LightningModule has its mesh, and refuses every use of it."""

    def __getattr__(self, name: str) -> Any:
        refuse("self.device_mesh")

    def __getitem__(self, key: Any) -> Any:
        refuse(f"self.device_mesh[{key!r}]")
