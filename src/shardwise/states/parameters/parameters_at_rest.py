"""Sharded parameters at rest: reading or writing their values raises at the user's line.

While this rank has a part of it only, a parameter keeps its shape, dtype, device, gradient and
hooks, and no values: a NaN or a stale one would go on in silence. Two ways lead to values, and both
are watched while it rests:

    Python      the object is of a subclass of its class, in which torch asks `__torch_function__`
                about every call; `p.data` and `p.detach()` are tensors without memory alike
    torch       its dispatch keys have one more, for which the only kernel is one that raises: for
                what autograd has saved, torch.func, torch.tensor(p)

Whole, it is of its own class and has its own keys again, at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.errors import ParameterAccess, UsageError
from shardwise.parallel.tensor.torch_functions import SIZES
from shardwise.states.parameters.torch_calls import FORMAL, functions, what_is_done, written

unguarded = torch._C.DisableTorchFunctionSubclass
"""Inside this block `__torch_function__` is not asked: for the engine's own bookkeeping of many
parameters. No code of a user's may run inside."""

PASSES_ON = True
"""Calls from here are made for their caller, for which parallel/tensor/parameter_uses.py looks."""

_KEY: Any = torch._C._parse_dispatch_key("DeferredInit")
"""A dispatch key that comes before all others of a tensor, and that torch has no use for itself."""
_KEYS = torch._C.DispatchKeySet(_KEY)


class SwappingData:
    """Allows a block to swap parameters' data: to put them to rest, and to give them values."""

    # As torch._C._ExcludeDispatchKeyGuard does, in half the time: it is entered twice for each
    # bucket and pass.
    __slots__ = ("_was",)

    def __enter__(self) -> None:
        self._was = _is_excluded(_KEY)
        _exclude(_KEY, True)

    def __exit__(self, *_: object) -> None:
        _exclude(_KEY, self._was)


_is_excluded: Any = torch._C._dispatch_tls_is_dispatch_key_excluded
_exclude: Any = torch._C._dispatch_tls_set_dispatch_key_excluded


@dataclass(frozen=True, eq=False)
class AtRest:
    """The form of a parameter at rest, which messages call `name`: of class `kind`, over
    `value`, which raises where torch uses it; `like` has its form too, and does not. Whole, it is
    of class `own`."""

    name: str
    value: Tensor
    like: Tensor
    own: type[nn.Parameter]
    kind: type[nn.Parameter]

    def mark(self, parameter: nn.Parameter) -> None:
        """Let `parameter` know how it rests; deepcopy and pickle of it raise until `unmark`."""
        values = (self, self._refuse_copy, self._refuse_copy)
        parameter.__dict__.update(zip(_MARKS, values, strict=True))

    def _refuse_copy(self, *_: Any) -> NoReturn:
        raise sharded_copy(self.name)


_MARK = "_shardwise_at_rest"
_MARKS = (_MARK, "__deepcopy__", "__reduce_ex__")


def at_rest(parameter: nn.Parameter, name: str, like: Tensor) -> AtRest:
    """How `parameter` rests: in the form of `like`, NaN of its shape, and at the same address."""
    own = type(parameter)
    made = AtRest(name, _unusable(like), like, own, _resting(own))
    _known[like.data_ptr()] = made
    return made


_known: WeakValueDictionary[int, AtRest] = WeakValueDictionary()
"""By address of its value."""


