"""Determines the kind of the user's optimizer. torch's own are known; others run on small tensors.

Sharded optimizer state updates arbitrary intervals of flattened parameters. The result matches the
user's optimizer only if each element's update depends on that element alone (Adam, SGD, Adagrad).
Some optimizers need full tensors (Muon, LAMB, Adafactor) for norms, factors or orthogonalisation. A
few combine several tensors (Prodigy).

No list of names could include the optimizers that users write, so trials decide. A trial runs the
same random steps twice and compares the results:

    separable     two tensors together      =?  the first one alone
    elementwise   two halves of a tensor    =?  the full tensor

Trials differ in the number of dims (every number that occurs in the group), the number of elements,
the size of gradients, the number of steps, and whether step counts jump far ahead.

A trial proves nothing about behaviour that it does not trigger. Its result is therefore used only
if tensors must be split.
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
from shardwise.states.optimizer.optimizer_options import without_hooks
from shardwise.world.generator_states import preserved

_RATE = 0.1
_TOLERANCE = 1e-3


def examine(
    optimizer: optim.Optimizer,
    group: dict[str, Any],
    device: torch.device,
    *,
    is_copied: bool = True,
) -> OptimizerKind:
    """Return the `OptimizerKind` of `optimizer` with the options of `group`.

    `is_copied` is True if copies of the optimizer will run the updates. Raises ModelError if the
    optimizer needs sparse gradients, or if copies are needed but impossible.
    """
    # If the optimizer needs a closure, or no trial can run it, assume that it needs all tensors
    # together.
    if needs_closure(optimizer):
        return OptimizerKind(False, False, frozenset(), needs_closure=True)
    if isinstance(optimizer, optim.SparseAdam):
        raise ModelError(
            f"{type(optimizer).__name__} takes sparse gradients only, which flat buckets cannot "
            "hold. Build its embeddings with sparse=False and train them with torch.optim.Adam."
        )
    try:
        return _classify(optimizer, group, device)
    except ModelError:
        if is_copied:
            raise
        return OptimizerKind(False, False, frozenset())


_WHOLE = (
    "That works only if every worker has all parameters and all optimizer state: --zero 0, "
    "without --exact, --tensor, --pipeline and a disk"
)


def _classify(
    optimizer: optim.Optimizer, group: dict[str, Any], device: torch.device
) -> OptimizerKind:
    name = type(optimizer).__name__
    if (wrapped := wrapped_optimizer(optimizer)) is not None:
        attribute, other = wrapped
        raise ModelError(
            f"{name} is a wrapper around another optimizer, the {type(other).__name__} in its "
            f"attribute {attribute}, so no copy of it can update parts of the model. {_WHOLE}. Or "
            f"give the engine the {type(other).__name__} itself."
        )
    runner = _TrialRunner(optimizer, group, device)
    short, *long = _trials(group)
    first = runner.attempt(short)
    if first is None:
        raise ModelError(
            f"{name} cannot update a float32 tensor of shape {short.shape} that is not one of its "
            f"parameters: {runner.reason}. The engine would update such tensors with a copy of "
            f"it. {_WHOLE}. Or choose another optimizer."
        )
    if with_tensors := sorted(k for k, v in first.attributes.items() if _holds_tensors(v)):
        raise ModelError(
            f"{name} keeps tensors in its attribute {with_tensors[0]} and changes them in its "
            f"steps. {_WHOLE}. Or make it keep them in self.state[parameter], which the engine "
            "cuts, saves and loads."
        )
    if is_known(optimizer):
        elementwise = type(optimizer) in ELEMENTWISE
        return OptimizerKind(elementwise, True, first.keys, first.singles, known=True)
    kind = runner.judge(short, first)
    for trial in long:
        # An optimizer may reject some shapes. For example, Muon accepts only matrices.
        if not (kind.elementwise or kind.separable) or (whole := runner.attempt(trial)) is None:
            continue
        shown = runner.judge(trial, whole, kind)
        kind = OptimizerKind(
            elementwise=kind.elementwise and shown.elementwise,
            separable=kind.separable and shown.separable,
            tensor_keys=kind.tensor_keys | shown.tensor_keys,
            single_keys=kind.single_keys | shown.single_keys,
            group_keys=kind.group_keys | shown.group_keys,
            attributes=kind.attributes | shown.attributes,
        )
    return kind


def _holds_tensors(value: Any) -> bool:
    """Return whether `value` contains a tensor of several elements, or a tensor as a key."""
    if isinstance(value, Tensor):
        return value.numel() > 1
    if isinstance(value, Mapping):
        return any(isinstance(key, Tensor) or _holds_tensors(v) for key, v in value.items())
    if isinstance(value, list | tuple | deque | set):
        return any(map(_holds_tensors, value))
    return compares_by_identity(value) and any(map(_holds_tensors, vars(value).values()))


class OptimizerKinds:
    """Determines and caches the `OptimizerKind` of each parameter group.

    Groups that differ only in learning rate share a trial. Unless the optimizer is one of torch's,
    each group is tried only once, because a method such as `eval()` may later put it into a mode in
    which it does not update.
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
        """Return the kind of `optimizer` with the options of `group`. See `examine`."""
        shapes = tuple(_shapes(group))
        numbers = [n for n, each in enumerate(optimizer.param_groups) if each is group]
        place = optimizer, *numbers, device, shapes
        if place in self._first:
            return self._first[place]
        options = {key: value for key, value in settings_of(group).items() if key != "lr"}
        key = optimizer, device, repr(options), shapes
        if key not in self._known:
            # an optimizer may draw random numbers, so preserve the user's sequence
            with preserved():
                self._known[key] = examine(optimizer, group, device, is_copied=is_copied)
        if not is_known(optimizer):
            self._first[place] = self._known[key]
        return self._known[key]


