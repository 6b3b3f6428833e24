"""Gathers a parameter that this rank has not whole, where a line of the user's computes with it.

A split layer computes with its part, and a pipeline layer runs on its stage: both bypass this
module. Any other line (a penalty on weights in the loss, their norm in a log) means the parameter
as it is in one process, and gets that: of a split one the whole, gathered for this line; of a layer
on another stage a stage tensor, which computes there. In backward each rank gets the gradient of
its part.

Such a parameter is of a subclass of its class, whose `__torch_function__` torch calls for every
operation. Operations of the engine on parameters pass through.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import has_torch_function
from torch.utils import _pytree as pytree

from shardwise.errors import UsageError
from shardwise.parallel.pipeline import PipelineGroup, parameter_ownership
from shardwise.parallel.pipeline.stage_tensors import apply_to_parameters
from shardwise.parallel.tensor.split_model import TensorParallelModels
from shardwise.parallel.tensor.torch_functions import CASTS, FORM, MEMORY, SIZES

_without_torch_function = torch._C.DisableTorchFunctionSubclass

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]

_SHARD_WISE_NAMES = (
    "add_", "sub_", "mul_", "div_", "clamp_", "clamp_min_", "clamp_max_", "zero_",
    "fill_", "__iadd__", "__isub__", "__imul__", "__itruediv__",
)  # fmt: skip
_SHARD_WISE_WRITES = {getattr(Tensor, name) for name in _SHARD_WISE_NAMES}
"""Functions that write each element from its own value and numbers."""


class ParameterUses:
    """Follows the user's uses of parameters that are split, or owned by one pipeline stage."""

    def __init__(self, split: TensorParallelModels | None, pipeline: PipelineGroup | None) -> None:
        self._split = split
        self._pipeline = pipeline
        self._watched: list[tuple[nn.Parameter, type[nn.Parameter]]] = []
        self._classes: dict[tuple[type[nn.Parameter], bool], type[nn.Parameter]] = {}

    def watch(self) -> None:
        """Change the classes of these parameters, so that torch reports every use."""
        owners = () if self._pipeline is None else self._pipeline.partition.owners
        shards = () if self._split is None else self._split.shards
        for parameter in dict.fromkeys([*owners, *shards]):
            own = type(parameter)
            self._watched.append((parameter, own))
            parameter.__class__ = self._class(own, parameter in shards)

    def unwatch(self) -> None:
        """Restore their own classes."""
        for parameter, own in self._watched:
            parameter.__class__ = own
        self._watched = []

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Restore their own classes inside the block, where every rank has whole parameters."""
        ours = set(self._classes.values())
        parameters = [(p, own, type(p)) for p, own in self._watched if type(p) in ours]
        for parameter, own, _ in parameters:
            parameter.__class__ = own
        try:
            yield
        finally:
            for parameter, _, before in parameters:
                parameter.__class__ = before

    def _class(self, own: type[nn.Parameter], is_split: bool) -> type[nn.Parameter]:
        if (own, is_split) not in self._classes:

            def torch_function(
                cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                return self._torch_function(func, types, args, kwargs or {})

            members = {
                "__torch_function__": classmethod(torch_function),
                "__module__": __name__,
                "__repr__": _repr,
                "__deepcopy__": self._refuse_copy,
                "__reduce_ex__": self._refuse_copy,
                "is_watched": True,
                "in_trial": staticmethod(self._in_trial),
                "is_split": is_split,
            }
            made: Any = type(own)
            self._classes[own, is_split] = made(own.__name__, (own,), members)
        return self._classes[own, is_split]

    def _in_trial(self) -> bool:
        return self._pipeline is not None and self._pipeline.run.is_trial

    def _refuse_copy(self, *_: Any) -> Any:
        if self._pipeline is not None:
            raise parameter_ownership.copy_error("A copy", "to copy it")
        raise UsageError(
            "A copy of a split parameter: this rank has a part of it only. Make it inside with "
            "engine.full_parameters(); p.detach().clone() gives the values alone."
        )

    def _torch_function(
        self, func: Callable[..., Any], types: Sequence[type], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        pipeline = self._pipeline
        # A layer that is run again in backward runs where it is.
        inside = pipeline is not None and (
            pipeline.within_stage_depth > 0 or torch._C._current_graph_task_id() != -1
        )
        if func in MEMORY or (inside and all(map(_is_watched_unsplit, types))):
            return _call_plain(func, args, kwargs)
        if _called_by_this_library(sys._getframe(2)):
            return _call_plain(func, args, kwargs)
        if func in FORM:
            return self._form(func, args, kwargs)
        if func == _SET_DATA:
            return self._set_data(*args)
        if func in CASTS:
            made = _call_plain(func, args, kwargs)
            if made is args[0] or not isinstance(made, Tensor):
                return made  # model.to(device) where it is already
        written = _written(func, args, kwargs)
        if isinstance(written, Sequence) and any(map(_is_watched, map(type, written))):
            return self._write_list(func, written, args, kwargs)
        if self._is_split(written):
            return self._write(func, args, kwargs)
        if pipeline is not None and not inside:
            pipeline.renew_run()
            return apply_to_parameters(
                pipeline, Tensor.detach if func == _GET_DATA else func, args, kwargs
            )
        return self._call_on_full(func, args, kwargs)

    def _is_split(self, value: Any) -> bool:
        return getattr(type(value), "is_split", False)

    def _form(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Answer for the shape: inside a region of the part, else of the whole."""
        split, first = self._split, args[0]
        if func not in SIZES or split is None or split.replica.randomness.in_region:
            return _call_plain(func, args, kwargs)
        shape = split.whole_shape(first)
        if shape is None:
            return _call_plain(func, args, kwargs)
        with _without_torch_function():
            whole = torch.empty((), dtype=first.dtype, device="meta").expand(shape)
        return func(whole, *args[1:], **kwargs)

    def _call_on_full(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call `func` with whole parameters. Collective over the replica where some are split."""
        split = self._split
        if func == _GET_DATA or split is None:
            return _call_plain(func, args, kwargs)
        if func is torch.autograd.grad:
            return self._grad(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        wholes = {
            place: split.whole_of(leaf) for place, leaf in enumerate(leaves) if self._is_split(leaf)
        }
        leaves = [wholes.get(place, leaf) for place, leaf in enumerate(leaves)]
        others = [e for e in leaves if isinstance(e, Tensor) and not _is_watched(type(e))]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        if not has_torch_function(others):
            return _read_only(_call_plain(func, args, kwargs), wholes.values())
        with _without_torch_function():
            leaves = [e.view_as(e) if _is_watched(type(e)) else e for e in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return func(*args, **kwargs)

    def _grad(self, outputs: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
        """Gradients of whole parameters, as torch.autograd.grad gives them."""
        parameters = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        found = _call_plain(torch.autograd.grad, (outputs, parameters, *rest), options)
        split = self._split
        assert split is not None
        return tuple(
            grad if grad is None else split.joined_as(parameter, grad)
            for parameter, grad in zip(parameters, found, strict=True)
        )

    def _write(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Write into a split parameter. Raises UsageError where the part's elements would not be
        those of the whole."""
        leaves = pytree.tree_leaves((args[1:], kwargs))
        if func in _SHARD_WISE_WRITES and not any(isinstance(e, Tensor) and e.ndim for e in leaves):
            is_here = self._pipeline is None or self._pipeline.owns(args[0])
            return _call_plain(func, args, kwargs) if is_here else args[0]
        name = getattr(func, "__name__", func)
        raise _refused(f"{name} writes into", args[0])

    def _write_list(
        self, func: Callable[..., Any], written: Sequence[Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Write into a list of parameters (torch._foreach_mul_). Raises UsageError where some are
        owned by other stages: those have no values here."""
        leaves = pytree.tree_leaves((args[1:], kwargs))
        alike = func.__name__.removeprefix("_foreach_") in _SHARD_WISE_NAMES
        if alike and self._pipeline is None and not any(isinstance(e, Tensor) for e in leaves):
            return _call_plain(func, args, kwargs)
        first = next(each for each in written if _is_watched(type(each)))
        raise _refused(f"{func.__name__} writes into", first)

    def _set_data(self, parameter: nn.Parameter, value: Tensor) -> None:
        with _without_torch_function():
            if value.shape != parameter.shape:
                raise _refused("p.data = ... replaces", parameter)
            parameter.data = value


def _refused(what: str, parameter: Tensor) -> UsageError:
    with _without_torch_function():
        shape = tuple(parameter.shape)
    return UsageError(
        f"{what} a parameter of which this worker has a part only, of shape {shape} (--tensor). "
        "Write the whole of it inside with engine.full_parameters(write=True)."
    )


def _called_by_this_library(frame: FrameType | None) -> bool:
    """Whether the caller is this library: directly, through torch, or through modules that pass on
    what others call (states/parameters/parameters_at_rest.py)."""
    while frame is not None:
        room = frame.f_globals.get("__name__", "").partition(".")[0]
        if room != "torch" and not frame.f_globals.get("PASSES_ON"):
            return bool(room == "shardwise")
        frame = frame.f_back
    return False


def _is_watched(kind: type) -> bool:
    return bool(getattr(kind, "is_watched", False))


def _is_watched_unsplit(kind: type) -> bool:
    """Whether a class is of watched parameters that are whole wherever their layer runs."""
    return _is_watched(kind) and not getattr(kind, "is_split", False)


def _call_plain(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    with _without_torch_function():
        return func(*args, **kwargs)


def _written(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """The tensor that `func` writes into, or the list of them; None where it makes a new one."""
    name = getattr(func, "__name__", "")
    if isinstance(kwargs.get("out"), Tensor):
        return kwargs["out"]
    in_place = name.endswith("_") and (not name.endswith("__") or name.startswith("__i"))
    writes = func is Tensor.__setitem__ or (in_place and name not in _CHANGES_NOTHING)
    if not (writes and args):
        return None
    return args[0] if isinstance(args[0], Tensor | list | tuple) else None


class _ReadOnlyFull(Tensor):
    """A view of a gathered parameter: writes into it would reach nothing, so they are refused."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(_is_watched, types)):
            return NotImplemented  # it goes about parameters, and comes back with their wholes
        written = _written(func, args, kwargs or {})
        parameters = written if isinstance(written, Sequence) else (written,)
        for each in parameters:
            if isinstance(each, _ReadOnlyFull):
                name = getattr(func, "__name__", func)
                raise _refused(f"{name} writes into a view or a detached copy of", each)
        wholes = [e for e in pytree.tree_leaves((args, kwargs)) if isinstance(e, _ReadOnlyFull)]
        return _read_only(_call_plain(func, args, kwargs or {}), wholes)


def _read_only(made: Any, wholes: Iterable[Tensor]) -> Any:
    """`made`, with tensors that share memory with one of `wholes` made read-only."""
    with _without_torch_function():
        memory = {e.untyped_storage().data_ptr() for e in wholes if _has_memory(e)}

        def guard(tensor: Tensor) -> Tensor:
            is_view = _has_memory(tensor) and tensor.untyped_storage().data_ptr() in memory
            return tensor.as_subclass(_ReadOnlyFull) if is_view else tensor

        return pytree.tree_map_only(Tensor, guard, made)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type != "meta"


_CHANGES_NOTHING = ("__invert__", "__index__", "__int__")


def _repr(parameter: nn.Parameter) -> str:
    """A repr that communicates with no other rank: tracebacks show it too."""
    with _without_torch_function():
        return (
            f"<parameter of shape {tuple(parameter.shape)}, {parameter.dtype}, with its values on "
            "several workers: whole inside of engine.full_parameters()>"
        )
