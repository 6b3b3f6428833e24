"""Implements `--adopt deepspeed`: `import deepspeed` works without the deepspeed package."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "deepspeed"

_OURS = "shardwise.deepspeed"

MODULES = {
    "comm": "comm",
    "comm.comm": "comm",
    "zero": "zero",
    "runtime.zero": "zero",
    "runtime.zero.partition_parameters": "zero",
    "utils": "utils",
    "utils.logging": "utils",
    "utils.zero_to_fp32": "zero_to_fp32",
    "runtime.utils": "utils",
    "accelerator": "accelerator",
    "accelerator.real_accelerator": "accelerator",
    "checkpointing": "checkpointing",
    "runtime.activation_checkpointing.checkpointing": "checkpointing",
    "runtime.lr_schedules": "schedules",
    "runtime.engine": "engine",
    "runtime.dataloader": "loader",
    "monitor.monitor": "monitor",
    "moe": "moe",
    "moe.layer": "moe",
    "moe.utils": "moe",
    "pipe": "pipe",
    "runtime.pipe": "pipe",
    "runtime.pipe.module": "pipe",
    "runtime.pipe.topology": "pipe.topology",
    "runtime.pipe.engine": "pipe.engine",
    "ops": "ops",
    "ops.adam": "ops.adam",
    "ops.adam.cpu_adam": "ops.adam",
    "ops.adam.fused_adam": "ops.adam",
}
"""The module of this package that provides the public names of each DeepSpeed module."""


class _Missing(MetaPathFinder):
    """Import finder that raises an error for DeepSpeed submodules that Shardwise does not have."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise ModuleNotFoundError if `name` is a module of DeepSpeed. Otherwise return None."""
        del path, target
        if name.partition(".")[0] != NAME:
            return None
        raise ModuleNotFoundError(
            f"Shardwise has no {name}: docs/from_deepspeed.md lists the modules that it has.",
            name=name,
        )


class _Part(ModuleType):
    """A package that contains only other modules."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"Shardwise's {self.__name__} has no {name!r}.")


def adopt() -> None:
    """Make `import deepspeed` and its submodules import Shardwise's modules in this process."""
    # Drop imported modules of an installed DeepSpeed, so that later imports find ours.
    for name in [n for n in sys.modules if n.partition(".")[0] == NAME]:
        del sys.modules[name]
    sys.modules[NAME] = import_module(_OURS)
    for name, ours in MODULES.items():
        if (module := _ours(ours)) is not None:
            _put(f"{NAME}.{name}", module)
    # Put it first, so that no submodule of an installed DeepSpeed is mixed with ours.
    if not any(isinstance(each, _Missing) for each in sys.meta_path):
        sys.meta_path.insert(0, _Missing())


def _ours(name: str) -> ModuleType | None:
    try:
        return import_module(f"{_OURS}.{name}")
    except ModuleNotFoundError as error:
        # A missing import inside our module is a real error.
        if error.name != f"{_OURS}.{name}":
            raise
        return None


def _put(name: str, module: ModuleType) -> None:
    """Make `module` importable as `name`, and set it as an attribute of its package."""
    sys.modules[name] = module
    package, _, last = name.rpartition(".")
    if package not in sys.modules:
        _put(package, _Part(package))
    parent = sys.modules[package]
    if not hasattr(parent, last) or isinstance(parent, _Part):
        setattr(parent, last, module)
    # The import system requires `__path__` to import submodules.
    if isinstance(parent, _Part) and not hasattr(parent, "__path__"):
        parent.__path__ = []
