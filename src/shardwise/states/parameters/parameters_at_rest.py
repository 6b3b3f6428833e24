"""Makes any read or write of a sharded parameter's values raise at the user's line.

A parameter is *at rest* while this rank stores only a part of it. It still has its shape, dtype,
device, gradient and hooks, but no values: a NaN or a stale value would spread silently. Code can
access values on two levels, and both are guarded:

    Python      the parameter gets a subclass of its class, whose `__torch_function__` sees every
                call; `p.data` and `p.detach()` are tensors without storage that raise, too
    dispatcher  the tensor gets an additional dispatch key, whose only kernel raises; this catches
                tensors that autograd has saved, torch.func and torch.tensor(p)

A gathered parameter has its own class and keys again, so the guard costs nothing while the
parameter is in use.
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
from shardwise.states.parameters.torch_calls import (
    FORMAL,
    functions,
    operation_name,
    written_arguments,
)

unguarded = torch._C.DisableTorchFunctionSubclass
"""Context manager that disables `__torch_function__`, for the engine's bookkeeping of many
parameters. No user code may run inside."""

PASSES_ON = True
"""Marks calls from this module as made for their caller, the frame that
parallel/tensor/parameter_uses.py looks for."""

_KEY: Any = torch._C._parse_dispatch_key("DeferredInit")
"""A dispatch key that precedes all other keys of a tensor, and that torch itself does not use."""
_KEYS = torch._C.DispatchKeySet(_KEY)


class SwappingData:
    """Context manager inside which a parameter's data can be swapped, to unshard or reshard it."""

    # Equivalent to torch._C._ExcludeDispatchKeyGuard in half the time. Every pass enters it twice
    # per bucket.
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
    """The data and class that a parameter has at rest: its placeholder."""

    name: str
    """The parameter's name in messages."""
    value: Tensor
    """The parameter's data at rest, with the raising dispatch key."""
    like: Tensor
    """A usable tensor with the same shape, dtype and memory."""
    own: type[nn.Parameter]
    """The parameter's class while it is gathered."""
    kind: type[nn.Parameter]
    """The parameter's class at rest."""
    because: str
    """Text for messages: why the parameter has no values."""

    def mark(self, parameter: nn.Parameter) -> None:
        """Attach this placeholder to `parameter`, and prevent copying or pickling it."""
        values = (self, self._refuse_copy, self._refuse_copy)
        parameter.__dict__.update(zip(_MARKS, values, strict=True))

    def _refuse_copy(self, *_: Any) -> NoReturn:
        raise sharded_copy(self.name, self.because)


_MARK = "_shardwise_at_rest"
_MARKS = (_MARK, "__deepcopy__", "__reduce_ex__")


SHARDED = "sharded: this worker holds only a part of it"


def at_rest(parameter: nn.Parameter, name: str, like: Tensor, because: str = SHARDED) -> AtRest:
    """Return the placeholder for `parameter`, with the shape, NaN values and address of `like`."""
    own = type(parameter)
    form = AtRest(name, _unusable(like), like, own, _resting(own), because)
    _known[like.data_ptr()] = form
    return form


_known: WeakValueDictionary[int, AtRest] = WeakValueDictionary()
"""Address of the values -> placeholder, for all placeholders."""


