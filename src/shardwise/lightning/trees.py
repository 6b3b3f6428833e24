"""Registers Shardwise's strategies in each of Lightning's packages.

`lightning.pytorch` and `pytorch_lightning` contain the same code twice, and neither accepts the
other's classes. The same is true of `lightning.fabric` and `lightning_fabric`. Each takes seconds
to import, so strategies are registered in a package (a class tree) only when the script imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

NAME = "shardwise"
"""Name of the strategies, as in Trainer(strategy="shardwise")."""

TRAINERS = ("lightning.pytorch", "pytorch_lightning")
FABRICS = ("lightning.fabric", "lightning_fabric")


@cache
def trainer_strategy(tree: str) -> Any:
    """Return the strategy class for the Trainer of `tree`, one of TRAINERS."""
    from shardwise.lightning.trainer_strategy import TrainerStrategy

    theirs = import_module(tree)
    base = import_module(f"{tree}.strategies").DDPStrategy
    precision = import_module(f"{tree}.plugins.precision").Precision
    hooks = precision, theirs.LightningModule, theirs.Callback
    return _class("ShardwiseStrategy", TrainerStrategy, base, hooks)


@cache
def fabric_strategy(tree: str) -> Any:
    """Return the strategy class for the Fabric of `tree`, one of FABRICS."""
    from shardwise.lightning.fabric_strategy import FabricStrategy

    base = import_module(f"{tree}.strategies").DDPStrategy
    precision = import_module(f"{tree}.plugins.precision").Precision
    return _class("ShardwiseFabricStrategy", FabricStrategy, base, (precision,))


def _class(name: str, ours: type[Any], base: Any, hooks: tuple[Any, ...]) -> Any:
    namespace = {"__doc__": ours.__doc__, "__module__": "shardwise.lightning", "hooks": hooks}
    made: Any = type(base)
    return made(name, (ours, base), namespace)


def in_use(trees: tuple[str, ...]) -> str:
    """Return the first of `trees` that the script has imported, or else the first one installed."""
    for tree in trees:
        if tree in sys.modules:
            return tree
    return next((tree for tree in trees if find_spec(tree.split(".")[0])), trees[0])


def register() -> None:
    """Register strategy="shardwise" in each tree: now if it is already imported, else later."""

    def into(name: str, strategy: Callable[[str], Any], tree: str) -> None:
        registry = getattr(import_module(f"{tree}.strategies"), name)
        if NAME not in registry:
            registry.register(NAME, strategy(tree), description="Shardwise")

    for tree in TRAINERS:
        when_imported(tree, partial(into, "StrategyRegistry", trainer_strategy))
    for tree in FABRICS:
        when_imported(tree, partial(into, "STRATEGY_REGISTRY", fabric_strategy))


# -- later imports ----------------------------------------------------------------------------


def when_imported(name: str, call: Callable[[str], None]) -> None:
    """Call `call(name)` when the module `name` is imported, or now if it already has been."""
    if name in sys.modules:
        call(name)
    else:
        _waiting.calls.setdefault(name, []).append(call)
        if _waiting not in sys.meta_path:
            sys.meta_path.insert(0, _waiting)


class _Waiting(MetaPathFinder):
    """Import finder that delegates to the other finders, and runs calls after an import."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Callable[[str], None]]] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the other finders' spec, with its loader wrapped in `_Calling`."""
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
    """Loads a module with `loader`, then runs the calls registered for it."""

    def __init__(self, loader: Loader, waiting: _Waiting) -> None:
        self._loader = loader
        self._waiting = waiting

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        # Restore the real loader first, for code that uses it while the module executes.
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for call in self._waiting.calls.pop(module.__name__, []):
            call(module.__name__)


_waiting = _Waiting()
