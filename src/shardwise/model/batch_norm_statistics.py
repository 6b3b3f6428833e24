"""Exchanges BatchNorm statistics between ranks, each in its turn of the gather order.

Ranks may also wait for each other to gather units. If they exchanged statistics at arbitrary times,
a rank could wait for statistics from ranks that wait for it in a gather. An exchange therefore has
a turn in the gather order, just as a unit does. A rank that skips the BatchNorm participates with
zeros. Two mistakes would then silently give wrong statistics, so all ranks reject them: a rank
reaches a BatchNorm after the others have passed it, or runs the backward pass of a different
forward pass.

    a rank's row    | its values, or zeros | present | number of the call | uses in this pass |

On the CPU, all ranks check this immediately. On an accelerator, the host would have to wait in
every exchange, so the check runs at a point of the step where the host waits anyway. This is before
parameters are updated, although running statistics have already changed. Only a rank that skips an
exchange must check immediately, to find out whether the exchange was part of a forward pass.
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
"""Call number of every forward pass. The calls in its backward pass have different numbers."""


class StatisticsRows(Protocol):
    """Interface for gathering a BatchNorm's statistics from all ranks."""

    def of_forward(self, row: Tensor) -> tuple[Tensor, int]:
        """Return all ranks' rows, shape (ranks, k), and the number of this forward pass.

        Args:
            row: This rank's row, (k,).
        """

    def of_backward(self, row: Tensor, call: int) -> Tensor:
        """Return all ranks' rows, shape (ranks, k), for call number `call` of a backward pass.

        Every rank must pass the same `call`.
        """


class Skippable(Protocol):
    """Interface of a BatchNorm whose forward pass some ranks may skip."""

    num_features: int
    training: bool

    def update_from_others(self, rows: Tensor) -> None:
        """Update the running statistics with `rows`, from a forward pass that this rank skips."""


class _ExpectedUse(NamedTuple):
    """The exchange in which this rank expects all ranks to participate.

    Args:
        call: The number of the call.
        before: For a forward pass, the number of earlier uses in this pass.
        is_repeated: True if the call has already happened, and may happen only once.
    """

    call: int
    before: int
    is_repeated: bool

    def matches(self, rows: list[list[float]]) -> bool:
        """Return whether every rank present in `rows` is making this same call."""
        if self.is_repeated or {int(call) for here, call, _ in rows if here} != {self.call}:
            return False
        return self.call != FORWARD or all(
            used == (self.before if here else 0) for here, _, used in rows
        )


class _UncheckedExchange(NamedTuple):
    """An exchange that has not been checked yet.

    Args:
        name: Name of the BatchNorm.
        use: The exchange that this rank expected.
        rows: Flags of all ranks, (ranks, 3), on the host once `event` completes.
        event: Marks the completion of the copy to the host.
    """

    name: str
    use: _ExpectedUse
    rows: Tensor
    event: Any

    @property
    def was_expected(self) -> bool:
        """True if all ranks were in the expected exchange. Valid only after `event` completes."""
        return self.use.matches(self.rows.tolist())