class _Keyed(Tensor):
    """A tensor with the raising dispatch key. Assigning it to `.data` passes the key on."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} called on the memory of a parameter at rest")


def _unusable(like: Tensor) -> Tensor:
    """Return a tensor that shares the memory of `like`, and raises an error in every operation."""
    _register_fallback()
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
        unusable = torch.empty(0, dtype=like.dtype, device=like.device)
        unusable.data = keyed  # gets all keys except the Python subclass's
    return unusable


@cache
def _register_fallback() -> Any:
    """Make every operation on a tensor with the dispatch key raise. Runs once per process."""

    def refuse(func: Any, *args: Any, **kwargs: Any) -> Any:
        raise _refusal(func, args, kwargs)

    library: Any = torch.library.Library("_", "IMPL", "DeferredInit")  # type: ignore[no-untyped-call]
    library.fallback(refuse)
    # the cache keeps the library alive, because torch removes the kernel together with it
    return library


def unmark(parameter: nn.Parameter) -> None:
    """Undo `AtRest.mark`, so that `parameter` can be copied again."""
    for name in _MARKS:
        parameter.__dict__.pop(name, None)


def sharded_copy(name: str, because: str) -> UsageError:
    """Return the error for copying or saving a parameter that has no values, `because` it rests."""
    return UsageError(
        f"{name} is {because}, so it cannot be copied. Inside "
        "with engine.full_parameters(): state_dict(), deepcopy and pickle give plain tensors; "
        "engine.export('model.safetensors') writes the whole model."
    )


def name_of(parameter: nn.Parameter) -> str:
    """Return the name of a sharded parameter, for messages."""
    form: AtRest = parameter.__dict__[_MARK]
    return form.name


def why_at_rest(module: nn.Module) -> str:
    """Return why the first parameter of `module` without values has none, for messages."""
    forms = (p.__dict__.get(_MARK) for p in module.parameters())
    return next((form.because for form in forms if form is not None), SHARDED)


def is_sharded(module: nn.Module) -> bool:
    """Return whether `module` has a sharded parameter, at rest or gathered."""
    return any(_MARK in p.__dict__ for p in module.parameters())


@cache
def _resting(own: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the class that a parameter of class `own` has at rest."""
    members = {
        "__torch_function__": classmethod(_touched),
        "__module__": __name__,
        "covers": own,
    }
    metaclass: Any = type(own)
    kind: type[nn.Parameter] = metaclass(f"{own.__name__}AtRest", (own,), members)
    return kind


