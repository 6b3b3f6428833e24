"""Describes an optimizer: its kind, bare copies of it, and whether torch's fused kernels apply."""

from __future__ import annotations

import copy
import inspect
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

_TOLERANCE = 1e-3

ELEMENTWISE = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
)
"""Of torch's own optimizers those that update each element by itself, whatever their options."""

BY_TENSOR = (optim.Adafactor, optim.Muon)
"""Those that update each tensor by itself, and need the whole of it."""


def is_torchs(optimizer: optim.Optimizer) -> bool:
    """Whether `optimizer` is one of torch's own, which keep what they have in the dtype of the
    parameter, and cannot step where it has another."""
    return isinstance(optimizer, (*ELEMENTWISE, *BY_TENSOR))


def is_known(optimizer: optim.Optimizer) -> bool:
    """Whether `optimizer` is of a class of torch's whose updates need no trial; of a class derived
    from one, anything may be otherwise."""
    return type(optimizer) in (*ELEMENTWISE, *BY_TENSOR)


def state_shape(
    made_by: type[optim.Optimizer], key: str, shape: Sequence[int]
) -> tuple[int, ...] | None:
    """The shape that entry `key` of the state of a tensor of `shape` has by one of torch's own
    optimizers, where it is not one number; None where that is not known."""
    if made_by is optim.Adafactor and len(shape) > 1 and key in ("row_var", "col_var"):
        *ahead, rows, columns = shape
        return (*ahead, rows, 1) if key == "row_var" else (*ahead, 1, columns)
    return tuple(shape) if made_by in (*ELEMENTWISE, *BY_TENSOR) else None


@dataclass(frozen=True)
class OptimizerKind:
    """The kind of an optimizer: what it needs whole, and which state it keeps.

    `elementwise`: tensors may be cut anywhere. `separable`: tensors do not look at each other.
    `known`: neither was found by trial.

    `tensor_keys` are the state entries that have the parameter's shape (exp_avg ...);
    `single_keys` are one value per parameter (step ...). An option that changes later may bring
    others: SGD's momentum. `group_keys` are the options of a parameter group that the optimizer
    changes itself (ScheduleFree's k), and `attributes` those of its attributes that its steps
    change. `needs_closure`: it evaluates the loss itself (L-BFGS).
    """

    elementwise: bool
    separable: bool
    tensor_keys: frozenset[str]
    single_keys: frozenset[str] = frozenset()
    group_keys: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    known: bool = False
    needs_closure: bool = False

    def has_shape(self, key: str, value: Any, shape: Sequence[int]) -> bool:
        """Whether entry `key` of the state of a tensor of `shape` has that shape by its nature,
        so that an element-wise optimizer's is cut where the tensor is."""
        if value is None or key in self.single_keys:
            return False
        return key in self.tensor_keys or tuple(getattr(value, "shape", ())) == tuple(shape) != ()

    def is_tensor(self, key: str, value: Any, shape: Sequence[int]) -> bool:
        """Whether a checkpoint has it as a tensor, rather than as a number beside."""
        if self.elementwise:
            return self.has_shape(key, value, shape)
        return isinstance(value, Tensor) and value.ndim > 0


def needs_closure(optimizer: optim.Optimizer) -> bool:
    """Whether `optimizer.step` cannot be called without a closure."""
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    return any(p.name == "closure" and p.default is p.empty for p in parameters)


_NOT_ITS_OWN = frozenset(
    (
        *("param_groups", "state", "defaults", "grad_scale", "found_inf"),
        *("_opt_called", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured"),
    )
)
"""Attributes that torch or the engine put on an optimizer."""


def attributes_of(optimizer: optim.Optimizer) -> dict[str, Any]:
    """The attributes that the class of `optimizer` keeps on it, in place of in its state.

    What shadows a method is left out: a scheduler or an engine has put it there.
    """
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _NOT_ITS_OWN
        and not name.endswith("_hooks")
        and not callable(getattr(type(optimizer), name, None))
    }


def common_state(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The entries of an optimizer's `state` that belong to no parameter."""
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}


