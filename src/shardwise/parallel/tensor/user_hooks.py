"""Refuses the user's hooks on modules between split layers, at the first forward that reaches one:
such a hook would see a part of the features and take it for all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_torch
from torch.utils.hooks import RemovableHandle

from shardwise.errors import UsageError

_BEFORE = ("_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_AFTER = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_ALL = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL = tuple(f"_global{name}" for name in _ALL)

_WORDS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward hook",
}


class HookGuard:
    """Checks the modules whose forwards begin or end while a region is open.

    `name_of` gives the name of a module in messages.
    """

    def __init__(self, name_of: Callable[[nn.Module], str] | None = None) -> None:
        self._name_of = name_of or (lambda module: type(module).__name__)
        self._handles: list[RemovableHandle] = []
        self._thread = 0

    def open(self) -> None:
        """Start checking: from here on each rank has a part. A recomputation does as its forward
        did."""
        if self._handles or torch._C._current_graph_task_id() != -1:
            return
        for name in _GLOBAL:
            if _has_users(getattr(of_torch, name, {})):
                raise _refused(
                    f"{_WORDS[name.removeprefix('_global')]} on every module",
                    "Hook the modules that you mean, or start without --tensor.",
                )
        self._thread = get_ident()
        self._handles = [
            of_torch.register_module_forward_pre_hook(self._begins),
            of_torch.register_module_forward_hook(self._ends),
        ]

    def close(self) -> None:
        """Stop checking: all ranks have the same again."""
        while self._handles:
            self._handles.pop().remove()

    def _begins(self, module: nn.Module, args: Any) -> None:
        del args
        gets_whole = getattr(module, "takes_whole", False)
        self._check(module, _BEFORE[1:] if gets_whole else _BEFORE)

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        del args, output
        self._check(module, _AFTER)

    def _check(self, module: nn.Module, kinds: tuple[str, ...]) -> None:
        if get_ident() != self._thread:
            return
        held = vars(module)
        for kind in kinds:
            if held[kind] and _has_users(held[kind]):
                self.close()
                name = self._name_of(module)
                raise _refused(
                    f"{_WORDS[kind]} on {name}",
                    'Leave the layers around it whole, tensor_plan={"...": "whole"} with their '
                    "names, or hook a module that has them all inside.",
                )


def _refused(what: str, advice: str) -> UsageError:
    return UsageError(
        f"{what} stands between layers that are split (--tensor), where each worker has a part of "
        f"the features: it would take the part for the whole. {advice}"
    )


def _has_users(hooks: Any) -> bool:
    return any(_is_users(hook) for hook in hooks.values())


def _is_users(hook: Any) -> bool:
    room = (getattr(hook, "__module__", None) or "").partition(".")[0]
    return hook is silent or room not in ("torch", "shardwise")


def silent(*_: Any) -> None:
    """Takes the place of a user's hook that must not be called."""


@contextmanager
def silenced(module: nn.Module) -> Iterator[None]:
    """Silence the user's hooks on `module` and its submodules inside the block, in copies too."""
    held = [(inner, kind, vars(inner)[kind]) for inner in module.modules() for kind in _ALL]
    try:
        for inner, kind, hooks in held:
            pairs = ((key, silent if _is_users(hook) else hook) for key, hook in hooks.items())
            vars(inner)[kind] = OrderedDict(pairs)
        yield
    finally:
        for inner, kind, hooks in held:
            vars(inner)[kind] = hooks
