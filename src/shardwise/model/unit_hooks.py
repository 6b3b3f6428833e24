"""Unit hooks: report when forward and backward need the parameters of a unit.

A forward that enters a hooked module needs its unit until it leaves. For backward, a hook on the
outputs reports that it comes to the unit, and what autograd saves of the unit's parameters is
replaced by a reference to where they are.
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


def _untraced(function: Any) -> Any:
    """Let torch.compile leave `function` and what it calls as they are.

    As torch.compiler.disable does, which would take seconds to import.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True
    return function


class SavedReference:
    """Stands in for a saved tensor."""

    __slots__ = ()


class UnitManager(Protocol):
    """What unit hooks report to; see states/parameters/residency.py."""

    @property
    def is_idle(self) -> bool:
        """Whether no forward and no backward is under way."""

    def enter(self, number: int, hook: int, module: nn.Module) -> None:
        """Unit `number` is needed from now on, by `module`."""

    def leave(self, number: int, *, failed: bool) -> None:
        """Unit `number` is needed no longer."""

    def touch(self, number: int) -> None:
        """Unit `number` is needed in a backward."""

    def keep(self, number: int | None = None) -> None:
        """Keep unit `number`, or all that are whole, until the next backward has ended."""

    @property
    def reference_of(self) -> Callable[[Tensor], SavedReference | None]:
        """Makes the reference to save instead of a tensor, if its memory is a unit's."""

    def fetch(self, reference: Any) -> Tensor:
        """The tensor that a reference was made of, its unit shown."""


class UnitHooks:
    """The hooks of some models. They stay when units are laid out anew; `manager` is replaced.

    `before` is called before a forward that may be trained from begins.
    """

    def __init__(self) -> None:
        self.manager: UnitManager | None = None
        self.before: Callable[[], None] | None = None
        self._handles: dict[tuple[nn.Module, int], list[Hooked]] = {}
        self._made = 0

    def attach(self, wanted: Sequence[tuple[nn.Module, int]]) -> None:
        """Hook the `wanted`, modules with the number of the unit that they need."""
        _make_way_for_functorch()
        for place in [place for place in self._handles if place not in wanted]:
            for handle in self._handles.pop(place):
                handle.remove()
        for place in wanted:
            if place not in self._handles:
                hook = ModuleHook(self, place[1], self._made)
                self._made += 1
                self._handles[place] = hook.attach(place[0])

    def remove(self) -> None:
        """Take all hooks off."""
        self.attach([])
        self.manager = None


@dataclass(frozen=True)
class _OpenForward:
    """A forward under way: whether it records, what it pushed for that, and the error that was
    being handled around it."""

    recording: bool
    saving: saved_tensors_hooks | None
    before: BaseException | None


class ModuleHook:
    """The hooks on one module for one unit. A copy of the model has some that do nothing."""

    def __init__(self, hooks: UnitHooks | None, number: int, index: int) -> None:
        self._hooks = hooks
        self._number = number
        self._index = index
        self._open: list[_OpenForward] = []

    @property
    def _manager(self) -> UnitManager | None:
        return None if self._hooks is None else self._hooks.manager

    def attach(self, module: nn.Module) -> list[Hooked]:
        """Watch every forward of `module` until the handles are removed."""
        return [
            attach(module.register_forward_pre_hook, self.enter, prepend=True),
            attach(module.register_forward_hook, self.leave, always_call=True),
        ]

    @_untraced
    def enter(self, module: nn.Module, args: Any) -> None:
        """Before forward."""
        del args
        if self._hooks is None or self._manager is None:
            return
        if torch.is_grad_enabled() and self._hooks.before is not None and self._manager.is_idle:
            self._hooks.before()
        recording = torch.is_grad_enabled()
        # Inside torch.func.grad and vjp autograd saves parameters themselves.
        refers = recording and _hooks_are_enabled()
        saving = _saving(self._manager) if refers else None
        self._open.append(_OpenForward(recording, saving, sys.exc_info()[1]))
        if saving is not None:
            saving.__enter__()
        # Not seen by modes that follow the user's operations, and below all levels of torch.func:
        # tensors that are made here outlive those levels.
        with torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch():
            self._manager.enter(self._number, self._index, module)
            if recording and not refers:
                self._manager.keep(self._number)

    @_untraced
    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """After forward, also after one that failed."""
        del module, args
        if self._manager is None or not self._open:
            return
        opened = self._open.pop()
        error = sys.exc_info()[1]
        failed = error is not None and error is not opened.before
        if opened.saving is not None:
            opened.saving.__exit__()
        if opened.recording:
            for tensor in [output] if isinstance(output, Tensor) else pytree.tree_leaves(output):
                # torch.func differentiates inside of its levels while the unit is kept.
                plain = _below_all_levels(tensor) if isinstance(tensor, Tensor) else tensor
                if isinstance(plain, Tensor) and plain.grad_fn is not None:
                    plain.register_hook(self._reached)  # type: ignore[no-untyped-call]
        ignored = suppress(CollectiveError) if failed else nullcontext()  # the first error is shown
        with ignored, torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch():
            self._manager.leave(self._number, failed=failed)

    @_untraced
    def _reached(self, grad: Tensor) -> None:
        del grad
        if self._manager is not None:
            with torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch():
                self._manager.touch(self._number)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        return ModuleHook(None, self._number, self._index)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_doors": None, "_open": []}


