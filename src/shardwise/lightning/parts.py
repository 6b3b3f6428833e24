"""Finds the modules that each of several optimizers trains, so that each steps on its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn, optim

from shardwise.bridging.trained_models import connected_parts
from shardwise.errors import UsageError


def models_of(module: nn.Module, optimizers: Sequence[optim.Optimizer]) -> list[nn.Module]:
    """Return the parts of `module` that get separate engines.

    With one optimizer, or optimizers with common parameters, that is `module` itself. Otherwise it
    is the largest modules whose parameters only one optimizer trains. Raises UsageError if two
    optimizers train parameters of the same innermost module.
    """
    inside = {id(p) for p in module.parameters()}
    connected = [part.parameters for part in connected_parts([], optimizers)]
    trained = [part for part in connected if part & inside]
    if len(trained) < 2:
        return [module]
    return [model for part in trained for model in _modules(module, part, trained)]


def _modules(
    module: nn.Module, part: set[int], trained: Sequence[set[int]], name: str = ""
) -> Iterator[nn.Module]:
    """The largest modules in `module`, called `name`, with parameters of `part` and of no other of
    `trained`."""
    held = {id(p) for p in module.parameters()}
    if not held & part:
        return
    if not any(other & held for other in trained if other is not part):
        yield module
        return
    for key, parameter in module.named_parameters(recurse=False):
        if id(parameter) in part:
            path = f"{name}.{key}".lstrip(".")
            raise UsageError(
                f"{path} is in {type(module).__name__} together with parameters of another "
                "optimizer, and each optimizer steps alone: put the parameters of each optimizer "
                "into separate modules (self.generator, self.discriminator)."
            )
    for key, child in module.named_children():
        yield from _modules(child, part, trained, f"{name}.{key}")
