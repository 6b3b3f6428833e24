"""Installs Shardwise's strategy in the Trainers and Fabrics of unmodified scripts."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import shardwise as sw
from shardwise.errors import UsageError
from shardwise.lightning.trees import (
    FABRICS,
    NAME,
    TRAINERS,
    fabric_strategy,
    trainer_strategy,
    when_imported,
)
from shardwise.messages.printable import many

_REPLACED = ("auto", "ddp", "fsdp", "deepspeed", "zero", "model_parallel", "single_device")
"""Prefixes of the strategy names that Shardwise's strategy replaces."""

_CLASSES = ("DDP", "FSDP", "DeepSpeed", "ModelParallel", "SingleDevice")
"""Prefixes of the class names of these strategies."""


def adopt() -> None:
    """Use Shardwise's strategy in every Trainer and Fabric that this process creates."""
    for tree in TRAINERS:
        when_imported(tree, lambda name: _replace(name, "Trainer", trainer_strategy))
    for tree in FABRICS:
        when_imported(tree, lambda name: _replace(name, "Fabric", fabric_strategy))


def _replace(tree: str, name: str, strategy: Callable[[str], Any]) -> None:
    """Make the constructor of class `name` in `tree` use the class that `strategy` returns."""
    kind = getattr(import_module(tree), name)
    stock = kind.__init__

    @wraps(stock)
    def init(self: Any, *arguments: Any, **keywords: Any) -> None:
        given = keywords.get("strategy", "auto")
        if not _is_ours(given):
            _say(name, given, keywords)
            ours = keywords["strategy"] = strategy(tree)()
            ours.replaces = given if isinstance(given, str) else type(given).__name__
            # FSDPStrategy has this attribute. Sharded states are on all ranks.
            states = getattr(given, "_state_dict_type", "full")
            ours.states_on_rank_0 = ours.replaces.lower().startswith("fsdp") and states == "full"
            keywords["devices"], keywords["num_nodes"] = 1, 1
            keywords["accelerator"] = sw.world().device.type.replace("cuda", "gpu")
        stock(self, *arguments, **keywords)
        if name == "Fabric" and type(self) is kind:
            # `fabric run` launches for its scripts, so they do not call `launch`. A second launch
            # is a no-op. Not for a subclass, whose __init__ has not finished yet.
            self.launch()

    kind.__init__ = init


def _is_ours(strategy: Any) -> bool:
    """Return whether `strategy` is Shardwise's. Raises UsageError if it cannot be replaced."""
    if isinstance(strategy, str):
        if strategy == NAME:
            return True
        known = strategy.lower().startswith(_REPLACED)
    else:
        name = type(strategy).__name__
        if type(strategy).__module__.startswith("shardwise."):
            return True
        known = name.startswith(_CLASSES)
    if not known:
        raise UsageError(
            f"--adopt lightning cannot replace strategy={strategy!r}. Write "
            'strategy="shardwise" in the script.'
        )
    return False


def _say(name: str, given: Any, keywords: dict[str, Any]) -> None:
    """Print a message, once, about arguments that have no effect."""
    shown = given if isinstance(given, str) else type(given).__name__
    words = [f"strategy={shown!r}" if isinstance(given, str) else f"strategy={shown}(...)"]
    words += [
        f"{key}={keywords[key]!r}"
        for key in ("accelerator", "devices", "num_nodes")
        if keywords.get(key, "auto") not in ("auto", 1)
    ]
    world = sw.world()
    devices = str(keywords.get("devices", "auto"))
    more = int(devices) if devices.isdigit() else 1
    how = f" For {more}: shardwise run -n {more} --adopt lightning script.py." if more > 1 else ""
    words = words if len(words) > 1 or shown != "auto" else [f"{name}(...)"]
    world.say_once(
        f"{', '.join(words)}: {name} trains by shardwise on {many(world.size, 'worker')}."
        + (how if world.size == 1 else "")
    )
