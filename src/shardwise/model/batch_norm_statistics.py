"""Exchanges a BatchNorm's statistics between ranks, in its turn of the gather order.

Where ranks gather units together, one that waits for the statistics would wait for ranks that wait
for it in a gather. So an exchange takes a turn as a unit does: a rank that skips it takes part with
nothing. What then could go wrong in silence is refused on all ranks at once: a rank that comes to a
BatchNorm after the others have been there, or in the backward of another forward.

    row of a rank    | what it sends, or zeros | is here | of which call | how often in this pass |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from shardwise.collectives import GatherOrder
from shardwise.errors import ModelError, OrderError

FORWARD = 0
"""The call of every forward; those of its backward differ by a number."""


class StatisticsRows(Protocol):
    """Gathers a BatchNorm's statistics from all ranks."""

    def of_forward(self, row: Tensor) -> tuple[Tensor, int]:
        """`row` (k,) of every rank as (ranks, k), and the number of this forward."""

    def of_backward(self, row: Tensor, call: int) -> Tensor:
        """The same for a `call` in the backward of a forward, which has the same on all ranks."""


class Skippable(Protocol):
    """A BatchNorm whose forward some ranks skip."""

    num_features: int
    training: bool

    def follow_others(self, rows: Tensor) -> None:
        """Take the running statistics on by `rows`, those of a forward that this rank skips."""


class StatisticsExchange:
    """The exchanges of one BatchNorm, in turn `number` of `turns`."""

    def __init__(
        self, turns: StatisticsExchanges, number: int, name: str, module: Skippable
    ) -> None:
        self.turns = turns
        self._number = number
        self._name = name
        self._module = module
        self._width = 2 * module.num_features + 1
        self._forwards = 0
        self._pass = -1
        self._uses = self._mine = 0
        self._done: set[int] = set()

    def of_forward(self, row: Tensor) -> tuple[Tensor, int]:
        """The rows of all ranks that run this forward, and its number."""
        rows = self.turns.exchange(self._number, row, FORWARD)
        self._forwards += not self.turns.are_taken
        return rows, self._forwards

    def of_backward(self, row: Tensor, call: int) -> Tensor:
        """The rows of all ranks for a `call` in the backward of a forward."""
        return self.turns.exchange(self._number, row, call)

    def meet(self, row: Tensor | None, call: int) -> Tensor:
        """Exchange rows in the turn for it; `row` is None on a rank that skips it."""
        order = self.turns.order
        if self._pass != order.passes:
            self._pass, self._uses, self._mine, self._done = order.passes, 0, 0, set()
        if row is None:
            sent = torch.zeros(
                self._width + 3, dtype=torch.float64, device=order.group.small_device
            )
            sent[-1] = self._mine
        else:
            self._check_length(row)
            rest = row.new_zeros(self._width - row.numel())
            sent = torch.cat([row, rest, row.new_tensor([1.0, call, self._mine])])
        rows = order.group.gather_rows(sent)
        met = self._check(rows[:, -3:].tolist())
        self._mine += row is not None and call == FORWARD
        if row is None and met == FORWARD:
            self._module.follow_others(rows[:, : self._width])
        return rows[:, : self._width if row is None else row.numel()]

    def _check_length(self, row: Tensor) -> None:
        if row.numel() > self._width:
            raise ModelError(
                f"{self._name} was built for {(self._width - 1) // 2} channels and got others, "
                "which synchronised BatchNorm cannot have: build it for those that it gets."
            )

    def _check(self, rows: list[list[float]]) -> int | None:
        """Which call rows have met in, if any rank is here; raises OrderError, on all ranks alike,
        where they are of different uses."""
        calls = {int(call) for here, call, _ in rows if here}
        if not calls:
            return None
        call = calls.pop()
        apart = bool(calls) or call in self._done
        if call == FORWARD:
            self._forwards += 1
            apart |= any(used != (self._uses if here else 0) for here, _, used in rows)
            self._uses += 1
        elif is_backward(call):
            self._done.add(call)
        if apart:
            self.turns.order.abandon()
            raise OrderError(
                f"Workers came to {self._name} in different forwards, or one of them after the "
                "others, so that its statistics over all workers would be of other rows on each. "
                "With --sync-batch-norm each worker runs a BatchNorm as often as the others in a "
                "forward, or not at all, and all in one order."
            )
        return call


class StatisticsExchanges:
    """Gives each of some BatchNorms its turn in a gather order."""

    def __init__(self, order: GatherOrder, modules: Mapping[str, Skippable]) -> None:
        self.order = order
        self._modules = list(modules.values())
        self._pending: tuple[Tensor, int] | None = None
        self._rows: Tensor | None = None
        self.each = [
            StatisticsExchange(self, number, name, module)
            for number, (name, module) in enumerate(modules.items())
        ]
        self._first = order.join(self, list(modules), exchanges=True)

    @property
    def are_taken(self) -> bool:
        """Whether turns are taken now: else all ranks come by themselves, in one order."""
        return self.order.is_open

    def exchange(self, number: int, row: Tensor, call: int) -> Tensor:
        """The rows of all ranks, those of ranks that skip this one zero."""
        if not self.are_taken:
            return self.order.group.gather_rows(row)
        self._pending = row, call
        self.order.reach(self._first + number)
        rows, self._rows = self._rows, None
        assert rows is not None
        return rows

    def leave(self) -> None:
        """There will be no more exchanges."""
        self.order.leave(self._first)

    # -- as a member of the order ---------------------------------------------------------

    def run_entry(self, number: int, *, wanted: bool) -> None:
        """Exchange rows; what this rank has `wanted` is kept for `exchange`."""
        if not wanted:
            self.each[number].meet(None, FORWARD)
            return
        assert self._pending is not None
        (row, call), self._pending = self._pending, None
        self._rows = self.each[number].meet(row, call)

    def start_ahead(self, number: int) -> None:
        """There is nothing to send yet."""

    def is_past(self, number: int) -> None:
        """Nothing waits for that."""

    def end_dead_pass(self) -> None:
        """It opens none."""

    def mode(self) -> tuple[bool, ...]:
        """Which modules exchange anything, those in training."""
        return tuple(module.training for module in self._modules)

    def set_aside(self) -> Callable[[], None]:
        """It records nothing."""
        return _nothing


def _nothing() -> None:
    return None


def is_backward(call: int) -> bool:
    """Whether `call` is the backward of a forward itself, which comes once in a pass."""
    return call > 0 and call % 4 == 0
