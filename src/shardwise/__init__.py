"""Train a PyTorch model on many devices exactly as it trains on one."""

# Don't import anything large here: the command line can handle Ctrl-C only after this import.
import os
import sys

# Not from typing, whose import takes longer than all the rest. Type checkers treat it as true.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from shardwise import errors, lr
    from shardwise.data.files.json_lines import JsonLines
    from shardwise.data.files.parquet_rows import ParquetRows
    from shardwise.data.files.tar_samples import TarSamples
    from shardwise.data.loader import Loader
    from shardwise.data.mixture import Mixture
    from shardwise.data.packing.packing import Packing
    from shardwise.engine import Engine, Engines
    from shardwise.guard.stock import Guard
    from shardwise.launch.function import launch
    from shardwise.metrics import Metrics
    from shardwise.model.meta import on_meta
    from shardwise.parallel.expert.moe import MoE
    from shardwise.parallel.tensor.attention import Attention
    from shardwise.parallel.tensor.chunked_cross_entropy import chunked_cross_entropy
    from shardwise.parallel.tensor.cross_entropy import cross_entropy
    from shardwise.tools.plan.plan_command import plan
    from shardwise.world.initialize import init
    from shardwise.world.world import World, start_timeline, stop_timeline
    from shardwise.world.world import current as world

__version__ = "0.1.0"
"""The version. It is a literal because the package also works without installed metadata."""

__all__ = [
    "Attention",
    "Engine",
    "Engines",
    "Guard",
    "JsonLines",
    "Loader",
    "Metrics",
    "Mixture",
    "MoE",
    "Packing",
    "ParquetRows",
    "TarSamples",
    "World",
    "__version__",
    "chunked_cross_entropy",
    "cross_entropy",
    "errors",
    "init",
    "launch",
    "lr",
    "on_meta",
    "plan",
    "start_timeline",
    "stop_timeline",
    "world",
]

_HOMES = {
    "Attention": "shardwise.parallel.tensor.attention",
    "chunked_cross_entropy": "shardwise.parallel.tensor.chunked_cross_entropy",
    "cross_entropy": "shardwise.parallel.tensor.cross_entropy",
    "Engine": "shardwise.engine",
    "Engines": "shardwise.engine",
    "Guard": "shardwise.guard.stock",
    "JsonLines": "shardwise.data.files.json_lines",
    "Loader": "shardwise.data.loader",
    "Metrics": "shardwise.metrics",
    "Mixture": "shardwise.data.mixture",
    "MoE": "shardwise.parallel.expert.moe",
    "Packing": "shardwise.data.packing.packing",
    "ParquetRows": "shardwise.data.files.parquet_rows",
    "TarSamples": "shardwise.data.files.tar_samples",
    "World": "shardwise.world.world",
    "init": "shardwise.world.initialize",
    "on_meta": "shardwise.model.meta",
    "plan": "shardwise.tools.plan.plan_command",
    "start_timeline": "shardwise.world.world",
    "stop_timeline": "shardwise.world.world",
}

# In a rank, an error before `sw.init` must also reach the launcher's report.
if "SHARDWISE_LAUNCH_REPORTS" in os.environ:
    from importlib import import_module

    import_module("shardwise.net.error_file").watch_before_joining()
    import_module("shardwise.net.helper_folder").use_run_folder()


def __getattr__(name: str) -> "Any":
    """Import a public name when it is first used, so that the command line starts without torch."""
    if name in _HOMES:
        return getattr(_import(_HOMES[name]), name)
    if name in ("errors", "launch", "lr", "world"):
        return _import(f"shardwise.{name}")
    from importlib import import_module
    from importlib.util import find_spec

    # Don't use `from shardwise import ...`, which would call this function recursively.
    other_libraries = import_module("shardwise.messages.other_libraries")
    message = f"module 'shardwise' has no attribute {name!r}"
    hint = other_libraries.hint(name)
    if hint is None or find_spec(f"shardwise.{name}") is not None:
        raise AttributeError(message)
    if sys._getframe(1).f_code.co_name == "_handle_fromlist":
        # `from shardwise import NAME` catches an AttributeError and drops its message.
        raise ImportError(f"cannot import name {name!r} from 'shardwise'. {hint}", name=name)
    raise AttributeError(f"{message}. {hint}")


def _import(module: str) -> "ModuleType":
    """Import a module without changing the state of the script's random number generators."""
    # Some libraries draw from Python's global generator on import.
    import random
    from importlib import import_module

    state = random.getstate()
    try:
        return import_module(module)
    finally:
        random.setstate(state)


def __dir__() -> list[str]:
    return sorted(__all__)