class StatisticsExchange:
    """Exchanges the statistics of a BatchNorm layer, which is entry `number` of `turns`."""

    def __init__(
        self, turns: StatisticsExchanges, number: int, name: str, module: Skippable
    ) -> None:
        self.turns = turns
        self._number = number
        self.name = name
        self._module = module
        # Width of a forward pass's row. The row of a backward pass is shorter, and is padded.
        self._width = 2 * module.num_features + 1
        self._forwards = 0
        self._pass = -1
        self._uses = self._own_uses = 0
        self._done: set[int] = set()

    def of_forward(self, row: Tensor) -> tuple[Tensor, int]:
        """Return all ranks' rows, and the number of this forward pass."""
        rows = self.turns.exchange(self._number, row, FORWARD)
        self._forwards += not self.turns.are_used
        return rows, self._forwards

    def of_backward(self, row: Tensor, call: int) -> Tensor:
        """Return all ranks' rows for call number `call` of a backward pass."""
        return self.turns.exchange(self._number, row, call)

    def meet(self, row: Tensor | None, call: int) -> Tensor:
        """Exchange rows in this module's turn. `row` is None on a rank that skips the module."""
        # All ranks run this in the same turn, but each knows only its own call until the rows
        # arrive.
        order = self.turns.order
        # Counts restart with each pass (a forward pass and its backward pass) of the gather order.
        if self._pass != order.passes:
            self._pass, self._uses, self._own_uses, self._done = order.passes, 0, 0, set()
        rows = order.group.gather_rows(self._padded_row(row, call))
        flag_rows, use = rows[:, -3:], None if row is None else self._count_use(call)
        if flag_rows.device.type == "cpu":
            # The rows are on the host anyway, so check now. All ranks raise the same error.
            flags = flag_rows.tolist()
            common_call = next((int(call) for present, call, _ in flags if present), None)
            if common_call is not None and not (use or self._count_use(common_call)).matches(flags):
                self.turns.order.abandon()
                raise _order_error(self.name)
        elif use is not None:
            self.turns.check_later(
                _UncheckedExchange(self.name, use, *start_to_host(flag_rows.contiguous()))
            )
            common_call = call
        else:
            # A skipping rank learns the call only from the other ranks' rows, so the host must
            # wait. An error here would affect only this rank, so let the step raise on all ranks.
            flags = flag_rows.tolist()
            common_call = next((int(call) for present, call, _ in flags if present), None)
            if common_call is not None and not self._count_use(common_call).matches(flags):
                self.turns.refuse_later(self.name)
                common_call = None
        # Sent with every exchange, so that the other ranks notice a rank that runs a forward pass
        # late.
        self._own_uses += row is not None and call == FORWARD
        if row is None and common_call == FORWARD:
            self._module.update_from_others(rows[:, : self._width])
        return rows[:, : self._width if row is None else row.numel()]

    def _padded_row(self, row: Tensor | None, call: int) -> Tensor:
        """Return this rank's row, padded to full width, with the flags present, call and uses."""
        if row is None:
            device = self.turns.order.group.small_device
            sent = torch.zeros(self._width + 3, dtype=torch.float64, device=device)
            # The other flags stay 0: not present, no call.
            sent[-1] = self._own_uses
            return sent
        if row.numel() > self._width:
            raise ModelError(
                f"{self.name} was built for {(self._width - 1) // 2} channels but received another "
                "number, which synchronised BatchNorm does not support. Build it with the number "
                "of channels of its input."
            )
        rest = row.new_zeros(self._width - row.numel())
        here = torch.tensor([1.0, call, self._own_uses], dtype=row.dtype)
        return torch.cat([row, rest, to_device(here, row.device)])

    def _count_use(self, call: int) -> _ExpectedUse:
        """Count an exchange for `call`. Return the exchange in which all ranks should be."""
        use = _ExpectedUse(call, self._uses, call in self._done)
        if call == FORWARD:
            self._forwards += 1
            self._uses += 1
        elif is_backward(call):
            self._done.add(call)
        return use


def _order_error(name: str) -> OrderError:
    return OrderError(
        f"Workers ran {name} in different forwards, so they would use statistics of different "
        "rows. With --sync-batch-norm, every worker must run the same BatchNorms in a forward, "
        "in the same order and the same number of times."
    )


