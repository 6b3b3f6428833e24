"""Finds what kind of optimizer the user chose: torch's own are known, others are tried on small
tensors.

Sharded optimizer state updates arbitrary intervals of flattened parameters. That equals the
user's optimizer only if each element's update depends on that element alone (Adam, SGD, Adagrad).
Some optimizers need whole tensors (Muon, LAMB, Adafactor: norms, factors, orthogonalisation), and
a few look across tensors (Prodigy). No list of names could know the user's own, so trials do: the
same random steps on a tensor whole and split, and on two tensors together and apart; with as many
dims as the group's tensors have, with few and many elements, with small and large
gradients, for many steps and with counts of steps that are far ahead.

A trial shows what it reaches, no more. So what it says matters only where tensors must be cut.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim

from shardwise.errors import ModelError
from shardwise.model.optimizer_access import held
from shardwise.states.optimizer.optimizer_kind import (
    ELEMENTWISE,
    OptimizerKind,
    attributes_of,
    bare_copy,
    compares_by_identity,
    is_known,
    needs_closure,
    same,
    settings_of,
    wrapped_optimizer,
)
from shardwise.states.optimizer.step_hooks import without_hooks
from shardwise.world.randomness import preserved

_RATE = 0.1
_TOLERANCE = 1e-3


def examine(
    optimizer: optim.Optimizer,
    group: dict[str, Any],
    device: torch.device,
    *,
    is_copied: bool = True,
) -> OptimizerKind:
    """Return what kind of optimizer `optimizer` is with the options of `group`.

    One that needs a closure is taken to look across tensors, and so is one that no trial can run,
    unless it `is_copied`: copies of it are to update. Raises ModelError for one that needs sparse
    gradients, and for one that cannot be copied where it must be.
    """
    if needs_closure(optimizer):
        return OptimizerKind(False, False, frozenset(), needs_closure=True)
    if isinstance(optimizer, optim.SparseAdam):
        raise ModelError(
            f"{type(optimizer).__name__} takes sparse gradients only, which flat buckets cannot "
            "hold. Build its embeddings with sparse=False and train them with torch.optim.Adam."
        )
    try:
        return _tried(optimizer, group, device)
    except ModelError:
        if is_copied:
            raise
        return OptimizerKind(False, False, frozenset())


_WHOLE = (
    "That works only where every worker has all parameters and all optimizer state: --zero 0, "
    "without --exact, --tensor, --pipeline and a disk"
)


def _tried(
    optimizer: optim.Optimizer, group: dict[str, Any], device: torch.device
) -> OptimizerKind:
    name = type(optimizer).__name__
    if (wrapped := wrapped_optimizer(optimizer)) is not None:
        attribute, other = wrapped
        raise ModelError(
            f"{name} is a wrapper: it updates through another optimizer, the "
            f"{type(other).__name__} in its attribute {attribute}, so no copy of it can update "
            f"parts of the model. {_WHOLE}. Or give the engine the {type(other).__name__} itself."
        )
    bench = _Bench(optimizer, group, device)
    short, *long = _trials(group)
    first = bench.attempt(short)
    if first is None:
        raise ModelError(
            f"{name} cannot update a float32 tensor of shape {short.shape} that is not one of its "
            f"own parameters: {bench.why}. The engine lets a copy of it update others. {_WHOLE}. "
            "Or choose another optimizer."
        )
    if held := sorted(k for k, v in first.attributes.items() if _holds_tensors(v)):
        raise ModelError(
            f"{name} keeps tensors in its attribute {held[0]} and changes them in its steps. "
            f"{_WHOLE}. Or let it keep them in self.state[parameter], which the engine cuts, saves "
            "and loads."
        )
    if is_known(optimizer):
        elementwise = type(optimizer) in ELEMENTWISE
        return OptimizerKind(elementwise, True, first.keys, first.singles, known=True)
    kind = bench.judge(short, first)
    for trial in long:
        if not (kind.elementwise or kind.separable) or (whole := bench.attempt(trial)) is None:
            continue
        found = bench.judge(trial, whole, kind)
        kind = OptimizerKind(
            elementwise=kind.elementwise and found.elementwise,
            separable=kind.separable and found.separable,
            tensor_keys=kind.tensor_keys | found.tensor_keys,
            single_keys=kind.single_keys | found.single_keys,
            group_keys=kind.group_keys | found.group_keys,
            attributes=kind.attributes | found.attributes,
        )
    return kind


def _holds_tensors(value: Any) -> bool:
    """Whether `value` is a nest with a tensor of several elements, or has parameters as keys."""
    if isinstance(value, Tensor):
        return value.numel() > 1
    if isinstance(value, Mapping):
        return any(isinstance(key, Tensor) or _holds_tensors(v) for key, v in value.items())
    if isinstance(value, list | tuple | deque | set):
        return any(map(_holds_tensors, value))
    return compares_by_identity(value) and any(map(_holds_tensors, vars(value).values()))


class OptimizerKinds:
    """Finds the kinds of several groups, each once for all that differ in their rates alone.

    A group of an optimizer that is not torch's is tried once only: later, a method such as `eval()`
    may have left the optimizer where it makes no steps.
    """

    def __init__(self) -> None:
        self._known: dict[Any, OptimizerKind] = {}
        self._first: dict[Any, OptimizerKind] = {}

    def of(
        self,
        optimizer: optim.Optimizer,
        group: dict[str, Any],
        device: torch.device,
        *,
        is_copied: bool = True,
    ) -> OptimizerKind:
        """As `examine`."""
        shapes = tuple(_shapes(group))
        numbers = [n for n, each in enumerate(optimizer.param_groups) if each is group]
        place = optimizer, *numbers, device, shapes
        if place in self._first:
            return self._first[place]
        options = {key: value for key, value in settings_of(group).items() if key != "lr"}
        key = optimizer, device, repr(options), shapes
        if key not in self._known:
            with preserved():  # an optimizer may draw, and trials are not the user's
                self._known[key] = examine(optimizer, group, device, is_copied=is_copied)
        if not is_known(optimizer):
            self._first[place] = self._known[key]
        return self._known[key]


@dataclass(frozen=True)
class _OptimizerTrial:
    """Steps on tensors of `shape`, with gradients of about `scale`.

    Where it `leaps` the counts of steps are far ahead from the middle on.
    """

    shape: tuple[int, ...]
    scale: float = 1.0
    steps: int = 3
    leaps: bool = False


def _trials(group: Mapping[str, Any]) -> Iterator[_OptimizerTrial]:
    """A short one first, which most optimizers that need whole tensors do not pass."""
    shapes = _shapes(group)
    yield from (_OptimizerTrial(shape) for shape in shapes)
    yield from (_OptimizerTrial(shapes[0], scale=scale) for scale in (1e-5, 1e5))
    yield _OptimizerTrial(shapes[0], steps=30, leaps=True)
    yield _OptimizerTrial((shapes[0][0] * 180, *shapes[0][1:]))


def _shapes(group: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Those of tensors with as many dims as the group's have, the most first."""
    dims = {min(max(p.ndim, 1), len(_SHAPES)) for p in group["params"]}
    return [_SHAPES[dim - 1] for dim in sorted(dims, reverse=True)]


