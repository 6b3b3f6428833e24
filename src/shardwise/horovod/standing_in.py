"""`import horovod` in code that nobody wants to change, such as a library's."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

from shardwise.errors import BadCall

_OURS = {
    "horovod.torch": "shardwise.horovod",
    "horovod.torch.compression": "shardwise.horovod.compression",
    "horovod.torch.elastic": "shardwise.horovod.elastic",
    "horovod.torch.elastic.sampler": "shardwise.horovod.sampler",
    "horovod.torch.elastic.state": "shardwise.horovod.elastic",
    "horovod.torch.functions": "shardwise.horovod.functions",
    "horovod.torch.mpi_ops": "shardwise.horovod.mpi_ops",
    "horovod.torch.optimizer": "shardwise.horovod.optimizer",
    "horovod.torch.sync_batch_norm": "shardwise.horovod.sync_batch_norm",
    "horovod.common.exceptions": "shardwise.errors",
}


def install_as_horovod() -> None:
    """From now on `import horovod`, `import horovod.torch` and their like, anywhere in this
    process, give this package; once more does nothing.

    Other parts of Horovod are not found then, such as `horovod.tensorflow`. Raises BadCall where
    the real Horovod was imported before: code that has it would go on with it.
    """
    there = sys.modules.get("horovod")
    if isinstance(there, _StandIn):
        return
    if there is not None:
        raise BadCall(
            f"Horovod itself was imported already, from {getattr(there, '__file__', None)}: call "
            "install_as_horovod() before anything imports it."
        )
    top, common = _StandIn("horovod"), _StandIn("horovod.common")
    ours = {name: import_module(target) for name, target in _OURS.items()}
    top.__dict__.update(
        torch=ours["horovod.torch"],
        common=common,
        __version__=ours["horovod.torch"].__version__,
    )
    common.__dict__["exceptions"] = ours["horovod.common.exceptions"]
    sys.modules.update(ours | {"horovod": top, "horovod.common": common})


class _StandIn(ModuleType):
    """A package that has what was put into it, and no files."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "Shardwise, in the place of Horovod.")
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)
