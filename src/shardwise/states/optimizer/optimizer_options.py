"""Keeps the engine's inner optimizers in sync with the user's: options, attributes and step hooks.

The engine updates with inner copies of the user's optimizer. Before every update, a copy adopts the
options of the user's parameter groups (where schedulers set the learning rate) and any attributes
that user code has replaced. The update itself may also change options (ScheduleFree counts steps in
a group). Such changes are written back after all updates of the step:

    scheduler ─▶ user's param_groups ─▶ inner param_groups ─▶ update
                        ▲                                       │
                        └──────────── write_back ◀──────────────┘

Step hooks run once per step, with the user's optimizer. torch must not call them again when the
copies step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import optim
from torch.optim import optimizer as torch_optimizer

from shardwise.errors import ModelError
from shardwise.states.optimizer.optimizer_kind import (
    OptimizerKind,
    attributes_of,
    copied_attribute,
    is_known,
    same,
    settings_of,
)
from shardwise.states.optimizer.update_interval import copy_value

Hook = Callable[[optim.Optimizer, Any, Any], Any]

_GLOBAL = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_OF_ONE = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

_MISSING = object()


@dataclass(frozen=True)
class ParameterGroup:
    """The parameter group of the user's optimizer to which a bucket's parameters belong."""

    optimizer: optim.Optimizer
    index: int
    """Index of the group in the optimizer."""
    kind: OptimizerKind
    whole: bool
    """True if the group's tensors are never split."""
    together: bool
    """True if all tensors of the optimizer must be updated in a single call."""
    stays: bool = False
    """True if the user's own optimizer makes that call, on its own parameters, and keeps its own
    state."""

    @property
    def options(self) -> dict[str, Any]:
        """The current options of the user's parameter group."""
        return self.optimizer.param_groups[self.index]