_SHAPES: list[tuple[int, ...]] = [(24,), (4, 6), (4, 3, 2), (2, 3, 2, 2), (2, 3, 2, 2, 1)]
"""By number of dims, each of 24 elements."""

_AHEAD = 100_000
"""By how much a count of steps leaps: further than a warm-up lasts."""


@dataclass(frozen=True)
class _Run:
    """What came of some steps: by tensor the update up to the middle and the one from there on,
    the first tensor's state, the group's options, and the attributes that the steps changed."""

    updates: list[tuple[Tensor, Tensor]]
    state: dict[str, Any]
    options: dict[str, Any]
    attributes: dict[str, Any]
    shape: torch.Size

    @property
    def keys(self) -> frozenset[str]:
        """The entries that have the tensor's shape."""
        return frozenset(k for k, v in self.state.items() if _has_shape(v, self.shape))

    @property
    def singles(self) -> frozenset[str]:
        """The other ones."""
        return frozenset(k for k, v in self.state.items() if v is not None) - self.keys

    @property
    def moved(self) -> bool:
        """Whether anything was updated: an update of nothing proves nothing."""
        return any(bool(update.any()) for update in self.updates[0])

    def is_close(self, other: _Run) -> bool:
        """Whether the first tensor went the same way in both, and the options with it."""
        pairs = zip(self.updates[0], other.updates[0], strict=True)
        return self.is_alike_beside(other) and all(_close(a, b) for a, b in pairs)

    def is_alike_beside(self, other: _Run) -> bool:
        """Whether both left the same options and attributes."""
        return same(self.options, other.options) and same(self.attributes, other.attributes)