@dataclass(frozen=True)
class _OptimizerTrial:
    """A trial: `steps` steps on tensors of `shape`, with gradients of about `scale`."""

    shape: tuple[int, ...]
    scale: float = 1.0
    steps: int = 3
    leaps: bool = False
    """True if step counts jump far ahead after the middle step."""


def _trials(group: Mapping[str, Any]) -> Iterator[_OptimizerTrial]:
    """Yield the trials for `group`, starting with a short one.

    Most optimizers that need full tensors fail the first trial.
    """
    shapes = _shapes(group)
    yield from (_OptimizerTrial(shape) for shape in shapes)
    yield from (_OptimizerTrial(shapes[0], scale=scale) for scale in (1e-5, 1e5))
    yield _OptimizerTrial(shapes[0], steps=30, leaps=True)
    yield _OptimizerTrial((shapes[0][0] * 180, *shapes[0][1:]))


def _shapes(group: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Return a shape for each number of dims among the group's tensors, the most dims first."""
    dims = {min(max(p.ndim, 1), len(_SHAPES)) for p in group["params"]}
    return [_SHAPES[dim - 1] for dim in sorted(dims, reverse=True)]


_SHAPES: list[tuple[int, ...]] = [(24,), (4, 6), (4, 3, 2), (2, 3, 2, 2), (2, 3, 2, 2, 1)]
"""A shape of 24 elements for each number of dims."""

_AHEAD = 100_000
"""Number of steps added to a step count when it jumps ahead: longer than any warm-up."""


@dataclass(frozen=True)
class _Outcome:
    """The result of the steps of a trial."""

    updates: list[tuple[Tensor, Tensor]]
    """For each tensor, its change up to the middle step, and from there to the end."""
    state: dict[str, Any]
    """State of the first tensor."""
    options: dict[str, Any]
    """Options of the parameter group after the steps."""
    attributes: dict[str, Any]
    """Attributes that the steps changed."""
    shape: torch.Size
    """Shape of the first tensor."""

    @property
    def keys(self) -> frozenset[str]:
        """The names of the state entries that have the tensor's shape."""
        return frozenset(
            k for k, v in self.state.items() if isinstance(v, Tensor) and v.shape == self.shape
        )

    @property
    def singles(self) -> frozenset[str]:
        """The names of the state entries that do not have the tensor's shape."""
        return frozenset(k for k, v in self.state.items() if v is not None) - self.keys

    @property
    def moved(self) -> bool:
        """True if the first tensor changed. Otherwise equal results would prove nothing."""
        return any(bool(update.any()) for update in self.updates[0])

    def is_close(self, other: _Outcome) -> bool:
        """Return whether the first tensor's updates, the options and the attributes agree."""
        pairs = zip(self.updates[0], other.updates[0], strict=True)
        return self.has_same_options(other) and all(_close(a, b) for a, b in pairs)

    def has_same_options(self, other: _Outcome) -> bool:
        """Return whether both outcomes have the same options and attributes."""
        return same(self.options, other.options) and same(self.attributes, other.attributes)


class _TrialRunner:
    """Runs trials of `optimizer` with the options of `group`."""

    def __init__(
        self, optimizer: optim.Optimizer, group: dict[str, Any], device: torch.device
    ) -> None:
        self._optimizer = optimizer
        self._group = group
        self._device = device
        self.reason = ""
        """The error of the last failed attempt."""
        self._gives_state = False
        """True if new tensors start with state, as some constructors create it (Adagrad's sums)."""

    def attempt(self, trial: _OptimizerTrial) -> _Outcome | None:
        """Run the trial on its first tensor alone. Return None if the optimizer raises."""
        tensors, grads = _draw(trial)
        try:
            return self._run(trial, tensors[:1], grads[:1])
        except ModelError:
            raise
        except Exception as error:  # foreign code may raise anything
            self.reason = f"{type(error).__name__}: {error}"
        # Some constructors create state that `step` relies on, so try again with state.
        if self._gives_state or not self._existing_state():
            return None
        self._gives_state = True
        return self.attempt(trial)

    def judge(
        self, trial: _OptimizerTrial, whole: _Outcome, so_far: OptimizerKind | None = None
    ) -> OptimizerKind:
        """Return the optimizer's kind, according to this trial.

        Compares `whole`, the result for the first tensor alone, with the results for both tensors
        together and for the first tensor in two parts. Skips properties that earlier trials have
        disproved (`so_far`).
        """
        tensors, grads = _draw(trial)
        # If the first trial changed nothing, equal results prove nothing.
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
        self, trial: _OptimizerTrial, tensor: Tensor, grads: list[Tensor], whole: _Outcome
    ) -> bool:
        cut = tensor.numel() // 2 - 1  # unequal parts, with the cut inside a row
        try:
            parts = [
                self._run(trial, [tensor.flatten()[half]], [[g.flatten()[half] for g in grads]])
                for half in (slice(cut), slice(cut, None))
            ]
        except Exception:  # optimizers that reject flat tensors raise any kind of error
            return False
        joined = [torch.cat(halves) for halves in zip(*(p.updates[0] for p in parts), strict=True)]
        flat = [update.flatten() for update in whole.updates[0]]
        if not all(whole.has_same_options(part) for part in parts):
            return False
        return all(_close(a, b) for a, b in zip(joined, flat, strict=True))

    def _run(
        self, trial: _OptimizerTrial, tensors: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]
    ) -> _Outcome:
        """Run the trial's steps with a new copy of the optimizer."""
        inner = bare_copy(self._optimizer, detached=True)
        options = copy.deepcopy(settings_of(self._group)) | _visible_rate(self._group)
        params = [torch.nn.Parameter(tensor.to(self._device, copy=True)) for tensor in tensors]
        inner.param_groups = [options | {"params": params}]
        for param in params if self._gives_state else []:
            inner.state[param] = self._initial_state(param)
        # Compare updates in two halves, because step counts may jump in the middle.
        middle, marks = trial.steps // 2, [list(tensors)]
        for step in range(trial.steps):
            for param, own in zip(params, grads, strict=True):
                param.grad = own[step].to(self._device, copy=True)
            counts = _numbers(inner) if trial.leaps and step == middle else None
            _step(inner)
            if counts is not None:
                for (place, key), number in _numbers(inner).items():
                    if number - counts.get((place, key), number) == 1.0:
                        # A number that grew by one counts steps. Replace it, because copies share
                        # the object.
                        entries = _places(inner)[place]
                        entries[key] = entries[key] + _AHEAD
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
        return _Outcome(updates, dict(inner.state[params[0]]), options, changed, params[0].shape)

    def _existing_state(self) -> Mapping[str, Any]:
        """Return the state of the first parameter in the group that has any state."""
        states = (held(self._optimizer).get(p) for p in self._group["params"] if p.ndim)
        return next((state for state in states if state), {})

    def _initial_state(self, like: Tensor) -> dict[str, Any]:
        """Return the state that the optimizer's constructor might have created for `like`.

        It is a copy of another parameter's state, with all elements set to the first one.
        """
        state = self._existing_state()
        owner = next(p for p in self._group["params"] if held(self._optimizer).get(p) is state)
        return {
            # A complex state starts from its real part.
            key: torch.full_like(like, value.detach().flatten()[0].real.item())
            if isinstance(value, Tensor) and value.shape == owner.shape and value.numel()
            else copy.deepcopy(value)
            for key, value in state.items()
        }


def _draw(trial: _OptimizerTrial) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Draw two random tensors, and a gradient for each tensor and step."""
    draw = torch.Generator().manual_seed(0)
    # Scale the two halves differently, so that a norm over the full tensor differs from those over
    # its parts.
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
    """Return a learning rate that changes tensors noticeably, because a warm-up may start at 0."""
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
                f"{type(inner).__name__} evaluates the loss again through a closure, which "
                "engine.step() does not provide. Use an optimizer whose step() needs none."
            ) from error
        raise


def _numbers(inner: optim.Optimizer) -> dict[tuple[int, str], float]:
    """Return the numbers that may be step counts: in states, parameter groups and attributes.

    Keys are the index in `_places` and the name of the entry.
    """
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


def _close(a: Tensor, b: Tensor) -> bool:
    """Return whether two updates are equal, except for fp32 rounding errors."""
    # Compare relative to the largest update, because elements that nearly cancel carry the rounding
    # errors of others.
    finite = b[torch.isfinite(b)].abs()
    size = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=_TOLERANCE, atol=1e-2 * _TOLERANCE * size, equal_nan=True)