def wrapped_optimizer(optimizer: optim.Optimizer) -> tuple[str, optim.Optimizer] | None:
    """The attribute of `optimizer` that holds another optimizer, with that one; None without."""
    for name, value in vars(optimizer).items():
        if isinstance(value, optim.Optimizer):
            return name, value
    return None


def bare_copy(optimizer: optim.Optimizer, *, detached: bool = False) -> optim.Optimizer:
    """A copy of `optimizer`: its class, options and attributes, without its parameters.

    Made without `__init__`, whose signature is the class's own affair; hooks and what a scheduler
    put on the instance stay behind. With `detached` steps of the copy change no attribute of
    `optimizer`; otherwise the copy has the same objects.
    """
    inner = type(optimizer).__new__(type(optimizer))
    attributes = attributes_of(optimizer)
    kept = {k: v for k, v in vars(optimizer).items() if k in _NOT_ITS_OWN}
    hooks = {k: type(v)() for k, v in vars(optimizer).items() if k.endswith("_hooks")}
    vars(inner).update(kept | hooks | attributes)
    inner.param_groups = []
    inner.state = defaultdict(dict)
    if detached:
        memo: dict[int, Any] = {id(optimizer): inner}
        memo |= {id(p): p for group in optimizer.param_groups for p in group["params"]}
        vars(inner).update({k: copied_attribute(v, memo) for k, v in attributes.items()})
    return inner


def copied_attribute(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of an attribute, or `value` itself where it cannot be copied (a lock, a file) or
    is a module; `memo` has what copies share with the original."""
    if isinstance(value, nn.Module):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group's options, without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def placed(
    key: str, value: Any, device: torch.device, options: Mapping[str, Any], *, copy: bool = True
) -> Any:
    """A state's entry where an optimizer with `options` wants it for `device`: a `copy`, or itself
    if it is there.

    A count of steps is on the CPU unless a kernel counts, as torch's own load_state_dict has it.
    """
    if not isinstance(value, Tensor):
        return value
    if key == "step" and not (options.get("fused") or options.get("capturable")):
        device = torch.device("cpu")
    return value.to(device, copy=copy)


def same(a: Any, b: Any, *, exactly: bool = False) -> bool:
    """Whether two options or attributes, or nests of such, are equal: numbers to fp32 noise, or
    `exactly`; objects by their attributes."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if exactly:
            return a.dtype == b.dtype and torch.equal(a, b)
        return a.shape == b.shape and torch.allclose(a.double(), b.double(), equal_nan=True)
    if isinstance(a, float) and isinstance(b, float):
        if a != a and b != b:
            return True
        return a == b if exactly else math.isclose(a, b, rel_tol=_TOLERANCE)
    if isinstance(a, optim.Optimizer):  # an attribute that leads back to its own optimizer
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key], exactly=exactly) for key in a)
    if isinstance(a, list | tuple | deque):
        pairs = zip(a, b, strict=False)
        return len(a) == len(b) and all(same(x, y, exactly=exactly) for x, y in pairs)
    if compares_by_identity(a):
        return same(vars(a), vars(b), exactly=exactly)
    equal = a == b
    return bool(equal.all() if hasattr(equal, "all") else equal)  # a numpy array compares by item


def compares_by_identity(value: Any) -> bool:
    """Whether `value` is an object with attributes, whose class does not say what is equal."""
    plain: Any = object.__eq__
    return hasattr(value, "__dict__") and type(value).__eq__ is plain


def may_fuse(
    optimizer: optim.Optimizer, options: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether torch's fused kernel may update tensors of `dtype`, where the user has not chosen
    another.

    It reads and writes each number once where the default loop makes a pass per operation, with
    the same arithmetic.
    """
    unchosen = options.get("fused", False) is None and not options.get("foreach")
    plain = not options.get("differentiable") and not options.get("capturable")
    # A rate that is a tensor rounds what is computed with it to its own dtype.
    rate = options.get("lr")
    plain &= not isinstance(rate, Tensor) or rate.dtype == dtype
    known = {"cpu": (*_FUSED, optim.Adagrad), "cuda": _FUSED}.get(device.type, ())
    real = dtype in (torch.float32, torch.float64)
    return unchosen and plain and real and type(optimizer) in known


_FUSED = (optim.Adam, optim.AdamW, optim.SGD)
