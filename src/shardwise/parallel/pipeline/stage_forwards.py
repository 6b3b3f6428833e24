"""What stands in for the forwards of a model whose layers are on several ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.errors import ModelError
from shardwise.model.recomputation import RecomputedForward
from shardwise.parallel.pipeline import recomputed_layers
from shardwise.parallel.pipeline.parameter_ownership import NoCopies, refused
from shardwise.parallel.pipeline.pipeline_group import Line
from shardwise.parallel.pipeline.stage_tensors import Piece, at, runs_of
from shardwise.parallel.tensor.sequence_parallel import gather_nested


def install(line: Line, model: nn.Module) -> None:
    """Stand in for the forwards of `model` and its layers, until `line` is closed."""
    cut = line.cut
    for number, atom in enumerate(cut.atoms):
        stage = cut.stage_of(number)
        line.forwards.append(AtomForward(line, atom.module, atom.name, stage))
    line.forwards += [FloatingForward(line, module) for module in cut.floating]
    if model not in {atom.module for atom in cut.atoms}:
        line.forwards.append(ModelForward(line, model))
    line.forwards.append(NoCopies(model))


class Forward(ABC):
    """Stands in for the forward of a module; copies and pickles of the module have their own."""

    def __init__(self, line: Line, module: nn.Module) -> None:
        self._line = line
        self._module = module
        self._before: Callable[..., Any] | None = vars(module).get("forward")
        self._plain: Callable[..., Any] = module.forward
        module.forward = self

    def undo(self) -> None:
        """Give the module its forward back."""
        if vars(self._module).get("forward") is self:
            del self._module.forward
            if self._before is not None:
                self._module.forward = self._before

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._line.is_whole:
            raise refused("A copy", "to copy it")
        return getattr, (self._module, "forward")


class ModelForward(Forward):
    """That of the whole model, which is a run of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._line.is_whole:
            return self._plain(*args, **kwargs)
        with self._line.forward():
            return self._plain(*args, **kwargs)


class AtomForward(Forward):
    """That of a layer: run where its stage is, and of known form elsewhere."""

    def __init__(self, line: Line, module: nn.Module, name: str, stage: int) -> None:
        super().__init__(line, module)
        self._name, self._stage = name, stage

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        line, stage = self._line, self._stage
        if line.is_whole:
            return self._plain(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        late = [leaf.home for leaf in leaves if isinstance(leaf, Piece) and leaf.home > stage]
        if late:
            raise ModelError(
                f"{self._name} is on stage {stage} and takes what stage {max(late)} makes. Let the "
                "modules stand in the model in the order in which they run, or name where stages "
                "begin: --stages."
            )
        line.loans.lend(self._module, stage)
        result = run_at(line, stage, self._module, self._plain, leaves, spec)
        self._check(result)
        return result

    def _check(self, result: Any) -> None:
        """Raise ModelError for tensors in an object that cannot be looked into."""
        for leaf in pytree.tree_leaves(result):
            inside = getattr(leaf, "__dict__", {}).values() if not isinstance(leaf, Tensor) else ()
            if any(isinstance(value, Tensor) for value in inside):
                raise ModelError(
                    f"{self._name} returns a {type(leaf).__name__} with tensors in it, which "
                    "cannot be followed to other workers. Return tensors, tuples, lists or dicts, "
                    "or register it with torch.utils._pytree."
                )


def run_at(
    line: Line,
    stage: int,
    module: nn.Module,
    plain: Callable[..., Any],
    leaves: list[Any],
    spec: pytree.TreeSpec,
) -> Any:
    """The forward of `module` where `stage` is, and what it returns as pieces on all ranks."""
    runs, drawn = runs_of(line, leaves), line.draw()
    with line.inside():
        with torch._C.DisableTorchFunctionSubclass():
            values = [at(line, leaf, stage) for leaf in leaves]
        if is_here := stage in line.run.stages:
            line.sow(drawn, "stage", stage)
            args, kwargs = pytree.tree_unflatten(values, spec)
            result = gather_nested(recomputed_layers.by_itself(plain)(*args, **kwargs))
        else:
            likes = [leaf.like if isinstance(leaf, Piece) else leaf for leaf in leaves]
            once = plain.plain if isinstance(plain, RecomputedForward) else plain
            result = line.forms.of(module, once, likes, spec)
        line.sow(drawn, "all")
        return pytree.tree_map_only(
            Tensor,
            lambda value: Piece(line, stage, value if is_here else None, value, runs),
            result,
        )


class FloatingForward(Forward):
    """That of a module without parameters: run where its input is."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        line = self._line
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if line.is_whole or not any(isinstance(leaf, Piece) for leaf in leaves):
            return self._plain(*args, **kwargs)
        home = max(leaf.home for leaf in leaves if isinstance(leaf, Piece))
        line.ran(self._module, home)
        return run_at(line, home, self._module, self._plain, leaves, spec)
