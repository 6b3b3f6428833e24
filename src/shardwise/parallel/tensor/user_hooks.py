"""Rejects user hooks on modules between split layers, in the first forward pass that runs them.

Such a hook would see only part of the features, and mistake it for the full tensor.
"""

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
    """Rejects user hooks on modules that run between split layers.

    `name_of` returns a module's name for messages.
    """

    def __init__(self, name_of: Callable[[nn.Module], str] | None = None) -> None:
        self._name_of = name_of or (lambda module: type(module).__name__)
        self._handles: list[RemovableHandle] = []
        self._thread = 0

    def open(self) -> None:
        """Start checking modules. Called at the first split layer of a region."""
        # Skip recomputations during the backward pass, because their forward pass was checked.
        if self._handles or torch._C._current_graph_task_id() != -1:
            return
        self.check_global()
        # The hooks are global, so record the thread whose region is open.
        self._thread = get_ident()
        self._handles = [
            of_torch.register_module_forward_pre_hook(self._begins),
            of_torch.register_module_forward_hook(self._ends),
        ]

    def check_global(self) -> None:
        """Raise UsageError if the user has registered hooks on every module."""
        for name in _GLOBAL:
            if _has_user_hooks(getattr(of_torch, name, {})):
                raise _hook_error(
                    f"{_WORDS[name.removeprefix('_global')]} on every module",
                    "Register hooks on single modules, or start without --tensor.",
                )

    def close(self) -> None:
        """Stop checking modules.

        Called at the end of a region, after which all ranks have the same tensors again.
        """
        while self._handles:
            self._handles.pop().remove()

    def _begins(self, module: nn.Module, args: Any) -> None:
        del args
        # The input of a column-wise layer is not split, so a pre-hook on the layer is fine.
        gets_whole = getattr(module, "takes_whole", False)
        self._check_in_thread(module, _BEFORE[1:] if gets_whole else _BEFORE)

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        del args, output
        self._check_in_thread(module, _AFTER)

    def _check_in_thread(self, module: nn.Module, kinds: tuple[str, ...]) -> None:
        # Global hooks are called for all modules, and another thread may be running a different
        # model.
        if get_ident() == self._thread:
            self.check(module, kinds)

    def check(self, module: nn.Module, kinds: tuple[str, ...] = _ALL) -> None:
        """Raise UsageError if the user has hooks of these kinds on `module`."""
        attributes = vars(module)
        for kind in kinds:
            if attributes[kind] and _has_user_hooks(attributes[kind]):
                self.close()
                name = self._name_of(module)
                raise _hook_error(
                    f"{_WORDS[kind]} on {name}",
                    'Leave the layers around it whole with tensor_plan={"...": "whole"}, or '
                    "register the hook on a module that contains all of them.",
                )


def _hook_error(what: str, advice: str) -> UsageError:
    return UsageError(
        f"{what} runs between split layers (--tensor), where each worker has only a part of the "
        f"features, and the hook would treat this part as the full tensor. {advice}"
    )


def _has_user_hooks(hooks: Any) -> bool:
    return any(_is_user_hook(hook) for hook in hooks.values())


def _is_user_hook(hook: Any) -> bool:
    package = (getattr(hook, "__module__", None) or "").partition(".")[0]
    # Hooks of torch and of this library can handle parts.
    return hook is silent_hook or package not in ("torch", "shardwise")


def silent_hook(*_: Any) -> None:
    """Do nothing. Stands in for a user's hook that must not run."""


@contextmanager
def silence_hooks(module: nn.Module) -> Iterator[None]:
    """Context manager that disables the user's hooks on `module` and its submodules.

    They are also disabled in any copies that are made inside the block.
    """
    hooks_by_module = [
        (inner, kind, vars(inner)[kind]) for inner in module.modules() for kind in _ALL
    ]
    try:
        for inner, kind, hooks in hooks_by_module:
            pairs = (
                (key, silent_hook if _is_user_hook(hook) else hook) for key, hook in hooks.items()
            )
            vars(inner)[kind] = OrderedDict(pairs)
        yield
    finally:
        for inner, kind, hooks in hooks_by_module:
            vars(inner)[kind] = hooks