class _Keyed(Tensor):
    """A tensor that is made with the key; another that takes its value has the key too."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} of what parameters rest on")


def _unusable(like: Tensor) -> Tensor:
    """A tensor over the memory of `like`, with the key."""
    _watch()
    keyed: Tensor = Tensor._make_wrapper_subclass(
        _Keyed,
        like.shape,
        strides=like.stride(),
        dtype=like.dtype,
        device=like.device,
        _extra_dispatch_keys=_KEYS,
    )
    with torch.no_grad(), SwappingData(), torch._C._DisableTorchDispatch():
        keyed.set_(like.untyped_storage(), like.storage_offset(), like.shape, like.stride())
        made = torch.empty(0, dtype=like.dtype, device=like.device)
        made.data = keyed  # takes all keys but that of the class
    return made


@cache
def _watch() -> Any:
    """Let torch call `_used` for every operation on a tensor with the key."""
    library: Any = torch.library.Library("_", "IMPL", "DeferredInit")  # type: ignore[no-untyped-call]
    library.fallback(_used)
    return library


def _used(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise _refusal(func, args, kwargs)


def unmark(parameter: nn.Parameter) -> None:
    """Undo `AtRest.mark`: it is whole for good, or for copies to be made."""
    for name in _MARKS:
        parameter.__dict__.pop(name, None)


def sharded_copy(name: str) -> UsageError:
    """The error for copying or saving what is sharded."""
    return UsageError(
        f"{name} is sharded: this rank holds a part of it only, so a copy would be none. Inside "
        "with engine.full_parameters(): state_dict(), deepcopy and pickle give plain tensors; "
        "engine.export('model.safetensors') writes the whole model."
    )


def name_of(parameter: nn.Parameter) -> str:
    """What messages call a parameter that is sharded."""
    form: AtRest = parameter.__dict__[_MARK]
    return form.name


def is_sharded(module: nn.Module) -> bool:
    """Whether `module` holds a parameter that is at rest or shown for the moment only."""
    return any(_MARK in p.__dict__ for p in module.parameters())


@cache
def _resting(own: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of parameters of class `own` while they rest."""
    members = {
        "__torch_function__": classmethod(_touched),
        "__module__": __name__,
        "covers": own,
    }
    metaclass: Any = type(own)
    made: type[nn.Parameter] = metaclass(f"{own.__name__}AtRest", (own,), members)
    return made