class StatisticsExchanges:
    """Assigns each BatchNorm in `modules` a turn in the gather order."""

    def __init__(self, order: GatherOrder, modules: Mapping[str, Skippable]) -> None:
        self.order = order
        self._modules = list(modules.values())
        self._pending: tuple[Tensor, int] | None = None
        self._rows: Tensor | None = None
        self._unchecked: deque[_UncheckedExchange] = deque()
        """Exchanges on an accelerator that have not been checked yet."""
        self._refused: str | None = None
        """Name of the first BatchNorm whose exchange failed the check, on an accelerator."""
        self.each = [
            StatisticsExchange(self, number, name, module)
            for number, (name, module) in enumerate(modules.items())
        ]
        self._first = order.join(self, list(modules), exchanges=True)

    @property
    def are_used(self) -> bool:
        """True if turns are in use. If not, all ranks exchange in the same order anyway."""
        return self.order.is_open

    def exchange(self, number: int, row: Tensor, call: int) -> Tensor:
        """Return all ranks' rows. They are zero for ranks that skip this exchange."""
        if not self.are_used:
            return self._without_turns(number, row)
        # `reach` calls `run_entry`, which reads `_pending` and stores the result in `_rows`.
        self._pending = row, call
        self.order.reach(self._first + number)
        rows, self._rows = self._rows, None
        assert rows is not None
        return rows

    def _without_turns(self, number: int, row: Tensor) -> Tensor:
        """Return all ranks' rows. Used if ranks reach the exchange without turns.

        On the CPU, raises OrderError on all ranks if one of them has reached a different BatchNorm.
        On an accelerator there is no such check, because the host would have to wait.
        """
        if row.device.type != "cpu":
            return self.order.group.gather_rows(row)
        # Send the BatchNorm's number with the row, because without turns nothing else reveals a
        # mix-up.
        rows = self.order.group.gather_rows(torch.cat([row, row.new_tensor([float(number)])]))
        if bool((rows[:, -1] != number).any()):
            raise _order_error(self.each[number].name)
        return rows[:, :-1]

    def check_later(self, unchecked: _UncheckedExchange) -> None:
        """Queue an exchange for `check`, and check exchanges whose flags have arrived.

        Otherwise, flags would accumulate over forward passes that no step follows.
        """
        self._unchecked.append(unchecked)
        while self._unchecked[0].event.query():
            self._check_next()
            if not self._unchecked:
                return

    def _check_next(self) -> None:
        unchecked = self._unchecked.popleft()
        if not unchecked.was_expected:
            self.refuse_later(unchecked.name)

    def refuse_later(self, name: str) -> None:
        """Make the next `check` raise OrderError for the BatchNorm `name`."""
        self._refused = self._refused or name

    def leave(self) -> None:
        self.order.leave(self._first)

    # -- as a member of the order ---------------------------------------------------------

    def run_entry(self, number: int, *, wanted: bool) -> None:
        """Exchange rows. If `wanted`, this rank runs the BatchNorm: store them for `exchange`."""
        if not wanted:
            self.each[number].meet(None, FORWARD)
            return
        assert self._pending is not None
        (row, call), self._pending = self._pending, None
        self._rows = self.each[number].meet(row, call)

    def start_ahead(self, number: int) -> None:
        """No-op: the row does not exist before the forward pass reaches the BatchNorm."""

    def is_past(self, number: int) -> None:
        """No-op: an exchange holds no memory between turns."""

    def end_dead_pass(self) -> None:
        """No-op: exchanges do not start passes."""

    def check(self) -> None:
        """Check all exchanges since the previous `check`.

        Raises OrderError on all ranks if ranks made different calls in an exchange.
        """
        while self._unchecked:
            if not self._unchecked[0].event.query():
                self._unchecked[0].event.synchronize()
            self._check_next()
        name, self._refused = self._refused, None
        if name is not None:
            raise _order_error(name)

    def mode(self) -> tuple[bool, ...]:
        """Return for each module whether it exchanges statistics (it does in training mode)."""
        return tuple(module.training for module in self._modules)

    def set_aside(self) -> Callable[[], None]:
        """Return a no-op, because exchanges record nothing."""
        return lambda: None


def is_backward(call: int) -> bool:
    """Return whether `call` is a first-order backward pass, which may run only once."""
    return call > 0 and call % 4 == 0