class _ReferenceHooks:
    """Saves references instead of what `manager` shows; other tensors as hooks further out say."""

    def __init__(self, manager: UnitManager, outer: Any) -> None:
        self.manager = manager
        self.outer = outer
        """The hooks further out, a pair; None where there are none."""
        self._reference_of = manager.reference_of

    @_untraced
    def pack(self, tensor: Tensor) -> Any:
        """What to keep of `tensor`."""
        with torch._C.DisableTorchFunction():
            reference = self._reference_of(tensor)
            if reference is not None:
                if not (tensor.is_conj() or tensor.is_neg()):
                    return reference
                tensor = tensor.clone()
        return tensor if self.outer is None else self.outer[0](tensor)

    @_untraced
    def unpack(self, saved: Any) -> Any:
        """The tensor that `saved` was kept of."""
        if isinstance(saved, SavedReference):
            with torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch():
                return self.manager.fetch(saved)
        return saved if self.outer is None else self.outer[1](saved)


def unpack_of_others(unpack: Any) -> Any:
    """Return the hook that unpacks tensors which are no parameters, if `unpack` is a hook of ours;
    None if nothing was packed."""
    while isinstance(hooks := getattr(unpack, "__self__", None), _ReferenceHooks):
        unpack = None if hooks.outer is None else hooks.outer[1]
    return unpack


def _below_all_levels(tensor: Tensor) -> Tensor:
    """Return the plain tensor inside the wrappers of torch.func."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


@contextmanager
def _without_references(error_message: str) -> Iterator[None]:
    """Stands in for torch.autograd.graph.disable_saved_tensors_hooks.

    torch.func.grad and vjp refuse hooks that are on already, as ours are inside of a forward. So
    ours are off inside the block, and units stay whole instead.
    """
    taken: list[tuple[Any, Any]] = []
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
        for pack, unpack in reversed(taken):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


_hooks_are_enabled: Any = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
_disable_saved_tensors_hooks = torch.autograd.graph.disable_saved_tensors_hooks


def _make_way_for_functorch() -> None:
    """Allow torch.func inside of forwards: it looks the function up at each call."""
    torch.autograd.graph.disable_saved_tensors_hooks = _without_references


def _saving(manager: UnitManager) -> saved_tensors_hooks | None:
    """The hooks that save references; None where those of the same `manager` are on already."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    around = getattr(outer[0], "__self__", None) if outer is not None else None
    if isinstance(around, _ReferenceHooks) and around.manager is manager:
        return None
    hooks = _ReferenceHooks(manager, outer)
    return saved_tensors_hooks(hooks.pack, hooks.unpack)


def hooked_modules(
    model: nn.Module, unit_of: Mapping[nn.Parameter, int], units: Mapping[nn.Module, int]
) -> list[tuple[nn.Module, int]]:
    """The modules of `model` whose forwards need a unit, with its number.

    Those of `units`, the model itself among them; and every module that holds a parameter of
    another unit than the one around it, or of the model's rest: so that it can be called alone.
    """
    found: list[tuple[nn.Module, int]] = []
    seen: set[nn.Module] = set()

    def collect(module: nn.Module, around: int | None) -> None:
        if module in seen:
            return
        seen.add(module)
        number = units.get(module, around)
        needed = {unit_of[p] for p in module._parameters.values() if p is not None and p in unit_of}
        if number != units.get(model):
            needed.discard(number)
        if module in units:
            needed.add(units[module])
        found.extend((module, each) for each in sorted(needed))
        for child in module.children():
            collect(child, number)

    collect(model, None)
    return found