class _Bench:
    """Tries `optimizer` with the options of `group`."""

    def __init__(
        self, optimizer: optim.Optimizer, group: dict[str, Any], device: torch.device
    ) -> None:
        self._optimizer = optimizer
        self._group = group
        self._device = device
        self.why = ""
        self._given = False
        """Whether fresh tensors are given state, as the constructor did (Adagrad's sums)."""

    def attempt(self, trial: _OptimizerTrial) -> _Run | None:
        """The trial's first tensor, alone; None where the optimizer raises, and then `why`."""
        tensors, grads = _drawn(trial)
        try:
            return self._run(trial, tensors[:1], grads[:1])
        except ModelError:
            raise
        except Exception as error:
            self.why = f"{type(error).__name__}: {error}"
        if self._given or not self._existing_state():
            return None
        self._given = True
        return self.attempt(trial)

    def judge(
        self, trial: _OptimizerTrial, whole: _Run, so_far: OptimizerKind | None = None
    ) -> OptimizerKind:
        """Compare with both tensors together, and with the first one split."""
        tensors, grads = _drawn(trial)
        separable = elementwise = so_far is not None or whole.moved
        if separable and (so_far is None or so_far.separable):
            separable = self._run(trial, tensors, grads).is_close(whole)
        if elementwise and (so_far is None or so_far.elementwise):
            elementwise = self._is_elementwise(trial, tensors[0], grads[0], whole)
        before = settings_of(self._group) | _visible_rate(self._group)
        now = whole.options.items()
        changed = frozenset(k for k, v in now if k not in before or not same(v, before[k]))
        attributes = frozenset(whole.attributes)
        return OptimizerKind(elementwise, separable, whole.keys, whole.singles, changed, attributes)

    def _is_elementwise(
        self, trial: _OptimizerTrial, tensor: Tensor, grads: list[Tensor], whole: _Run
    ) -> bool:
        cut = tensor.numel() // 2 - 1
        try:
            parts = [
                self._run(trial, [tensor.flatten()[half]], [[g.flatten()[half] for g in grads]])
                for half in (slice(cut), slice(cut, None))
            ]
        except Exception:  # an optimizer that refuses flat tensors says so in its own way
            return False
        joined = [torch.cat(halves) for halves in zip(*(p.updates[0] for p in parts), strict=True)]
        flat = [update.flatten() for update in whole.updates[0]]
        alike = all(whole.is_alike_beside(part) for part in parts)
        return alike and all(_close(a, b) for a, b in zip(joined, flat, strict=True))

    def _run(
        self, trial: _OptimizerTrial, tensors: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]
    ) -> _Run:
        """The steps of a fresh copy."""
        inner = bare_copy(self._optimizer, detached=True)
        options = copy.deepcopy(settings_of(self._group)) | _visible_rate(self._group)
        params = [torch.nn.Parameter(tensor.to(self._device, copy=True)) for tensor in tensors]
        inner.param_groups = [options | {"params": params}]
        for param in params if self._given else []:
            inner.state[param] = self._initial_state(param)
        middle, marks = trial.steps // 2, [list(tensors)]
        for step in range(trial.steps):
            for param, own in zip(params, grads, strict=True):
                param.grad = own[step].to(self._device, copy=True)
            counts = _numbers(inner) if trial.leaps and step == middle else None
            _step(inner)
            if counts is not None:
                _leap(inner, counts)
            if step in (middle, trial.steps - 1):
                marks.append([param.detach().to("cpu", copy=True) for param in params])
        updates = [(b - a, c - b) for a, b, c in zip(*marks, strict=True)]
        options = settings_of(inner.param_groups[0])
        before = attributes_of(self._optimizer)
        changed = {
            name: value
            for name, value in attributes_of(inner).items()
            if name not in before or not same(before[name], value, exactly=True)
        }
        return _Run(updates, dict(inner.state[params[0]]), options, changed, params[0].shape)

    def _existing_state(self) -> Mapping[str, Any]:
        """The state of a parameter of the group."""
        states = (held(self._optimizer).get(p) for p in self._group["params"] if p.ndim)
        return next((state for state in states if state), {})

    def _initial_state(self, like: Tensor) -> dict[str, Any]:
        """What the constructor may have made of `like`: one that exists, its values all alike."""
        state = self._existing_state()
        owner = next(p for p in self._group["params"] if held(self._optimizer).get(p) is state)
        return {
            key: _filled(like, value)
            if isinstance(value, Tensor) and value.shape == owner.shape and value.numel()
            else copy.deepcopy(value)
            for key, value in state.items()
        }


