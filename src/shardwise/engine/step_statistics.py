"""Aggregates the statistics that ranks report of their backwards into the totals of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from shardwise.comm import Collectives
from shardwise.tiers.copy_stream import to_device
from shardwise.world.common_calls import nearly_alike
from shardwise.world.randomness import seed_from

Number = float | Tensor


@dataclass(frozen=True)
class StepStats:
    """What a step did, over all workers. Plain numbers, alike on all ranks.

    `loss` is the mean over all items of all workers and micro-batches, or their sum where the
    losses were sums (with reduction="ddp" the mean of the workers' sums); `weight` is the number of
    items, `grad_norm` the global 2-norm of the gradient before clipping. `skipped` when nothing was
    updated: the total weight was zero, or a gradient overflowed under a loss scale.

    With `--islands` they are those of this island, alike on its ranks; after a step that makes all
    parameters equal (`--late 0`), `loss` and `weight` are those of all islands.

    With `--behind S` they are those of all workers, and of the gradients that were used: of S steps
    before. `staleness` says how many updates had changed the weights since these were computed, at
    most S; `waited` how many seconds this rank has waited for those of the other islands. The first
    S steps have none to use: NaN, and `skipped`.
    """

    loss: float
    grad_norm: float
    weight: float
    skipped: bool
    staleness: int = 0
    waited: float = 0.0


class Aggregation:
    """Adds up what ranks report; each rank adds up its own backwards, of any number, before.

    `row` lengths are in numbers; `rows` have one row of each rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def seed(self, seed: int, engine: int, step: int, backwards: int) -> int | None:
        """The seed of what is drawn after `backwards` of `step`; None to go on as it is."""
        return None if backwards else seed_from(seed, "step", engine, step, self._rank)

    def first_step(self, weights: Sequence[float]) -> tuple[float, int]:
        """Estimate the weight of a whole step and the number of its backwards, from the weight of
        the first one on each rank."""
        return sum(weights), sum(weight > 0 for weight in weights)

    def check(self, backwards: int) -> None:
        """Raise UsageError where a step cannot have that many."""

    def reported(self, values: Sequence[Number]) -> list[Number]:
        """What a rank reports of `values`, one of each backward."""
        return [sum(values)]

    def total(self, rows: Sequence[Sequence[float]]) -> float:
        """The sum of what all ranks reported."""
        return sum(row[0] for row in rows)

    def total_of_squares(self, rows: Sequence[Sequence[float]]) -> float:
        """The same of sums of squares."""
        return self.total(rows)

    def refuse_late(self, names: Sequence[str], group: Collectives) -> None:
        """Gradients came after their bucket's sum had begun, on this rank because of those of
        `names`. All of `group` call it."""


_BITS = 48
"""Flags per fp64 number, which holds whole numbers up to 2**53."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a rank reports to all others at a step, as one fp64 vector.

    | weights | losses x factor | squared norm |
    backwards | shares | options | calls | rows | shown | mix | copies |
    used, packed | late, packed |
    news | several | unsaved | asked | written | divisor | alone | buffer rows |

    How many numbers the first three are is a matter of the step's parts. `backwards` leaves out
    those of weight 0. `shares` are the seeds of the backwards, added up. `options` is a checksum of
    the optimizers' options, `calls` one of the calls that all make alike since the last step;
    joined they are NaN where ranks differ. `rows` is a number of the first rows of the batches that
    were shared. `shown` is what users see of the weights, and `mix` the range of a number that is
    the same everywhere if weights are right for all terms of all losses. `copies` is a checksum of
    the buffers and frozen parameters that ranks do not average. `used` is by parameter: it had a
    gradient. `late` is by bucket: a gradient came after the bucket had started. `news`: a buffer
    was seen to change for the first time. `several`: there was more than one backward. `unsaved`: a
    save in the background has failed. `asked`: the signal that asked this rank to end, or 0; of all
    ranks the highest. `written`: user code has written into parameters. `divisor`: what the added
    losses are divided by, 0 for means, and -1 where nothing says so. `alone`: a loss is right only
    without any others in the step. `buffer_rows` are the rows by which buffers are averaged.
    """

    weights: list[Number]
    losses: list[Number]
    squared_norm: Tensor
    backwards: int
    shares: float
    options: float
    calls: float
    rows: Number
    shown: Number
    mix: tuple[Number, Number]
    copies: Number
    used: list[bool]
    late: list[bool]
    news: bool
    several: bool
    unsaved: bool
    asked: int
    written: bool
    divisor: float
    alone: bool
    buffer_rows: list[float]

    def row(self, device: torch.device) -> Tensor:
        """The vector, on `device`. Numbers of an accelerator move together, or stay there."""
        flags = self.news, self.several, self.unsaved, self.asked, self.written
        numbers = [*packed_flags(self.used), *packed_flags(self.late), *map(float, flags)]
        numbers += [self.divisor, float(self.alone), *self.buffer_rows]
        known = [float(self.backwards), self.shares, self.options, self.calls, self.rows]
        known += [self.shown, *self.mix, self.copies, *numbers]
        return _row([*self.weights, *self.losses, self.squared_norm, *known], device)

    def join(self, table: list[list[float]], aggregation: Aggregation) -> StepTotals:
        """The sums, and the flags that any rank set; `table` has one row of each rank."""
        lengths = (
            len(self.weights),
            len(self.losses),
            self.squared_norm.numel(),
            9,
            _words(self.used),
            _words(self.late),
            7,
            len(self.buffer_rows),
        )
        ends = list(accumulate(lengths))
        weights, losses, squares, known, used, late, flags, _ = (
            [row[end - length : end] for row in table]
            for length, end in zip(lengths, ends, strict=True)
        )
        backwards = int(sum(row[0] for row in known))
        divisors = [row[5] for row in flags if row[5] >= 0]
        alone = any(row[6] for row in flags)
        return StepTotals(
            weight=aggregation.total(weights),
            shown=sum(row[5] for row in known),
            loss=aggregation.total(losses),
            squared_norm=aggregation.total_of_squares(squares),
            backwards=backwards,
            shares=sum(row[1] for row in known),
            options=_common([row[2] for row in known]),
            calls=_common([row[3] for row in known]),
            rows_differ=not nearly_alike([row[4] for row in known]),
            is_mixed=_differ([row[6:8] for row in known]) or (alone and backwards > 1),
            copies_differ=len({row[8] for row in known}) > 1,
            used=any_of(used, len(self.used)),
            late=any_of(late, len(self.late)),
            news=any(row[0] for row in flags),
            several=any(row[1] for row in flags),
            unsaved=any(row[2] for row in flags),
            asked=int(max(row[3] for row in flags)),
            written=any(row[4] for row in flags),
            divisor=_common(divisors) if divisors else 0.0,
        )


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """What all ranks know of a step after its exchange, alike.

    `weight` and `loss` (x weight) are sums over the ranks, `shown` is what users see of the weight;
    `is_mixed` says that no weight is right for all losses. `squared_norm` is that of the summed
    gradients. `backwards` is the number of those that had a weight, `shares` their seeds added up,
    `options` the checksum of the optimizers' options, and `calls` that of the calls that all make
    alike, NaN where ranks differ. `rows_differ`: ranks have shared different batches.
    `copies_differ`: buffers or frozen parameters that are not averaged differ between ranks. `used`
    says by parameter whether any rank
    had a gradient for it, `late` by bucket whether any came after it had started; `news` whether a
    buffer was seen to change for the first time, `several` whether any rank made more than one
    backward, `unsaved` whether a save in the background has failed. `asked` is the signal that
    asked any to end, or 0. `written` says whether user code has written into parameters of any
    rank, `divisor` what the added losses are divided by, 0 for means: NaN where ranks differ.
    `scale` is the loss scale that gradients of an earlier step had.
    """

    weight: float
    shown: float
    loss: float
    squared_norm: float
    backwards: int
    shares: float
    options: float
    calls: float
    rows_differ: bool
    is_mixed: bool
    copies_differ: bool
    used: list[bool]
    late: list[bool]
    news: bool
    several: bool
    unsaved: bool
    asked: int
    written: bool
    divisor: float
    scale: float | None = None

    @property
    def denominator(self) -> float:
        """What the added losses and gradients are divided by."""
        return self.divisor or self.weight

    @property
    def alike(self) -> bool:
        """Whether the optimizers' options are."""
        return not math.isnan(self.options)


def _common(numbers: list[float]) -> float:
    """The number that all ranks have; NaN where they differ."""
    return numbers[0] if len(set(numbers)) == 1 else math.nan


def _differ(ranges: list[list[float]]) -> bool:
    """Whether `ranges`, one of each rank, are of several numbers; one that is empty, from infinity
    to its negative, is of none."""
    lowest, highest = min(low for low, _ in ranges), max(high for _, high in ranges)
    return lowest < highest and not nearly_alike([lowest, highest])


def _row(numbers: list[Number], device: torch.device) -> Tensor:
    """One fp64 vector on `device`, by one copy of what is elsewhere, for which the host does not
    wait where it goes to an accelerator."""
    near = [x for number in numbers if not _is_far(number) for x in _values(number)]
    sent = to_device(torch.tensor(near, dtype=torch.float64), device)
    far = [n.double().reshape(-1) for n in numbers if isinstance(n, Tensor) and _is_far(n)]
    if not far:
        return sent
    sources, ends, parts = {True: torch.cat(far).to(device), False: sent}, [0, 0], []
    for is_far, run in groupby(numbers, key=_is_far):
        first = ends[is_far]
        ends[is_far] += sum(n.numel() if isinstance(n, Tensor) else 1 for n in run)
        parts.append(sources[is_far][first : ends[is_far]])
    return torch.cat(parts)


def _is_far(number: Number) -> bool:
    """Whether the host would have to wait for it."""
    return isinstance(number, Tensor) and number.device.type != "cpu"


def _values(number: Number) -> list[float]:
    return number.double().reshape(-1).tolist() if isinstance(number, Tensor) else [number]


def _words(flags: list[bool]) -> int:
    return -(-len(flags) // _BITS)


def packed_flags(flags: list[bool]) -> list[float]:
    """Flags as few numbers."""
    return [
        float(sum(1 << bit for bit, flag in enumerate(flags[start : start + _BITS]) if flag))
        for start in range(0, len(flags), _BITS)
    ]


def any_of(rows: list[list[float]], count: int) -> list[bool]:
    """The `count` flags that are set in any of `rows`, each made by `packed_flags`."""
    words = [0] * -(-count // _BITS)
    for row in rows:
        for index, number in enumerate(row):
            words[index] |= int(number)
    return [bool(words[bit // _BITS] >> (bit % _BITS) & 1) for bit in range(count)]
