"""Determines which data an optimizer needs and stores, and whether it may use fused kernels."""

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
"""torch's optimizers that update each element independently, for any options."""

BY_TENSOR = (optim.Adafactor, optim.Muon)
"""torch's optimizers that update each tensor independently, but need all of its elements."""


def is_torchs(optimizer: optim.Optimizer) -> bool:
    """Return whether the class of `optimizer` is one of torch's or derived from one.

    These classes store state in the parameter's dtype, and cannot step if that dtype changes.
    """
    return isinstance(optimizer, (*ELEMENTWISE, *BY_TENSOR))


def is_known(optimizer: optim.Optimizer) -> bool:
    """Return whether the class of `optimizer` is one of torch's, which need no trial.

    Derived classes do not count, because they may override any method.
    """
    return type(optimizer) in (*ELEMENTWISE, *BY_TENSOR)


def state_shape(
    made_by: type[optim.Optimizer], key: str, shape: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the shape of state entry `key` for a tensor of `shape`.

    `made_by` is the optimizer's class. Entries that are single numbers are not supported. Returns
    None if the class is not one of torch's.
    """
    if made_by is optim.Adafactor and len(shape) > 1 and key in ("row_var", "col_var"):
        # Adafactor stores a matrix's second moment as row means and column means.
        *ahead, rows, columns = shape
        return (*ahead, rows, 1) if key == "row_var" else (*ahead, 1, columns)
    return tuple(shape) if made_by in (*ELEMENTWISE, *BY_TENSOR) else None


@dataclass(frozen=True)
class OptimizerKind:
    """The kind of an optimizer: which data an update needs, and which state it stores.

    Changing an option later may add state entries, such as SGD's momentum.
    """

    elementwise: bool
    """True if each element is updated independently, so that tensors may be split anywhere."""
    separable: bool
    """True if each tensor is updated independently of the others."""
    tensor_keys: frozenset[str]
    """State entries that have the parameter's shape (such as exp_avg)."""
    single_keys: frozenset[str] = frozenset()
    """State entries with a single value per parameter (such as step)."""
    group_keys: frozenset[str] = frozenset()
    """Options in the parameter group that the optimizer changes itself (ScheduleFree's k)."""
    attributes: frozenset[str] = frozenset()
    """Attributes of the optimizer that its steps change."""
    known: bool = False
    """True if `elementwise` and `separable` are known for the class, without a trial."""
    needs_closure: bool = False
    """True if the optimizer evaluates the loss itself (L-BFGS)."""

    def has_shape(self, key: str, value: Any, shape: Sequence[int]) -> bool:
        """Return whether state entry `key` always has its parameter's shape, `shape`.

        If the optimizer is element-wise, such an entry is split together with the parameter.
        """
        if value is None or key in self.single_keys:
            return False
        return key in self.tensor_keys or tuple(getattr(value, "shape", ())) == tuple(shape) != ()

    def is_tensor(self, key: str, value: Any, shape: Sequence[int]) -> bool:
        """Return whether a checkpoint stores state entry `key` as a tensor, not as a number."""
        if self.elementwise:
            return self.has_shape(key, value, shape)
        return isinstance(value, Tensor) and value.ndim > 0


def needs_closure(optimizer: optim.Optimizer) -> bool:
    """Return whether `optimizer.step` requires a closure."""
    # Inspect the class: schedulers replace `step` on the instance with a different signature.
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    return any(p.name == "closure" and p.default is p.empty for p in parameters)


_FOREIGN_ATTRIBUTES = frozenset(
    (
        *("param_groups", "state", "defaults", "grad_scale", "found_inf"),
        *("_opt_called", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured"),
    )
)
"""Attributes that torch or the engine sets on every optimizer."""


def attributes_of(optimizer: optim.Optimizer) -> dict[str, Any]:
    """Return the attributes that the class of `optimizer` itself sets on `optimizer`.

    Excludes attributes that shadow a method, because a scheduler or an engine has set those.
    """
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _FOREIGN_ATTRIBUTES
        and not name.endswith("_hooks")
        and not callable(getattr(type(optimizer), name, None))
    }


def common_state(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the entries of an optimizer's `state` that belong to no parameter."""
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}


def wrapped_optimizer(optimizer: optim.Optimizer) -> tuple[str, optim.Optimizer] | None:
    """Return the name and value of an attribute that holds another optimizer, or None."""
    for name, value in vars(optimizer).items():
        if isinstance(value, optim.Optimizer):
            return name, value
    return None


def bare_copy(optimizer: optim.Optimizer, *, detached: bool = False) -> optim.Optimizer:
    """Return a copy of `optimizer` with its class and attributes, but without parameters or state.

    Neither hooks nor attributes that a scheduler has set are copied. Unless `detached` is true, the
    copy shares its attribute values with `optimizer`.
    """
    # Skip `__init__`, whose parameters differ between classes.
    inner = type(optimizer).__new__(type(optimizer))
    attributes = attributes_of(optimizer)
    kept = {k: v for k, v in vars(optimizer).items() if k in _FOREIGN_ATTRIBUTES}
    hooks = {k: type(v)() for k, v in vars(optimizer).items() if k.endswith("_hooks")}
    vars(inner).update(kept | hooks | attributes)
    # The same state as after torch's constructor, before any group is added.
    inner.param_groups = []
    inner.state = defaultdict(dict)
    if detached:
        # References to the optimizer must refer to the copy. References to parameters stay shared.
        memo: dict[int, Any] = {id(optimizer): inner}
        memo |= {id(p): p for group in optimizer.param_groups for p in group["params"]}
        vars(inner).update({k: copied_attribute(v, memo) for k, v in attributes.items()})
    return inner


def copied_attribute(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of an attribute, or `value` itself if it is a module or cannot be copied.

    Locks and files, for example, cannot be copied. `memo` is the memo of `copy.deepcopy`: it maps
    an object's id to its copy.
    """
    # A module is part of the user's model, so all copies of the optimizer refer to the same one.
    if isinstance(value, nn.Module):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group's options, without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def placed(
    key: str, value: Any, device: torch.device, options: Mapping[str, Any], *, copy: bool = True
) -> Any:
    """Move a state entry to the device that an optimizer with `options` requires.

    This is `device`, except that step counts are usually on the CPU. If `copy` is False and the
    entry is already on the right device, returns the entry itself.
    """
    if not isinstance(value, Tensor):
        return value
    # As in torch's load_state_dict: a step count is on the CPU, unless a kernel uses it.
    if key == "step" and not (options.get("fused") or options.get("capturable")):
        device = torch.device("cpu")
    return value.to(device, copy=copy)


def same(a: Any, b: Any, *, exactly: bool = False) -> bool:
    """Return whether two options or attributes are equal, including nested containers.

    Unless `exactly` is true, numbers may differ by fp32 rounding errors. Objects whose class
    defines no `__eq__` are compared by their attributes.
    """
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if exactly:
            return a.dtype == b.dtype and torch.equal(a, b)
        return a.shape == b.shape and torch.allclose(a.double(), b.double(), equal_nan=True)
    if isinstance(a, float) and isinstance(b, float):
        if a != a and b != b:  # both are NaN
            return True
        return a == b if exactly else math.isclose(a, b, rel_tol=_TOLERANCE)
    # a reference back to the optimizer itself; avoid infinite recursion
    if isinstance(a, optim.Optimizer):
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
    return bool(
        equal.all() if hasattr(equal, "all") else equal
    )  # NumPy compares element by element


def compares_by_identity(value: Any) -> bool:
    """Return whether `value` has attributes, but its class defines no `__eq__`."""
    plain: Any = object.__eq__
    return hasattr(value, "__dict__") and type(value).__eq__ is plain


def may_fuse(
    optimizer: optim.Optimizer, options: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether torch's fused kernel may update tensors of `dtype`.

    The fused kernel reads and writes each number once. The default implementation makes one pass
    per operation, with the same arithmetic. Returns False if the user has set `fused` or `foreach`.
    """
    unchosen = options.get("fused", False) is None and not options.get("foreach")
    # With these options, torch has no fused kernel, or it would compute a different result.
    plain = not options.get("differentiable") and not options.get("capturable")
    # A learning rate that is a tensor would round results to its own dtype.
    rate = options.get("lr")
    plain &= not isinstance(rate, Tensor) or rate.dtype == dtype
    known = {"cpu": (*FUSED, optim.Adagrad), "cuda": FUSED}.get(device.type, ())
    real = dtype in (torch.float32, torch.float64)
    return unchosen and plain and real and type(optimizer) in known


FUSED = (optim.Adam, optim.AdamW, optim.SGD)
"""Optimizers that have a fused kernel in torch, on every device."""
