"""Gathers parameters for the user's own computations, if this rank does not hold all of them.

A split layer computes with its part, and a pipeline layer runs on its stage. Both bypass this
module. Any other code (a weight penalty in the loss, a norm in a log) expects the full parameter.
If the parameter is split, such code receives the gathered parameter. If the parameter belongs to
another stage, the code receives a stage tensor, and the computation runs on that stage. In the
backward pass, each rank receives the gradient of its part.

The class of such a parameter is changed to a subclass of its original class. torch calls the
subclass's `__torch_function__` for every operation. The engine's own operations on parameters are
not affected.
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
from shardwise.parallel.tensor.torch_functions import CASTS, MEMORY, METADATA, SIZES

_without_torch_function = torch._C.DisableTorchFunctionSubclass

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]

_SHARD_WISE_NAMES = (
    "add_", "sub_", "mul_", "div_", "clamp_", "clamp_min_", "clamp_max_", "zero_",
    "fill_", "__iadd__", "__isub__", "__imul__", "__itruediv__",
)  # fmt: skip
_SHARD_WISE_WRITES = {getattr(Tensor, name) for name in _SHARD_WISE_NAMES}
"""Functions that compute each element from its old value and from scalars."""


class ParameterUses:
    """Intercepts user operations on parameters that are split or that belong to one stage."""

    def __init__(self, split: TensorParallelModels | None, pipeline: PipelineGroup | None) -> None:
        self._split = split
        self._pipeline = pipeline
        self._watched: list[tuple[nn.Parameter, type[nn.Parameter]]] = []
        self._classes: dict[tuple[type[nn.Parameter], bool], type[nn.Parameter]] = {}

    def watch(self) -> None:
        """Change the parameters' classes, so that torch reports every use."""
        owners = () if self._pipeline is None else self._pipeline.partition.owners
        shards = () if self._split is None else self._split.shards
        for parameter in dict.fromkeys([*owners, *shards]):
            original = type(parameter)
            self._watched.append((parameter, original))
            parameter.__class__ = self._class(original, parameter in shards)

    def unwatch(self) -> None:
        for parameter, original in self._watched:
            parameter.__class__ = original
        self._watched = []

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Context manager that restores the parameters' original classes inside the block.

        Use it while all ranks have full parameters.
        """
        ours = set(self._classes.values())
        parameters = [(p, original, type(p)) for p, original in self._watched if type(p) in ours]
        for parameter, original, _ in parameters:
            parameter.__class__ = original
        try:
            yield
        finally:
            for parameter, _, before in parameters:
                parameter.__class__ = before

    def _class(self, original: type[nn.Parameter], is_split: bool) -> type[nn.Parameter]:
        # Create one class per original class, because scripts compare the classes of parameters.
        if (original, is_split) not in self._classes:

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
                "in_trial": staticmethod(
                    lambda: self._pipeline is not None and self._pipeline.run.is_trial
                ),
                "is_split": is_split,
            }
            metaclass: Any = type(original)
            self._classes[original, is_split] = metaclass(original.__name__, (original,), members)
        return self._classes[original, is_split]

    def _refuse_copy(self, *_: Any) -> Any:
        if self._pipeline is not None:
            raise parameter_ownership.copy_error("A copy", "to copy it")
        raise UsageError(
            "A split parameter cannot be copied: this rank has only a part of it. Copy it inside "
            "with engine.full_parameters(). p.detach().clone() copies only the values."
        )

    def _torch_function(
        self, func: Callable[..., Any], types: Sequence[type], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        pipeline = self._pipeline
        # This includes the backward pass, because a layer that is recomputed there runs on its own
        # stage.
        inside = pipeline is not None and (
            pipeline.within_stage_depth > 0 or torch._C._current_graph_task_id() != -1
        )
        # Inside a stage, parameters that tensor parallelism does not split have their full values.
        if func in MEMORY or (
            inside
            and all(_is_watched(kind) and not getattr(kind, "is_split", False) for kind in types)
        ):
            return _call_plain(func, args, kwargs)
        # The compiler cannot trace frames. This keeps reads such as `weight.dtype` in the graph.
        if func in METADATA and torch.compiler.is_dynamo_compiling():
            return self._form(func, args, kwargs)
        # The engine works on this rank's parts. Only user code expects full parameters. Frame 2 is
        # the caller of `torch_function`.
        if _called_by_this_library(sys._getframe(2)):
            return _call_plain(func, args, kwargs)
        if func in METADATA:
            return self._form(func, args, kwargs)
        # Compare with ==, because torch returns a new method wrapper for each access to
        # `Tensor.data.__set__`.
        if func == _SET_DATA:
            parameter, value = args
            with _without_torch_function():
                # The value replaces this rank's part, so it must have the part's shape.
                if value.shape != parameter.shape:
                    raise _write_error("p.data = ... replaces", parameter)
                parameter.data = value
            return None
        if func in CASTS:
            result = _call_plain(func, args, kwargs)
            if result is args[0] or not isinstance(result, Tensor):
                return result  # nothing was converted: model.to(device) on the same device
        target = _write_target(func, args, kwargs)
        if isinstance(target, Sequence) and any(map(_is_watched, map(type, target))):
            return self._write_list(func, target, args, kwargs)
        # Write to the part itself, because a gathered copy would be dropped.
        if self._is_split(target):
            return self._write(func, args, kwargs)
        if pipeline is not None and not inside:
            # A use after a backward pass belongs to a new run.
            pipeline.renew_run()
            return apply_to_parameters(
                pipeline, Tensor.detach if func == _GET_DATA else func, args, kwargs
            )
        return self._call_on_full(func, args, kwargs)

    def _is_split(self, value: Any) -> bool:
        return getattr(type(value), "is_split", False)

    def _form(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the part's metadata inside a tensor-parallel region, else the full parameter's."""
        split, first = self._split, args[0]
        if (
            func not in SIZES
            or split is None
            or split.replica.graph_left_region_open
            or split.replica.in_region
        ):
            return _call_plain(func, args, kwargs)
        shape = split.whole_shape(first)
        if shape is None:
            return _call_plain(func, args, kwargs)
        with _without_torch_function():
            whole = torch.empty((), dtype=first.dtype, device="meta").expand(shape)
        return func(whole, *args[1:], **kwargs)

    def _call_on_full(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call `func` with full parameters.

        Collective over the replica if any parameter is split.
        """
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
        # Other tensor subclasses among the arguments, such as SequenceShard.
        others = [e for e in leaves if isinstance(e, Tensor) and not _is_watched(type(e))]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        if not has_torch_function(others):
            return _read_only(_call_plain(func, args, kwargs), wholes.values())
        # The other tensor subclass handles the operation. It must not receive watched parameters.
        with _without_torch_function():
            leaves = [e.view_as(e) if _is_watched(type(e)) else e for e in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return func(*args, **kwargs)

    def _grad(self, outputs: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
        """Return gradients with respect to the full parameters, like torch.autograd.grad."""
        parameters = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        grads = _call_plain(torch.autograd.grad, (outputs, parameters, *rest), options)
        split = self._split
        assert split is not None
        return tuple(
            grad if grad is None else split.joined_as(parameter, grad)
            for parameter, grad in zip(parameters, grads, strict=True)
        )

    def _write(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Apply a write to a split parameter.

        Raises UsageError unless each new element depends only on its old value and on scalars.
        """
        leaves = pytree.tree_leaves((args[1:], kwargs))
        if func in _SHARD_WISE_WRITES and not any(isinstance(e, Tensor) and e.ndim for e in leaves):
            is_here = self._pipeline is None or self._pipeline.owns(args[0])
            return _call_plain(func, args, kwargs) if is_here else args[0]
        name = getattr(func, "__name__", func)
        raise _write_error(f"{name} writes into", args[0])

    def _write_list(
        self, func: Callable[..., Any], targets: Sequence[Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Apply a write to a list of parameters, such as torch._foreach_mul_.

        Raises UsageError unless each new element depends only on its old value and on scalars. Also
        raises UsageError with a pipeline, because other stages' parameters have no values on this
        rank.
        """
        leaves = pytree.tree_leaves((args[1:], kwargs))
        is_shard_wise = func.__name__.removeprefix("_foreach_") in _SHARD_WISE_NAMES
        has_tensors = any(isinstance(e, Tensor) for e in leaves)
        if is_shard_wise and self._pipeline is None and not has_tensors:
            return _call_plain(func, args, kwargs)
        first = next(each for each in targets if _is_watched(type(each)))
        raise _write_error(f"{func.__name__} writes into", first)


def _write_error(what: str, parameter: Tensor) -> UsageError:
    with _without_torch_function():
        shape = tuple(parameter.shape)
    return UsageError(
        f"{what} a parameter of shape {shape}, but this worker has only a part of it (--tensor). "
        "Write into it inside with engine.full_parameters(write=True)."
    )


def _called_by_this_library(frame: FrameType | None) -> bool:
    """Return whether this library makes the call in `frame`, directly or through torch."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        # The compiler inspects parameters. After a graph break, user code calls it.
        if name == "torch._dynamo.convert_frame":
            return True
        package = name.partition(".")[0]
        # Modules with PASSES_ON only forward their callers' operations (parameters_at_rest.py).
        if package != "torch" and not frame.f_globals.get("PASSES_ON"):
            return bool(package == "shardwise")
        frame = frame.f_back
    return False


def _is_watched(kind: type) -> bool:
    return bool(getattr(kind, "is_watched", False))


def _call_plain(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    with _without_torch_function():
        return func(*args, **kwargs)


def _write_target(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the tensor or list of tensors that `func` writes to, or None if it does not write."""
    name = getattr(func, "__name__", "")
    if isinstance(kwargs.get("out"), Tensor):
        return kwargs["out"]
    in_place = name.endswith("_") and (not name.endswith("__") or name.startswith("__i"))
    writes = func is Tensor.__setitem__ or (in_place and name not in _CHANGES_NOTHING)
    if not (writes and args):
        return None
    return args[0] if isinstance(args[0], Tensor | list | tuple) else None


class _ReadOnlyFull(Tensor):
    """A view of a gathered parameter.

    The view rejects writes, because they would not change the parameter itself.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(_is_watched, types)):
            return NotImplemented  # parameters first: they call again with full tensors
        target = _write_target(func, args, kwargs or {})
        parameters = target if isinstance(target, Sequence) else (target,)
        for each in parameters:
            if isinstance(each, _ReadOnlyFull):
                name = getattr(func, "__name__", func)
                raise _write_error(f"{name} writes into a view or a detached copy of", each)
        wholes = [e for e in pytree.tree_leaves((args, kwargs)) if isinstance(e, _ReadOnlyFull)]
        return _read_only(_call_plain(func, args, kwargs or {}), wholes)


def _read_only(result: Any, wholes: Iterable[Tensor]) -> Any:
    """Make each tensor in `result` read-only if it shares memory with one of `wholes`."""
    with _without_torch_function():
        memory = {e.untyped_storage().data_ptr() for e in wholes if _has_memory(e)}

        def guard(tensor: Tensor) -> Tensor:
            is_view = _has_memory(tensor) and tensor.untyped_storage().data_ptr() in memory
            return tensor.as_subclass(_ReadOnlyFull) if is_view else tensor

        return pytree.tree_map_only(Tensor, guard, result)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type != "meta"


_CHANGES_NOTHING = ("__invert__", "__index__", "__int__")


def _repr(parameter: nn.Parameter) -> str:
    """Return a repr without communication, because a traceback may call it on a single rank."""
    with _without_torch_function():
        return (
            f"<parameter of shape {tuple(parameter.shape)}, {parameter.dtype}, split over several "
            "workers: whole inside engine.full_parameters()>"
        )