def _filled(like: Tensor, value: Tensor) -> Tensor:
    """A tensor in the form of `like`, of the first element of `value`."""
    first = value.detach().flatten()[0].item()
    return torch.full_like(like, first.real if isinstance(first, complex) else first)


def _drawn(trial: _OptimizerTrial) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Two tensors, and the gradients of each by step."""
    draw = torch.Generator().manual_seed(0)
    # Two halves of different scale, so that any norm over the whole shows itself.
    numel = math.prod(trial.shape)
    scale = torch.ones(numel)
    scale[numel // 2 :] = 30.0
    scale = scale.view(trial.shape)
    tensors = [torch.randn(trial.shape, generator=draw) * scale for _ in range(2)]
    grads = [
        [torch.randn(trial.shape, generator=draw) * scale * trial.scale for _ in range(trial.steps)]
        for _ in tensors
    ]
    return tensors, grads


def _visible_rate(group: dict[str, Any]) -> dict[str, Any]:
    """A learning rate whose steps show: a warm-up may begin at 0, where nothing would move."""
    rate = group.get("lr")
    if isinstance(rate, Tensor):
        return {"lr": torch.full_like(rate, _RATE)}
    return {} if rate is None else {"lr": _RATE}


def _step(inner: optim.Optimizer) -> None:
    try:
        with without_hooks(inner):
            inner.step()
    except TypeError as error:
        if "closure" in str(error):
            raise ModelError(
                f"{type(inner).__name__} re-evaluates the loss through a closure, which "
                "engine.step() cannot do. Use an optimizer whose step() takes none."
            ) from error
        raise


def _numbers(inner: optim.Optimizer) -> dict[tuple[int, str], float]:
    """All that may count steps, by place and key: single numbers of the states, of the groups and
    of the optimizer itself."""
    return {
        (place, key): float(value)
        for place, entries in enumerate(_places(inner))
        for key, value in entries.items()
        if _is_number(value)
    }


def _places(inner: optim.Optimizer) -> list[dict[str, Any]]:
    return [*inner.state.values(), *inner.param_groups, vars(inner)]


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _leap(inner: optim.Optimizer, before: Mapping[tuple[int, str], float]) -> None:
    """Move on what has counted one step since `before`."""
    for (place, key), number in _numbers(inner).items():
        if number - before.get((place, key), number) == 1.0:
            entries = _places(inner)[place]
            entries[key] = entries[key] + _AHEAD


def _has_shape(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether two updates are one, to fp32 noise."""
    finite = b[torch.isfinite(b)].abs()
    size = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=_TOLERANCE, atol=1e-2 * _TOLERANCE * size, equal_nan=True)