class FollowedOptions:
    """Copies options of the user's parameter groups to the groups of `inner`, and records changes.

    `inner` is a copy of the user's optimizer. It updates on `device`, with torch's fused kernel if
    `fused` is true. `counts` contains the names of options that the optimizer changes itself.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        inner: optim.Optimizer,
        device: torch.device,
        *,
        fused: bool,
    ) -> None:
        self.user = groups[0].optimizer
        self.numbers = sorted({group.index for group in groups})
        self.counts = frozenset[str]().union(*(group.kind.group_keys for group in groups))
        self.changes: dict[int, dict[str, Any]] = {}
        """Index of the user's group -> options that the last update has changed."""
        self._inner = inner
        self._device = device
        self._fused = fused
        self._followed: dict[int, dict[str, Any]] = {}
        """Index of the user's group -> options that `follow` has copied last."""

    def follow(self) -> None:
        """Copy the current options of the user's groups to the inner groups."""
        for number, inner in zip(self.numbers, self._inner.param_groups, strict=True):
            options = self.of(self.user.param_groups[number])
            # Copy the values: an update must not increment the user's tensor, because every update
            # of a step starts from the same count.
            options |= {key: copy_value(options[key]) for key in self.counts if key in options}
            inner.update(options)
            self._followed[number] = options

    def record_changes(self) -> None:
        """Record which options the update has changed in the inner groups."""
        # Do not write to the user's groups yet. Every update of a step, including the next span's,
        # must start from the same values.
        for number, inner in zip(self.numbers, self._inner.param_groups, strict=True):
            followed = self._followed[number]
            self.changes[number] = {
                key: value
                for key, value in settings_of(inner).items()
                if key in self.counts or key not in followed or value is not followed[key]
            }

    def of(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return the options that the inner optimizer uses for tensors of the user's `group`."""
        options = settings_of(group)
        if self._fused:
            options["fused"] = True
        if options.get("capturable") and self._device.type == "cpu":
            options["capturable"] = False  # a CUDA graph contains no CPU work
        return options


def write_back_options(followed: Sequence[FollowedOptions]) -> None:
    """Write options that a step's updates have changed back to the user's groups.

    Call after all updates of the step. Raises ModelError if two updates set different values.
    """
    first_of: dict[tuple[int, int, str], Any] = {}
    for each in followed:
        for number, changes in each.changes.items():
            for key, value in changes.items():
                # All updates of a step must agree, because the user's group has only one value.
                first = first_of.setdefault((id(each.user), number, key), value)
                if not same(first, value):
                    raise ModelError(
                        f"{type(each.user).__name__} keeps {key} in its parameter group, and the "
                        f"updates of two parts of group {number} set it to {first!r} and "
                        f"{value!r}. Use an optimizer that keeps the value for each parameter."
                    )
                each.user.param_groups[number][key] = value
        each.changes.clear()


class FollowedAttributes:
    """Copies attributes of the user's optimizer `user` to its copy `inner`, and returns changes.

    `changing` names the attributes that a step changes. The copy for which `leads` is true shares
    their values with `user`. Every other copy has values of its own.
    """

    def __init__(
        self,
        user: optim.Optimizer,
        inner: optim.Optimizer,
        changing: frozenset[str],
        *,
        leads: bool,
    ) -> None:
        self.user = user
        self.leads = leads
        self.changing = changing
        self._inner = inner
        self._follows = not is_known(user)  # torch's own optimizers store nothing in attributes
        self._followed: dict[str, Any] = {}
        """The attributes of the user's optimizer that were copied last."""
        self.follow()

    def follow(self) -> None:
        """Copy those attributes of the user's optimizer that user code has replaced."""
        if not self._follows:
            return
        for name, value in attributes_of(self.user).items():
            if self._followed.get(name, _MISSING) is not value:
                shared = self.leads or name not in self.changing
                # Compare by identity: user code replaces a value, whereas a step changes it in
                # place.
                vars(self._inner)[name] = value if shared else copied_attribute(value, {})
                self._followed[name] = value

    def changes(self) -> dict[str, Any]:
        """Return the inner copy's values of the attributes that steps change."""
        return {k: vars(self._inner)[k] for k in self.changing if k in vars(self._inner)}

    def forget_changes(self) -> None:
        """Regard the current attributes of the user's optimizer as already copied."""
        self._followed = attributes_of(self.user)


def write_back_attributes(followed: Sequence[FollowedAttributes]) -> None:
    """Write attributes that a step's updates have changed back to the user's optimizers.

    Raises ModelError if two updates set different values.
    """
    changing = [each for each in followed if each.changing]
    first: dict[optim.Optimizer, dict[str, Any]] = {each.user: {} for each in changing}
    # The leading copy's values win. Other copies may change additional attributes if their groups
    # differ from its groups.
    for each in sorted(changing, key=lambda each: not each.leads):
        first[each.user] = each.changes() | first[each.user]
    # Check everything before the first assignment, so that an error leaves the user's optimizers
    # unchanged.
    for each in changing:
        for name, value in each.changes().items():
            if not same(first[each.user][name], value):
                raise ModelError(
                    f"{type(each.user).__name__} keeps {name} in an attribute, and the updates of "
                    f"two parts of its parameters set it to {first[each.user][name]!r:.60} and "
                    f"{value!r:.60}. Use --zero 0, or make it keep the value for each parameter, "
                    "in self.state."
                )
    for each in changing:
        vars(each.user).update(first[each.user])
    for each in changing:
        each.forget_changes()


def pre_hooks(optimizer: optim.Optimizer) -> list[tuple[int, Hook]]:
    """Return the ids and hooks that torch calls before a step of `optimizer`, in order."""
    several: Any = torch_optimizer._global_optimizer_pre_hooks
    return [*several.items(), *optimizer._optimizer_step_pre_hooks.items()]


def post_hooks(optimizer: optim.Optimizer) -> list[Hook]:
    """Return the hooks that torch calls after a step of `optimizer`, in order."""
    several: Any = torch_optimizer._global_optimizer_post_hooks
    return [*optimizer._optimizer_step_post_hooks.values(), *several.values()]


@contextmanager
def without_hooks(optimizer: optim.Optimizer) -> Iterator[None]:
    """Context manager inside which `optimizer.step()` calls no hooks.

    Global hooks still run for other optimizers, such as one that `optimizer` wraps.
    """
    # Remove the instance's hooks, but only wrap global ones, because an optimizer inside
    # `optimizer` must still run them.
    attributes, module = vars(optimizer), vars(torch_optimizer)
    of_one = {name: attributes[name] for name in _OF_ONE}
    of_all = {name: module[name] for name in _GLOBAL if module[name]}
    attributes.update({name: OrderedDict() for name in _OF_ONE})
    module.update(
        {
            name: OrderedDict((n, partial(_unless, optimizer, hook)) for n, hook in hooks.items())
            for name, hooks in of_all.items()
        }
    )
    try:
        yield
    finally:
        attributes.update(of_one)
        module.update(of_all)


def _unless(optimizer: optim.Optimizer, hook: Hook, stepping: optim.Optimizer, *args: Any) -> Any:
    return None if stepping is optimizer else hook(stepping, *args)
