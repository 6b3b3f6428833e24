"""What one step has seen so far: the weights and losses between one `step()` and the next."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Window:
    """Sums over this rank's micro-batches. Numbers stay on the device where that is a GPU."""

    backwards: int = 0
    weight: float | Tensor = 0.0
    loss: float | Tensor = 0.0
    indices: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, loss: Tensor, weight: float | Tensor, indices: tuple[int, ...]) -> None:
        """Count one backward of `loss` (a mean over `weight` items)."""
        self.backwards += 1
        self.indices.append(indices)
        if not isinstance(weight, Tensor) and weight == 0:
            return
        value = loss.detach().double()
        if loss.device.type == "cpu" and not isinstance(weight, Tensor):
            self.loss = self.loss + weight * value.item()
        else:
            share = value * weight
            self.loss = self.loss + torch.where(torch.as_tensor(weight) == 0, 0.0, share)
        self.weight = self.weight + weight


@dataclass(frozen=True)
class StepStats:
    """What a step did, over all workers. Plain numbers, alike on all ranks.

    `loss` is the mean over all items of all workers and micro-batches, `weight` their number,
    `grad_norm` the global 2-norm of the mean gradient before clipping. `skipped` when nothing was
    updated: the total weight was zero, or a gradient overflowed under a loss scale.
    """

    loss: float
    grad_norm: float
    weight: float
    skipped: bool


_BITS = 48
"""Flags per fp64 number, which holds whole numbers up to 2**53."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """What a rank tells all others at a step, as one fp64 vector.

    | weight | loss x weight | squared norm | used, packed | late, packed | news | several |

    `used` is by parameter: it had a gradient. `late` is by bucket: a gradient came after the
    bucket had started. `news`: a buffer was seen to change for the first time.
    `several`: there was more than one backward.
    """

    weight: float | Tensor
    loss: float | Tensor
    squared_norm: float | Tensor
    used: list[bool]
    late: list[bool]
    news: bool
    several: bool

    def row(self, device: torch.device) -> Tensor:
        """The vector, on `device`; numbers that are there already stay there."""
        scalars = [
            torch.as_tensor(number, dtype=torch.float64, device=device)
            for number in (self.weight, self.loss, self.squared_norm)
        ]
        flags = [*_packed(self.used), *_packed(self.late), float(self.news), float(self.several)]
        rest = torch.tensor(flags, dtype=torch.float64, device=device)
        return torch.cat([torch.stack(scalars), rest])

    def join(self, table: list[list[float]]) -> Message:
        """The sums, and the flags that any rank set; `table` has one row of each rank."""
        first = 3 + _words(self.used)
        second = first + _words(self.late)
        return Message(
            weight=sum(row[0] for row in table),
            loss=sum(row[1] for row in table),
            squared_norm=sum(row[2] for row in table),
            used=_any_of([row[3:first] for row in table], len(self.used)),
            late=_any_of([row[first:second] for row in table], len(self.late)),
            news=any(row[second] for row in table),
            several=any(row[second + 1] for row in table),
        )


def _words(flags: list[bool]) -> int:
    return -(-len(flags) // _BITS)


def _packed(flags: list[bool]) -> list[float]:
    """Flags as few numbers."""
    return [
        float(sum(1 << bit for bit, flag in enumerate(flags[start : start + _BITS]) if flag))
        for start in range(0, len(flags), _BITS)
    ]


def _any_of(rows: list[list[float]], count: int) -> list[bool]:
    """The `count` flags that are set in any of `rows`, each made by `_packed`."""
    words = [0] * -(-count // _BITS)
    for row in rows:
        for index, number in enumerate(row):
            words[index] |= int(number)
    return [bool(words[bit // _BITS] >> (bit % _BITS) & 1) for bit in range(count)]