class ValueAtRest(Tensor):
    """A tensor without storage: stands in for `p.data` and `p.detach()` of a parameter at rest."""

    form: AtRest

    @staticmethod
    def __new__(cls, form: AtRest) -> ValueAtRest:
        like = form.like
        value = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        value.form = form
        return value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _touched(cls, func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Some operations bypass `__torch_function__`, such as torch.tensor(p.data).
        raise _refusal(func, args, kwargs or {})


def _touched(
    cls: Any, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Run an operation on parameters at rest if it needs no values; otherwise raise."""
    del cls
    kwargs = kwargs or {}
    if func in FORMAL:
        # Exclude the dispatch key, whose kernel would raise for these operations, too.
        with SwappingData():
            return form_of(func, types, args, kwargs)
    if func in _LIKE:
        with unguarded():
            return func(*map(_plain, args), **kwargs)
    if func in _ALIASES:
        return ValueAtRest(_form(args[0]))
    if func in _SHOWN_AS_TEXT:
        form = _form(args[0])
        return (
            f"<{form.name}, {form.because.partition(':')[0]}: shape {tuple(form.like.shape)}, "
            f"{form.like.dtype}, whole inside of engine.full_parameters()>"
        )
    if func in _DIFFERENTIATES:
        with _lifted(args, kwargs):
            return func(*args, **kwargs)
    if func in _CASTS:
        return _cast(func, args, kwargs)
    if func == SET_DATA and args[0] is args[1]:
        return None  # model.to(device), when the model is already on that device
    if any(_in_trial(kind) for kind in types):
        return own_torch_function(types)(func, types, args, kwargs)  # a trial computes no values
    raise _refusal(func, args, kwargs)


def _in_trial(kind: Any) -> bool:
    """Return whether a pipeline is testing a loss with parameters of class `kind`.

    Such a test computes no values. Every rank must finish it, so that all of them then reject the
    loss in the same way.
    """
    trial = getattr(getattr(kind, "covers", kind), "in_trial", None)
    return trial is not None and trial()


def own_torch_function(types: Any) -> Callable[..., Any]:
    """Return the `__torch_function__` that parameters of `types` have while they are gathered.

    Usually this is torch's own. If a layer's parameters are split across workers,
    parallel/tensor/parameter_uses.py defines it.
    """
    for kind in types:
        own = getattr(kind, "covers", kind)
        ask: Callable[..., Any] = own.__torch_function__
        if issubclass(own, nn.Parameter) and ask is not _STRAIGHTLY:
            return ask
    return _STRAIGHTLY


_STRAIGHTLY: Callable[..., Any] = torch._C._disabled_torch_function_impl


def form_of(func: Any, types: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run an operation that needs only metadata. A split parameter reports its full shape."""
    ask = own_torch_function(types) if func in SIZES else _STRAIGHTLY
    return ask(func, types, args, kwargs)


def _plain(value: Any) -> Any:
    """If `value` is at rest, return a usable tensor with the same metadata, else `value` itself."""
    form = _found(value)
    return value if form is None else form.like


def _found(value: Any) -> AtRest | None:
    """Return the placeholder if `value` is a parameter at rest or derived from one, else None."""
    if isinstance(value, ValueAtRest):
        return value.form
    # Checking the class is not sufficient: a tensor that autograd has saved is no subclass, but has
    # the key. The value of every placeholder has a different address.
    if isinstance(value, Tensor) and torch._C._dispatch_keys(value).has(_KEY):
        with unguarded():
            return _known.get(value.data_ptr())
    return None


def _form(value: Any) -> AtRest:
    form = _found(value)
    assert form is not None
    return form


def _cast(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return a parameter at rest itself if the cast or move would not change it, else raise."""
    value, *rest = args
    like = _form(value).like
    # torch returns its argument itself from a cast without effect, so try the cast on an empty
    # tensor.
    stand_in = torch.empty((0,) * like.dim(), dtype=like.dtype, device=like.device)
    result = func(stand_in, *rest, **kwargs)
    if result is stand_in and kwargs.get("memory_format") in (None, torch.preserve_format):
        return value
    if isinstance(result, str):
        return result  # p.type()
    raise _refusal(func, args, kwargs)


@contextmanager
def _lifted(args: Any, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Context manager inside which arguments that are parameters at rest have their original class.

    torch.autograd.grad differentiates with respect to such parameters without reading their values.
    Because they have their original class, torch does not call `__torch_function__` for them again.
    """
    lifted = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _found(leaf) is not None]
    for parameter in lifted:
        parameter.__class__ = _form(parameter).own
    try:
        yield
    finally:
        for parameter in lifted:
            if (form := _found(parameter)) is not None:  # not if the backward pass has unsharded it
                parameter.__class__ = form.kind


def _refusal(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Exception:
    """Return the error for an operation that needs the values of a parameter at rest."""
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    form = next((form for leaf in leaves if (form := _found(leaf))), None)
    name, because = ("A sharded parameter", SHARDED) if form is None else (form.name, form.because)
    what = operation_name(func)
    if func in _CASTS:
        return ParameterAccess(
            f"{name} was cast or moved ({what}) while it is {because}. Cast or move the model "
            f"before sw.Engine(...); for lower precision use --precision. {_TO_READ}"
        )
    if any(_found(target) is not None for target in written_arguments(what, args, kwargs)):
        return write_error(name, what, because)
    return _read_error(name, what, because)


def used_outside(parameter: nn.Parameter) -> ParameterAccess:
    """Return the error for code that uses `parameter` outside any forward pass."""
    form: AtRest = parameter.__dict__[_MARK]
    return _read_error(form.name, "outside of its module", form.because)


def _read_error(name: str, what: str, because: str) -> ParameterAccess:
    instead = " With --zero 2, every worker has all parameters." if because == SHARDED else ""
    return ParameterAccess(
        f"{name} was read ({what}) while it is {because}, except while the forward of its "
        "module runs. Call the module itself, not another method "
        "of it and not module.forward(x). If a loss needs the parameter (a penalty), compute "
        "that term in the forward of the module that registers it, and return it. For a moving "
        f"average of weights use --ema-decay. {_TO_READ}{instead}"
    )


def write_error(name: str, what: str, because: str = SHARDED) -> ParameterAccess:
    """Return the error for the operation `what`, which writes into a parameter at rest."""
    return ParameterAccess(
        f"{name} was written ({what}) while it is {because}, so nothing was changed. To write it, "
        "on every worker: with engine.full_parameters(write=True): ..."
    )


_TO_READ = "To read it, without gradients, on every worker: with engine.full_parameters(): ..."


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
"""Functions that need only an address, or only a tensor whose metadata a new tensor copies."""
