"""What kind of optimizer the user chose, found by trying it on small tensors.

Sharded optimizer state updates arbitrary intervals of flattened parameters. That equals the
user's optimizer only if each element's update depends on that element alone (Adam, SGD, Adagrad).
Some optimizers need whole tensors (Muon, LAMB, Adafactor: norms, factors, orthogonalisation), and
a few look across tensors (Prodigy). No list of names could know the user's own, so two trials do:
the same random steps on a tensor whole and split, and on two tensors together and apart.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim

from shardwise.errors import ModelError

_SHAPE = (4, 6)
_STEPS = 3
_RATE = 0.1
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Kind:
    """`elementwise`: may be cut anywhere. `separable`: tensors do not look at each other.

    `tensor_keys` are the state entries that have the parameter's shape (exp_avg ...); the other
    entries (step ...) are one value per parameter. `group_keys` are the options of a parameter
    group that the optimizer changes itself (ScheduleFree's k).
    """

    elementwise: bool
    separable: bool
    tensor_keys: frozenset[str]
    group_keys: frozenset[str] = frozenset()


_LEFT_BEHIND = ("step", "zero_grad", "add_param_group", "_shardwise_hooks")


def bare_copy(face: optim.Optimizer) -> optim.Optimizer:
    """An optimizer of the same class, options and attributes as `face`, without its parameters.

    Made without `__init__`, whose signature is the class's own affair; hooks and what a scheduler
    put on the instance stay behind.
    """
    inner = type(face).__new__(type(face))
    kept = {k: v for k, v in face.__dict__.items() if k not in _LEFT_BEHIND}
    inner.__dict__.update(kept)
    inner.__dict__.update({k: type(v)() for k, v in kept.items() if k.endswith("_hooks")})
    inner.param_groups = []
    inner.state = defaultdict(dict)
    return inner


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group's options, without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def placed(key: str, value: Any, device: torch.device, options: Mapping[str, Any]) -> Any:
    """A state's entry, copied to where an optimizer with `options` wants it for `device`.

    A count of steps is on the CPU unless a kernel counts, as torch's own load_state_dict has it.
    """
    if not isinstance(value, Tensor):
        return value
    if key == "step" and not (options.get("fused") or options.get("capturable")):
        device = torch.device("cpu")
    return value.to(device, copy=True)


def examine(face: optim.Optimizer, group: dict[str, Any], device: torch.device) -> Kind:
    """Try `face` with the options of `group`. Raises ModelError for one that needs a closure."""
    draw = torch.Generator().manual_seed(0)
    # Two halves of different scale, so that any norm over the whole shows itself.
    scale = torch.cat([torch.ones(2, _SHAPE[1]), torch.full((2, _SHAPE[1]), 30.0)])
    tensors = [torch.randn(_SHAPE, generator=draw) * scale for _ in range(2)]
    grads = [[torch.randn(_SHAPE, generator=draw) * scale for _ in range(_STEPS)] for _ in tensors]
    whole, state, options = _run(face, group, tensors[:1], [grads[0]], device)
    keys = frozenset(
        key
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == torch.Size(_SHAPE)
    )
    together, _, in_both = _run(face, group, tensors, grads, device)
    separable = _close(together[0], whole[0]) and same(options, in_both)
    elementwise = _is_elementwise(face, group, tensors[0], grads[0], whole[0], options, device)
    before = settings_of(group) | _visible_rate(group)
    changed = (k for k, v in options.items() if k not in before or not same(v, before[k]))
    return Kind(elementwise, separable, keys, frozenset(changed))


def _is_elementwise(
    face: optim.Optimizer,
    group: dict[str, Any],
    tensor: Tensor,
    grads: list[Tensor],
    whole: Tensor,
    options: dict[str, Any],
    device: torch.device,
) -> bool:
    cut = tensor.numel() // 2 - 1
    halves = torch.split(tensor.flatten(), [cut, tensor.numel() - cut])
    parts = [[g.flatten()[:cut] for g in grads], [g.flatten()[cut:] for g in grads]]
    try:
        split = [
            _run(face, group, [half], [part], device)
            for half, part in zip(halves, parts, strict=True)
        ]
    except Exception:  # an optimizer that refuses flat tensors says so in its own way
        return False
    alike = all(same(options, told) for _, _, told in split)
    return alike and _close(torch.cat([updates[0] for updates, _, _ in split]), whole.flatten())


def _run(
    face: optim.Optimizer,
    group: dict[str, Any],
    tensors: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    device: torch.device,
) -> tuple[list[Tensor], dict[str, Any], dict[str, Any]]:
    """A few steps of a fresh copy; returns the updates (on the CPU), the first one's state, and
    the group's options afterwards."""
    inner = bare_copy(face)
    options = copy.deepcopy(settings_of(group)) | _visible_rate(group)
    params = [torch.nn.Parameter(tensor.clone().to(device)) for tensor in tensors]
    inner.param_groups = [options | {"params": params}]
    for param in params:
        inner.state[param] = _initial_state(face, group, param)
    for step in range(_STEPS):
        for param, own in zip(params, grads, strict=True):
            param.grad = own[step].clone().to(device)
        _step(inner)
    updates = [param.detach().cpu() - tensor for param, tensor in zip(params, tensors, strict=True)]
    return updates, dict(inner.state[params[0]]), settings_of(inner.param_groups[0])


def _visible_rate(group: dict[str, Any]) -> dict[str, Any]:
    """A learning rate whose steps show: a warm-up may begin at 0, where nothing would move."""
    rate = group.get("lr")
    if isinstance(rate, Tensor):
        return {"lr": torch.full_like(rate, _RATE)}
    return {} if rate is None else {"lr": _RATE}


def _step(inner: optim.Optimizer) -> None:
    try:
        inner.step()
    except TypeError as error:
        if "closure" in str(error):
            raise ModelError(
                f"{type(inner).__name__} re-evaluates the loss through a closure, which "
                "engine.step() cannot do. Use an optimizer whose step() takes none."
            ) from error
        raise


def _initial_state(face: optim.Optimizer, group: dict[str, Any], like: Tensor) -> dict[str, Any]:
    """The state that `face` made in its constructor (Adagrad's sums), in the shape of `like`."""
    owner = next((p for p in group["params"] if face.state.get(p) and p.ndim), None)
    if owner is None:
        return {}
    shapes = {v.shape for v in face.state[owner].values() if isinstance(v, Tensor) and v.ndim}
    if shapes - {owner.shape}:
        return {}  # factored state (Adafactor): it grows its own
    fresh: dict[str, Any] = {}
    for key, value in face.state[owner].items():
        if isinstance(value, Tensor):
            same = value.shape == owner.shape
            fill = value.flatten()[0].item() if value.numel() else 0.0
            fresh[key] = torch.full_like(like, fill) if same else value.clone()
        else:
            fresh[key] = value
    return fresh


def same(a: Any, b: Any) -> bool:
    """Whether two options, or dicts of such, are one, numbers to fp32 noise."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.allclose(a.double(), b.double(), equal_nan=True)
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=_TOLERANCE) or (a != a and b != b)
    return type(a) is type(b) and bool(a == b)


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether two updates are one, to fp32 noise. An update of nothing proves nothing."""
    size = float(b.abs().max())
    return size > 0 and torch.allclose(a, b, rtol=_TOLERANCE, atol=1e-2 * _TOLERANCE * size)
