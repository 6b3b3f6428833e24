"""Finds and replaces the tensors that a function captures, such as the mods of flex attention.

A mod is a function that uses tensors which are not its arguments: document numbers, slopes, biases.

    def mask_mod(b, h, q, kv):
        return documents[b, q] == documents[b, kv]        documents is captured

Captured values are closure variables, default arguments, arguments of `functools.partial`,
attributes of callable objects, and the values that captured functions capture, as with
`and_masks`. To replace a tensor, the functions are copied. Attributes of modules and global
variables cannot be replaced, because other code uses them too.

The name of a tensor is unique in a mod. The name of a function that is captured precedes the names
of the values that it captures:

    and_masks(causal, same_document)      mask_mods[1]:documents
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from types import (
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

Change = Callable[[str, Tensor, bool], Tensor]
"""Takes the name of a captured tensor, the tensor, and True if it can be replaced. Returns the
tensor to use."""


def with_tensors(mod: Any, change: Change, *, reads_globals: bool = False) -> Any:
    """Return `mod`, or a copy of it with the tensors that `change` returns.

    The order of the calls of `change` depends only on the code, so it is the same on all ranks. If
    `reads_globals` is true, `change` also gets global variables that functions use.
    """
    name = "" if isinstance(mod, FunctionType) else getattr(mod, "__name__", type(mod).__name__)
    return _Copies(change, reads_globals).of(mod, name, frozenset())


class _Copies:
    """Copies captured values, and keeps those whose tensors do not change."""

    def __init__(self, change: Change, reads_globals: bool) -> None:
        self._change, self._can_replace, self._reads_globals = change, True, reads_globals
        # Also for functions that refer to themselves. The values are kept alive, because of `id`.
        self._known: dict[tuple[int, frozenset[str]], tuple[Any, Any]] = {}

    def of(self, value: Any, name: str, used: frozenset[str]) -> Any:
        """Return `value` or a copy.

        `name` is a name for messages. `used` are the attributes that the code around may read.
        """
        if isinstance(value, Tensor):
            return self._change(name, value, self._can_replace)
        if isinstance(value, (str, bytes, int, float, type, ModuleType, type(None))):
            return value
        # Functions may read different attributes of an object.
        key = id(value), frozenset() if isinstance(value, FunctionType) else used
        if key not in self._known:
            self._known[key] = value, value
            self._known[key] = value, self._copy(value, name, used)
        return self._known[key][1]

    def _copy(self, value: Any, name: str, used: frozenset[str]) -> Any:
        if isinstance(value, FunctionType):
            return self._copy_function(value, name)
        if isinstance(value, MethodType):
            function = value.__func__
            owner = self.of(value.__self__, name, _names_in(getattr(function, "__code__", None)))
            return value if owner is value.__self__ else MethodType(function, owner)
        if isinstance(value, functools.partial):
            function = self.of(value.func, name, used)
            args = self._copy_all(value.args, f"{name}.args", used)
            keywords = self._copy_all(value.keywords, f"{name}.keywords", used)
            is_same = function is value.func and args is value.args and keywords is value.keywords
            return value if is_same else functools.partial(function, *args, **keywords)
        if isinstance(value, (tuple, list, dict)):
            return self._copy_all(value, name, used)
        return self._copy_object(value, name, used)

    def _copy_all(self, values: Any, name: str, used: frozenset[str]) -> Any:
        """Return a container like `values` with copies, or `values` itself if nothing changes."""
        found, nest = pytree.tree_flatten_with_path(values)
        leaves = [leaf for _, leaf in found]
        copies = [self.of(leaf, name + pytree.keystr(path), used) for path, leaf in found]
        if all(new is old for new, old in zip(copies, leaves, strict=True)):
            return values
        return pytree.tree_unflatten(copies, nest)

    def _copy_function(self, function: FunctionType, name: str) -> FunctionType:
        code, used = function.__code__, _names_in(function.__code__)
        scope = f"{name}:" if name else ""
        if self._reads_globals:
            with _Fixed(self):
                for key in sorted(used & function.__globals__.keys()):
                    self.of(function.__globals__[key], f"{scope}{key}", used)
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        before = {key: cell.cell_contents for key, cell in cells.items() if not _is_empty(cell)}
        after = {key: self.of(value, f"{scope}{key}", used) for key, value in before.items()}
        old, keywords = function.__defaults__ or (), function.__kwdefaults__ or {}
        named = code.co_varnames[code.co_argcount - len(old) : code.co_argcount]
        new = [self.of(value, scope + key, used) for key, value in zip(named, old, strict=True)]
        new_keywords = {key: self.of(value, scope + key, used) for key, value in keywords.items()}
        both = [*before.values(), *old, *keywords.values()]
        if all(map(operator.is_, [*after.values(), *new, *new_keywords.values()], both)):
            return function
        closure = tuple(
            CellType(after[key]) if key in after else cell for key, cell in cells.items()
        )
        copied = FunctionType(code, function.__globals__, function.__name__, tuple(new), closure)
        copied.__kwdefaults__ = new_keywords
        copied.__dict__.update(function.__dict__)
        return copied

    def _copy_object(self, value: Any, name: str, used: frozenset[str]) -> Any:
        call = getattr(type(value), "__call__", None)  # noqa: B004, its code is needed
        used |= _names_in(getattr(call, "__code__", None))
        attributes = dict(getattr(value, "__dict__", {}))
        is_module = isinstance(value, nn.Module)
        attributes |= {
            key: getattr(value, key)
            for key in used
            if isinstance(getattr(type(value), key, None), MemberDescriptorType)
            and hasattr(value, key)
        }
        if is_module:
            attributes |= value._buffers | value._parameters | value._modules
        with _Fixed(self, is_module):
            after = {
                key: self.of(attributes[key], f"{name}.{key}", used)
                for key in sorted(used & attributes.keys())
            }
        changed = {key: new for key, new in after.items() if new is not attributes[key]}
        if not changed:
            return value
        copied = copy.copy(value)
        for key, new in changed.items():
            object.__setattr__(copied, key, new)  # the class may be a frozen dataclass
        return copied


class _Fixed:
    """Context manager that forbids replacing tensors."""

    def __init__(self, copies: _Copies, is_fixed: bool = True) -> None:
        self._copies, self._is_fixed = copies, is_fixed

    def __enter__(self) -> None:
        self._before = self._copies._can_replace
        self._copies._can_replace = self._before and not self._is_fixed

    def __exit__(self, *error: object) -> None:
        self._copies._can_replace = self._before


def _names_in(code: CodeType | None) -> frozenset[str]:
    """Return the names of globals and attributes in `code`, and in functions defined there."""
    if code is None:
        return frozenset()
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(code.co_names).union(*(_names_in(each) for each in inner))


def _is_empty(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False