class ValueAtRest(Tensor):
    """Stands for `p.data` and `p.detach()` of a parameter at rest: its form, without memory."""

    form: AtRest

    @staticmethod
    def __new__(cls, form: AtRest) -> ValueAtRest:
        """Like `held.value`."""
        like = form.like
        made = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.form = form
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _touched(cls, func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What has not asked `__torch_function__`: torch.tensor(p.data)."""
        raise _refusal(func, args, kwargs or {})


def _touched(
    cls: Any, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """An operation on what rests: done where it needs no values, else refused."""
    del cls
    kwargs = kwargs or {}
    if func in FORMAL:
        with SwappingData():
            return form_of(func, types, args, kwargs)
    if func in _LIKE:
        with unguarded():
            return func(*map(_plain, args), **kwargs)
    if func in _ALIASES:
        return ValueAtRest(_form(args[0]))
    if func in _SHOWN_AS_TEXT:
        return _text(args[0])
    if func in _DIFFERENTIATES:
        with _lifted(args, kwargs):
            return func(*args, **kwargs)
    if func in _CASTS:
        return _cast(func, args, kwargs)
    if func == SET_DATA and args[0] is args[1]:
        return None  # model.to(device) where it is already
    if any(_in_trial(kind) for kind in types):
        return below(types)(func, types, args, kwargs)  # nothing is computed
    raise _refusal(func, args, kwargs)


def _in_trial(kind: Any) -> bool:
    """Whether parameters of class `kind` are of a pipeline that tries a loss without values: all
    ranks come to the end of it, and refuse alike what was used."""
    trial = getattr(getattr(kind, "covers", kind), "in_trial", None)
    return trial is not None and trial()


def below(types: Any) -> Callable[..., Any]:
    """What does operations on parameters of `types`, as they would be asked in their own classes:
    those that parallel/tensor/parameter_uses.py watches are of layers on several workers."""
    for kind in types:
        own = getattr(kind, "covers", kind)
        ask: Callable[..., Any] = own.__torch_function__
        if issubclass(own, nn.Parameter) and ask is not _STRAIGHTLY:
            return ask
    return _STRAIGHTLY


_STRAIGHTLY: Callable[..., Any] = torch._C._disabled_torch_function_impl


def form_of(func: Any, types: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What is asked about a form; sizes of what is split are those of the whole."""
    ask = below(types) if func in SIZES else _STRAIGHTLY
    return ask(func, types, args, kwargs)


def _plain(value: Any) -> Any:
    """What has the form of `value` and can be used."""
    form = _found(value)
    return value if form is None else form.like


def _found(value: Any) -> AtRest | None:
    """How `value` rests, if it does."""
    if isinstance(value, ValueAtRest):
        return value.form
    if isinstance(value, Tensor) and torch._C._dispatch_keys(value).has(_KEY):
        with unguarded():
            return _known.get(value.data_ptr())
    return None


def _form(value: Any) -> AtRest:
    form = _found(value)
    assert form is not None
    return form


def _text(value: Any) -> str:
    form = _form(value)
    return (
        f"<{form.name}, sharded: shape {tuple(form.like.shape)}, {form.like.dtype}, "
        "whole inside of engine.full_parameters()>"
    )


def _cast(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What a cast or move of something that rests gives: itself, where there is nothing to do."""
    value, *rest = args
    like = _form(value).like
    stand_in = torch.empty((0,) * like.dim(), dtype=like.dtype, device=like.device)
    made = func(stand_in, *rest, **kwargs)
    if made is stand_in and kwargs.get("memory_format") in (None, torch.preserve_format):
        return value
    if isinstance(made, str):
        return made  # p.type()
    raise _refusal(func, args, kwargs)


@contextmanager
def _lifted(args: Any, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block the parameters among the arguments, which are differentiated by and not
    read, are of their own class, so that torch does not ask about them again."""
    found = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _found(leaf) is not None]
    for parameter in found:
        parameter.__class__ = _form(parameter).own
    try:
        yield
    finally:
        for parameter in found:
            if (form := _found(parameter)) is not None:  # it may have been shown inside
                parameter.__class__ = form.kind


def _refusal(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Exception:
    """The error for an operation that needs values which are not there."""
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    name = next((form.name for leaf in leaves if (form := _found(leaf))), "A sharded parameter")
    what = what_is_done(func)
    if func in _CASTS:
        return ParameterAccess(
            f"{name} was cast or moved ({what}) while it is sharded: this worker holds a part of "
            "it only. Casting or moving a model belongs before sw.Engine(...); for lower precision "
            f"use --precision. {_TO_READ}"
        )
    if any(_found(target) is not None for target in written(what, args, kwargs)):
        return write_refused(name, what)
    return _read_refused(name, what)


def used_outside(parameter: nn.Parameter) -> ParameterAccess:
    """The error for a line that computes with `parameter` outside of forwards."""
    return _read_refused(name_of(parameter), "outside of its module")


def _read_refused(name: str, what: str) -> ParameterAccess:
    return ParameterAccess(
        f"{name} was read ({what}) while it is sharded: this worker holds a part of it only, and "
        "all of it just while the forward of its module runs. Call the module itself, not another "
        "method of it and not module.forward(x). What a loss needs of it (a penalty) is computed "
        "in the forward of the module that it is registered in, and returned or kept for the loss; "
        f"a moving average of weights is --ema-decay. {_TO_READ} --zero 2 keeps parameters whole."
    )


def write_refused(name: str, what: str) -> ParameterAccess:
    """The error for a write, by the operation `what`, into a parameter that is sharded."""
    return ParameterAccess(
        f"{name} was written ({what}) while it is sharded: this worker holds a part of it "
        "only, so nothing was changed. Write, on all workers alike: "
        "with engine.full_parameters(write=True): ..."
    )


_TO_READ = "To read it, without gradients, on all workers alike: with engine.full_parameters(): ..."


SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_ALIASES = frozenset((Tensor.detach, torch.detach, Tensor.data.__get__))  # type: ignore[attr-defined]
_SHOWN_AS_TEXT = frozenset((Tensor.__repr__, Tensor.__format__))
_DIFFERENTIATES = frozenset((torch.autograd.grad, torch.autograd.backward))
_CASTS = frozenset(functions("to type type_as float double half bfloat16 cpu cuda xpu", Tensor))
_LIKE = frozenset(
    functions(
        "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty "
        "new_zeros new_ones new_full new_empty_strided data_ptr untyped_storage is_pinned "
        "is_shared",
        Tensor,
        torch,
    )
)
"""What needs no values either, but memory, or a tensor to make others like."""
