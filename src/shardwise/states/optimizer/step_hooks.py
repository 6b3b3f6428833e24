"""Keeps torch from calling step hooks in updates that the engine makes.

A step of an engine is one step of the user's optimizer, whichever copies make it and in how many
calls. So torch calls no hook there, and the engine calls each of them once, with the user's
optimizer, before the update and after it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import optim
from torch.optim import optimizer as torch_optimizer

Hook = Callable[[optim.Optimizer, Any, Any], Any]

_GLOBAL = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_OF_ONE = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def pre_hooks(optimizer: optim.Optimizer) -> list[tuple[int, Hook]]:
    """The hooks that torch calls before a step of `optimizer`, in its order, with their ids."""
    several: Any = torch_optimizer._global_optimizer_pre_hooks
    return [*several.items(), *optimizer._optimizer_step_pre_hooks.items()]


def post_hooks(optimizer: optim.Optimizer) -> list[Hook]:
    """The hooks that torch calls after a step of `optimizer`, in its order."""
    several: Any = torch_optimizer._global_optimizer_post_hooks
    return [*optimizer._optimizer_step_post_hooks.values(), *several.values()]


@contextmanager
def without_hooks(optimizer: optim.Optimizer) -> Iterator[None]:
    """Inside the block, `optimizer.step()` calls no hooks.

    Hooks still run for the steps of other optimizers, such as one that `optimizer` is a wrapper of.
    """
    attributes, module = vars(optimizer), vars(torch_optimizer)
    of_one = {name: attributes[name] for name in _OF_ONE}
    of_all = {name: module[name] for name in _GLOBAL if module[name]}
    attributes.update({name: OrderedDict() for name in _OF_ONE})
    module.update({name: _except_for(optimizer, hooks) for name, hooks in of_all.items()})
    try:
        yield
    finally:
        attributes.update(of_one)
        module.update(of_all)


def _except_for(optimizer: optim.Optimizer, hooks: Mapping[int, Hook]) -> OrderedDict[int, Hook]:
    return OrderedDict((n, partial(_unless, optimizer, hook)) for n, hook in hooks.items())


def _unless(optimizer: optim.Optimizer, hook: Hook, stepping: optim.Optimizer, *args: Any) -> Any:
    return None if stepping is optimizer else hook(stepping, *args)
