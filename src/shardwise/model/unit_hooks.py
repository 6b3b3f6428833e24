"""Hooks that report when forward and backward passes need a unit's parameters.

A hooked module needs its unit while its forward pass runs. Hooks on its outputs report when the
backward pass reaches the unit. Where autograd would save a unit's parameters, it saves references
to the unit's memory instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from shardwise.errors import CollectiveError
from shardwise.model.module_hooks import Hooked, attach


def untraced(function: Any) -> Any:
    """Exclude `function` and the functions that it calls from torch.compile."""
    # Equivalent to torch.compiler.disable, but without importing the compiler, which takes seconds.
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True
    return function


class SavedReference:
    """Placeholder for a tensor that autograd saves."""

    __slots__ = ()


class UnitManager(Protocol):
    """Interface of the object that hooks report to. See states/parameters/residency.py."""

    @property
    def is_idle(self) -> bool:
        """True if neither a forward nor a backward pass is in progress."""

    def enter(self, number: int, hook: int, module: nn.Module) -> None:
        """Record that `module` needs unit `number` from now on."""

    def leave(self, number: int, *, failed: bool) -> None:
        """Record that a forward pass no longer needs unit `number`."""

    def touch(self, number: int) -> None:
        """Record that a backward pass needs unit `number`."""

    def keep(self, number: int | None = None) -> None:
        """Keep unit `number`, or all gathered units, until the next backward pass has completed."""

    @property
    def reference_of(self) -> Callable[[Tensor], SavedReference | None]:
        """Function that returns a reference for tensors in a unit's memory, and None for others."""

    def fetch(self, reference: Any) -> Tensor:
        """Return the tensor that `reference` stands for, once its unit is available."""


class UnitHooks:
    """Hooks on several models. When the units' layout changes, only `manager` is replaced.

    `before` is called before each forward pass that may be used for training.
    """

    def __init__(self) -> None:
        self.manager: UnitManager | None = None
        self.before: Callable[[], None] | None = None
        self._handles: dict[tuple[nn.Module, int], list[Hooked]] = {}
        self._hook_count = 0

    def attach(self, wanted: Sequence[tuple[nn.Module, int]]) -> None:
        """Hook the `wanted` modules, each with the index of the unit that it needs."""
        # torch.func looks this function up at each call, so replacing it allows torch.func in
        # forward passes.
        torch.autograd.graph.disable_saved_tensors_hooks = _without_references
        # Keep hooks that are still wanted, because re-attaching them would change their order.
        for place in [place for place in self._handles if place not in wanted]:
            for handle in self._handles.pop(place):
                handle.remove()
        for place in wanted:
            if place not in self._handles:
                hook = ModuleHook(self, place[1], self._hook_count)
                self._hook_count += 1
                self._handles[place] = hook.attach(place[0])

    def remove(self) -> None:
        self.attach([])
        self.manager = None


@dataclass(frozen=True)
class _OpenForward:
    """A forward pass in progress.

    Args:
        recording: Whether autograd records it.
        saving: Saved-tensor hooks that were pushed for it.
        before: Exception that was already being handled when it started.
    """

    recording: bool
    saving: saved_tensors_hooks | None
    before: BaseException | None


