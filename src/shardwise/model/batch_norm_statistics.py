"""Exchanges a BatchNorm's statistics between ranks, in its turn of the gather order.

Where ranks gather units together, one that waits for the statistics would wait for ranks that wait
for it in a gather. So an exchange takes a turn as a unit does: a rank that skips it takes part with
nothing. What then could go wrong in silence is refused on all ranks: a rank that comes to a
BatchNorm after the others have been there, or in the backward of another forward.

    row of a rank    | what it sends, or zeros | is here | of which call | how often in this pass |

On the CPU all ranks look, and refuse, at once. On an accelerator the host would wait for that in
every exchange, so all ranks go on and refuse in the step, when the host has waited anyway: before
parameters are updated, though running statistics have moved by then. Only a rank that skips an
exchange has to look at once, to know whether it was of a forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardwise.comm import GatherOrder
from shardwise.errors import ModelError, OrderError
from shardwise.tiers.copy_stream import start_to_host, to_device

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


class _Use(NamedTuple):
    """What an exchange has to be: that of `call`, of which there were `before` in this pass where
    it is a forward; `again`: it has been before, where it may be once."""

    call: int
    before: int
    again: bool

    def is_of(self, rows: list[list[float]]) -> bool:
        """Whether it is that, on all ranks that are here by their `rows`."""
        if self.again or {int(call) for here, call, _ in rows if here} != {self.call}:
            return False
        return self.call != FORWARD or all(
            used == (self.before if here else 0) for here, _, used in rows
        )


class _Unseen(NamedTuple):
    """Rows that come down until `event`, and what they have to say of the BatchNorm `name`."""

    name: str
    use: _Use
    rows: Tensor
    event: Any

    @property
    def is_right(self) -> bool:
        """Whether it was what it had to be, once the event has happened."""
        return self.use.is_of(self.rows.tolist())


class StatisticsExchange:
    """The exchanges of one BatchNorm, in turn `number` of `turns`."""

    def __init__(
        self, turns: StatisticsExchanges, number: int, name: str, module: Skippable
    ) -> None:
        self.turns = turns
        self._number = number
        self.name = name
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
        rows = order.group.gather_rows(self._sent(row, call))
        here, use = rows[:, -3:], None if row is None else self._used(call)
        if here.device.type == "cpu":
            met = self._check(here.tolist(), use)
        elif use is not None:
            self.turns.look_later(_Unseen(self.name, use, *start_to_host(here.contiguous())))
            met = call
        else:
            met = self._skipped(here.tolist())
        self._mine += row is not None and call == FORWARD
        if row is None and met == FORWARD:
            self._module.follow_others(rows[:, : self._width])
        return rows[:, : self._width if row is None else row.numel()]

    def _sent(self, row: Tensor | None, call: int) -> Tensor:
        """A rank's row, in whole."""
        if row is None:
            device = self.turns.order.group.small_device
            sent = torch.zeros(self._width + 3, dtype=torch.float64, device=device)
            sent[-1] = self._mine
            return sent
        self._check_length(row)
        rest = row.new_zeros(self._width - row.numel())
        here = torch.tensor([1.0, call, self._mine], dtype=row.dtype)
        return torch.cat([row, rest, to_device(here, row.device)])

    def _check_length(self, row: Tensor) -> None:
        if row.numel() > self._width:
            raise ModelError(
                f"{self.name} was built for {(self._width - 1) // 2} channels and got others, "
                "which synchronised BatchNorm cannot have: build it for those that it gets."
            )

    def _check(self, rows: list[list[float]], use: _Use | None) -> int | None:
        """Which call rows have met in, if any rank is here; raises OrderError, on all ranks alike,
        where they are of different uses."""
        call = next((int(call) for here, call, _ in rows if here), None)
        if call is not None and not (use or self._used(call)).is_of(rows):
            self.turns.order.abandon()
            raise _apart(self.name)
        return call

    def _skipped(self, rows: list[list[float]]) -> int | None:
        """Which call the others have met in; where they are of different uses None, and the step
        says so on all ranks."""
        call = next((int(call) for here, call, _ in rows if here), None)
        if call is None or self._used(call).is_of(rows):
            return call
        self.turns.refuse_later(self.name)
        return None

    def _used(self, call: int) -> _Use:
        """Count an exchange of `call`; returns what it has to be."""
        use = _Use(call, self._uses, call in self._done)
        if call == FORWARD:
            self._forwards += 1
            self._uses += 1
        elif is_backward(call):
            self._done.add(call)
        return use


def _apart(name: str) -> OrderError:
    return OrderError(
        f"Workers came to {name} in different forwards, or one of them after the "
        "others, so that its statistics over all workers would be of other rows on each. "
        "With --sync-batch-norm each worker runs a BatchNorm as often as the others in a "
        "forward, or not at all, and all in one order."
    )


class StatisticsExchanges:
    """Gives each of some BatchNorms its turn in a gather order."""

    def __init__(self, order: GatherOrder, modules: Mapping[str, Skippable]) -> None:
        self.order = order
        self._modules = list(modules.values())
        self._pending: tuple[Tensor, int] | None = None
        self._rows: Tensor | None = None
        self._unseen: deque[_Unseen] = deque()
        """What nobody has looked at yet, on an accelerator."""
        self._refused: str | None = None
        """The BatchNorm of the first exchange that is known to be in disorder, there."""
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
            return self._without_turns(number, row)
        self._pending = row, call
        self.order.reach(self._first + number)
        rows, self._rows = self._rows, None
        assert rows is not None
        return rows

    def _without_turns(self, number: int, row: Tensor) -> Tensor:
        """The rows of all ranks, which come by themselves. On the CPU, where the host has the rows
        anyway, raises OrderError, on all ranks alike, where one came with another BatchNorm's."""
        if row.device.type != "cpu":
            return self.order.group.gather_rows(row)
        rows = self.order.group.gather_rows(torch.cat([row, row.new_tensor([float(number)])]))
        if bool((rows[:, -1] != number).any()):
            raise _apart(self.each[number].name)
        return rows[:, :-1]

    def look_later(self, unseen: _Unseen) -> None:
        """Keep it for `check`. Those before it that have come down go: forwards without a step
        would else keep all of theirs."""
        self._unseen.append(unseen)
        while self._unseen[0].event.query():
            self._look()
            if not self._unseen:
                return

    def _look(self) -> None:
        unseen = self._unseen.popleft()
        if not unseen.is_right:
            self.refuse_later(unseen.name)

    def refuse_later(self, name: str) -> None:
        """Let `check` refuse an exchange of the BatchNorm `name`."""
        self._refused = self._refused or name

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

    def check(self) -> None:
        """Look at all exchanges since the last call; raises OrderError, on all ranks alike, where
        they were of different uses."""
        while self._unseen:
            if not self._unseen[0].event.query():
                self._unseen[0].event.synchronize()
            self._look()
        name, self._refused = self._refused, None
        if name is not None:
            raise _apart(name)

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
