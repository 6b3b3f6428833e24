"""The class trees of Lightning, which have a registry of strategies each, and our classes in each.

`lightning.pytorch` and `pytorch_lightning` are the same code twice, and neither takes the other's
classes; so are `lightning.fabric` and `lightning_fabric`. Each takes seconds to import: ours are
put into those that the script imports.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

NAME = "shardwise"
"""What strategies are called by: Trainer(strategy="shardwise")."""

TRAINERS = ("lightning.pytorch", "pytorch_lightning")
FABRICS = ("lightning.fabric", "lightning_fabric")


@cache
def trainer_strategy(tree: str) -> Any:
    """Return the strategy of the Trainer of `tree`, one of TRAINERS."""
    from shardwise.lightning.trainer_strategy import TrainerStrategy

    theirs = import_module(tree)
    base = import_module(f"{tree}.strategies").DDPStrategy
    precision = import_module(f"{tree}.plugins.precision").Precision
    hooks = precision, theirs.LightningModule, theirs.Callback
    return _class("ShardwiseStrategy", TrainerStrategy, base, hooks)


@cache
def fabric_strategy(tree: str) -> Any:
    """Return the strategy of the Fabric of `tree`, one of FABRICS."""
    from shardwise.lightning.fabric_strategy import FabricStrategy

    base = import_module(f"{tree}.strategies").DDPStrategy
    precision = import_module(f"{tree}.plugins.precision").Precision
    return _class("ShardwiseFabricStrategy", FabricStrategy, base, (precision,))


def _class(name: str, ours: type[Any], base: Any, hooks: tuple[Any, ...]) -> Any:
    namespace = {"__doc__": ours.__doc__, "__module__": "shardwise.lightning", "hooks": hooks}
    made: Any = type(base)
    return made(name, (ours, base), namespace)


def in_use(trees: tuple[str, ...]) -> str:
    """Return which of `trees` the script has imported; the first that is installed where none
    is."""
    for tree in trees:
        if tree in sys.modules:
            return tree
    return next((tree for tree in trees if find_spec(tree.split(".")[0])), trees[0])


def register() -> None:
    """Let every tree know strategy="shardwise", now or as soon as it is imported."""
    for tree in TRAINERS:
        when_imported(tree, _register_trainer)
    for tree in FABRICS:
        when_imported(tree, _register_fabric)


def _register_trainer(tree: str) -> None:
    registry = import_module(f"{tree}.strategies").StrategyRegistry
    if NAME not in registry:
        registry.register(NAME, trainer_strategy(tree), description="Shardwise")


def _register_fabric(tree: str) -> None:
    registry = import_module(f"{tree}.strategies").STRATEGY_REGISTRY
    if NAME not in registry:
        registry.register(NAME, fabric_strategy(tree), description="Shardwise")


# -- imports to come --------------------------------------------------------------------------


def when_imported(name: str, call: Callable[[str], None]) -> None:
    """`call(name)` once the module `name` is there: now, or when somebody imports it."""
    if name in sys.modules:
        call(name)
    else:
        _waiting.calls.setdefault(name, []).append(call)
        if _waiting not in sys.meta_path:
            sys.meta_path.insert(0, _waiting)


class _Waiting(MetaPathFinder):
    """Finds modules as the others do, and calls what waits for them once they are executed."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Callable[[str], None]]] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the spec that the other finders have, its loader enclosed by ours."""
        if name not in self.calls:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Calling(spec.loader, self)
                return spec
        return None


class _Calling(Loader):
    """Loads as `loader` does, then calls what waits for the module."""

    def __init__(self, loader: Loader, waiting: _Waiting) -> None:
        self._loader = loader
        self._waiting = waiting

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the loader; then the calls. Not before: many look for a spec and import nothing."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for call in self._waiting.calls.pop(module.__name__, []):
            call(module.__name__)


_waiting = _Waiting()