class ModuleHook:
    """Hooks on a module for one unit. Their counterparts in a copy of the model do nothing."""

    def __init__(self, hooks: UnitHooks | None, number: int, index: int) -> None:
        self._hooks = hooks
        self._number = number
        self._index = index
        self._open: list[_OpenForward] = []

    @property
    def _manager(self) -> UnitManager | None:
        return None if self._hooks is None else self._hooks.manager

    def attach(self, module: nn.Module) -> list[Hooked]:
        """Report every forward pass of `module`, until the handles are removed."""
        return [
            attach(module.register_forward_pre_hook, self.enter, prepend=True),
            attach(module.register_forward_hook, self.leave, always_call=True),
        ]

    @untraced
    def enter(self, module: nn.Module, args: Any) -> None:
        """Report the start of a forward pass."""
        del args
        if self._hooks is None or self._manager is None:
            return
        # `before` may enable or disable gradients, so read `recording` after it.
        if torch.is_grad_enabled() and self._hooks.before is not None and self._manager.is_idle:
            self._hooks.before()
        recording = torch.is_grad_enabled()
        # Inside torch.func.grad and vjp, autograd saves the parameters themselves.
        refers = recording and _hooks_are_enabled()
        saving = _saving(self._manager) if refers else None
        self._open.append(_OpenForward(recording, saving, sys.exc_info()[1]))
        if saving is not None:
            saving.__enter__()
        # Hide this from modes that track the user's operations, and run it below all levels of
        # torch.func, because tensors that are created here outlive those levels.
        with torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch():
            self._manager.enter(self._number, self._index, module)
            if recording and not refers:
                self._manager.keep(self._number)

    @untraced
    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Report the end of a forward pass, even if it failed."""
        del module, args
        if self._manager is None or not self._open:
            return
        opened = self._open.pop()
        # A forward pass inside an `except` block sees the exception that is being handled there.
        # Only a different exception is its own.
        error = sys.exc_info()[1]
        failed = error is not None and error is not opened.before
        if opened.saving is not None:
            opened.saving.__exit__()
        if opened.recording:
            functorch = torch._C._functorch
            for tensor in [output] if isinstance(output, Tensor) else pytree.tree_leaves(output):
                # Unwrap torch.func's wrappers: torch.func differentiates inside its levels, while
                # the unit stays gathered.
                plain = tensor
                while isinstance(plain, Tensor) and functorch.is_functorch_wrapped_tensor(plain):
                    plain = functorch.get_unwrapped(plain)
                if isinstance(plain, Tensor) and plain.grad_fn is not None:
                    # A tensor hook fires when the backward pass reaches the output, before any node
                    # of the unit runs.
                    plain.register_hook(self._touch)  # type: ignore[no-untyped-call]
        # After a failure, suppress errors of gathers, so that the first error is shown.
        ignored = suppress(CollectiveError) if failed else nullcontext()
        with ignored, torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch():
            self._manager.leave(self._number, failed=failed)

    @untraced
    def _touch(self, grad: Tensor) -> None:
        del grad
        if self._manager is not None:
            with torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch():
                self._manager.touch(self._number)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        return ModuleHook(None, self._number, self._index)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_hooks": None, "_open": []}


class _ReferenceHooks:
    """Saves references instead of a unit's tensors. Other tensors go to the enclosing hooks."""

    def __init__(self, manager: UnitManager, outer: Any) -> None:
        self.manager = manager
        self.outer = outer
        """The enclosing pair of hooks, or None."""
        self._reference_of = manager.reference_of

    @untraced
    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd stores for `tensor`."""
        with torch._C.DisableTorchFunction():
            reference = self._reference_of(tensor)
            if reference is not None:
                if not (tensor.is_conj() or tensor.is_neg()):
                    return reference
                # A reference can only represent plain memory. A lazy conjugate or negative is a
                # view with a flag.
                tensor = tensor.clone()
        return tensor if self.outer is None else self.outer[0](tensor)

    @untraced
    def unpack(self, saved: Any) -> Any:
        """Return the tensor that `saved` represents."""
        if isinstance(saved, SavedReference):
            with torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch():
                return self.manager.fetch(saved)
        return saved if self.outer is None else self.outer[1](saved)


def find_outer_unpack(unpack: Any) -> Any:
    """Return the enclosing hook that unpacks tensors other than parameters.

    Returns None if `unpack` is one of our hooks and no other hook encloses it.
    """
    while isinstance(hooks := getattr(unpack, "__self__", None), _ReferenceHooks):
        unpack = None if hooks.outer is None else hooks.outer[1]
    return unpack


@contextmanager
def _without_references(error_message: str) -> Iterator[None]:
    """Replacement for torch.autograd.graph.disable_saved_tensors_hooks.

    torch.func.grad and vjp reject active hooks, and ours are active inside a forward pass. Inside
    the block, our hooks are therefore removed, and units stay gathered.
    """
    taken: list[tuple[Any, Any]] = []
    # Only our own hooks on top of the stack can be removed. The user's hooks below them stay.
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks = getattr(top[0], "__self__", None)
        if not isinstance(hooks, _ReferenceHooks):
            break
        torch._C._autograd._pop_saved_tensors_default_hooks()
        taken.append(top)
        if torch.is_grad_enabled():
            hooks.manager.keep()
    try:
        with _disable_saved_tensors_hooks(error_message):
            yield
    finally:
        # Push in reverse, to restore the stack's order.
        for pack, unpack in reversed(taken):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


_hooks_are_enabled: Any = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
_disable_saved_tensors_hooks = torch.autograd.graph.disable_saved_tensors_hooks


def _saving(manager: UnitManager) -> saved_tensors_hooks | None:
    """Return hooks that save references, or None if hooks for the same `manager` are active."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    around = getattr(outer[0], "__self__", None) if outer is not None else None
    # This module is inside a hooked module, whose hooks already save its references.
    if isinstance(around, _ReferenceHooks) and around.manager is manager:
        return None
    hooks = _ReferenceHooks(manager, outer)
    return saved_tensors_hooks(hooks.pack, hooks.unpack)


def hooked_modules(
    model: nn.Module, unit_of: Mapping[nn.Parameter, int], units: Mapping[nn.Module, int]
) -> list[tuple[nn.Module, int]]:
    """Return the modules of `model` whose forward passes need a unit, with the unit's index.

    These are the modules in `units` (including the model itself), and the modules with a parameter
    of the model's remainder or of a different unit than their parent's. Each of them can therefore
    be called separately.
    """
    found: list[tuple[nn.Module, int]] = []
    seen: set[nn.Module] = set()

    def collect(module: nn.Module, around: int | None) -> None:
        if module in seen:
            return
        seen.add(module)
        number = units.get(module, around)
        needed = {unit_of[p] for p in module._parameters.values() if p is not None and p in unit_of}
        # Parameters of the module's own unit are gathered by the hook of that unit's module. The
        # model's remainder has no such module below the model, so each module that holds its
        # parameters needs a hook.
        if number != units.get(model):
            needed.discard(number)
        if module in units:
            needed.add(units[module])
        found.extend((module, unit) for unit in sorted(needed))
        for child in module.children():
            collect(child, number)

    collect(model, None)
    return found
