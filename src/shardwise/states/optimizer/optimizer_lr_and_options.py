"""Follows the learning rate and other options of the user's optimizer, which schedulers edit.

The engine updates with inner copies of the user's optimizer. Before every update a copy takes the
options of the user's parameter groups as they are then; what the update itself changes in them
(ScheduleFree counts steps there) is written back when all updates of the step are made:

    scheduler ─▶ user's param_groups ─▶ inner param_groups ─▶ update
                        ▲                                       │
                        └──────────── write_back ◀──────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim

from shardwise.errors import ModelError
from shardwise.states.optimizer.optimizer_kind import OptimizerKind, same, settings_of
from shardwise.states.parameters.update_intervals import copied


@dataclass(frozen=True)
class ParameterGroup:
    """The parameter group of the user's optimizer that a bucket belongs to.

    `whole`: each of its tensors is updated as such, and never cut. `together`: all of the
    optimizer's are, in one call. `stays`: the user's optimizer itself makes that call, over its own
    parameters, and keeps its own state.
    """

    optimizer: optim.Optimizer
    index: int
    kind: OptimizerKind
    whole: bool
    together: bool
    stays: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The group as the user's optimizer has it now."""
        return self.optimizer.param_groups[self.index]


class FollowedOptions:
    """The options of the user's groups `numbers`, as the copy `inner` of their optimizer has them.

    `device` is where it updates; `fused`: by torch's fused kernel. Options of `counts` are those
    that the optimizer changes itself.
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
        """By number of the user's group, the options that the last update has changed."""
        self._inner = inner
        self._device = device
        self._fused = fused
        self._given: dict[int, dict[str, Any]] = {}

    def follow(self) -> None:
        """Take the options of the user's groups as they are now."""
        for number, inner in zip(self.numbers, self._inner.param_groups, strict=True):
            given = self.of(self.user.param_groups[number])
            # Each update of a step begins from the same count, so none may write the user's.
            given |= {key: copied(given[key]) for key in self.counts if key in given}
            inner.update(given)
            self._given[number] = given

    def record_changes(self) -> None:
        """Remember what the update has changed in the inner groups.

        Not written to the user's groups at once: each update of a step, also that of the next
        span, begins from the same.
        """
        for number, inner in zip(self.numbers, self._inner.param_groups, strict=True):
            given = self._given[number]
            self.changes[number] = {
                key: value
                for key, value in settings_of(inner).items()
                if key in self.counts or key not in given or value is not given[key]
            }

    def of(self, group: dict[str, Any]) -> dict[str, Any]:
        """The options with which the inner optimizer updates what belongs to the user's `group`."""
        options = settings_of(group)
        if self._fused:
            options["fused"] = True
        if options.get("capturable") and self._device.type == "cpu":
            options["capturable"] = False  # a CUDA graph holds nothing that the CPU does
        return options


def write_back(followed: Sequence[FollowedOptions]) -> None:
    """Write what the updates of a step have changed to the user's groups, once all are made.

    Raises ModelError where two updates left different values.
    """
    first_of: dict[tuple[int, int, str], Any] = {}
    for each in followed:
        for number, changes in each.changes.items():
            for key, value in changes.items():
                first = first_of.setdefault((id(each.user), number, key), value)
                if not same(first, value):
                    raise ModelError(
                        f"{type(each.user).__name__} keeps {key} in its parameter group, and two "
                        f"parts of group {number} left it at {first!r} and {value!r}. Choose "
                        "an optimizer that keeps it by parameter."
                    )
                each.user.param_groups[number][key] = value
        each.changes.clear()
