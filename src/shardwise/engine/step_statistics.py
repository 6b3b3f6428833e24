"""Defines the statistics that each rank reports per step, and adds them up into totals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, islice

import torch
from torch import Tensor

from shardwise.comm import Collectives
from shardwise.layout.packed_flags import any_of, pack, words
from shardwise.states.step_totals import StepTotals
from shardwise.tiers.copy_stream import start_to_host, to_device
from shardwise.world.common_calls import nearly_alike
from shardwise.world.randomness import seed_from

Number = float | Tensor


class Aggregation:
    """Adds up the statistics of ranks, each of which reports the sum over its backward passes.

    In the methods below, `rows` has one row of numbers per rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def follow(self, rank: int, workers: int) -> None:
        """Set this rank's new index among `workers` ranks, after ranks were lost or have joined."""
        self._rank = rank

    def seed(self, seed: int, engine: int, step: int, backwards: int) -> int | None:
        """Return the seed for the random generators after `backwards` backward passes of `step`.

        If the seed is None, the generators stay unchanged.
        """
        return None if backwards else seed_from(seed, "step", engine, step, self._rank)

    def first_step(self, weights: Sequence[float]) -> tuple[float, int]:
        """Estimate the first step's total weight and number of backward passes.

        `weights` has the weight of each rank's first backward pass.
        """
        return sum(weights), sum(weight > 0 for weight in weights)

    def check(self, backwards: int) -> None:
        """Raise UsageError if a step must not have `backwards` backward passes."""

    def report(self, values: Sequence[Number]) -> list[Number]:
        """Return the numbers to report for `values`, which has one value per backward pass."""
        return [sum(values)]

    def total(self, rows: Sequence[Sequence[float]]) -> float:
        """Return the total of all ranks' reported sums."""
        return sum(row[0] for row in rows)

    def total_of_squares(self, rows: Sequence[Sequence[float]]) -> float:
        """Return the total of all ranks' sums of squares."""
        return self.total(rows)

    def refuse_late(self, names: Sequence[str], group: Collectives) -> None:
        """Raise UsageError if late gradients are not allowed. All ranks of `group` call it.

        `names` lists the parameters whose gradients were late on this rank.
        """


# Not frozen: setting the fields of a frozen dataclass takes several times as long.
@dataclass(kw_only=True)
class StepReport:
    """One rank's statistics of a step, sent to all other ranks as one fp64 vector:

    | weights | losses x factor | squared norm |
    backwards | shares | options | calls | rows | shown | mix | copies |
    used, packed | late, packed |
    news | several | unsaved | asked | written | divisor | alone | experts | buffer rows |

    The length of the first three depends on the aggregation.

    backwards    number of backward passes with a nonzero weight
    shares       sum of the seeds of the backward passes
    options      checksum of the optimizers' options; in the totals, NaN if ranks differ
    calls        checksum of the calls since the last step that all ranks must make; NaN as above
    rows         digest of the first rows of shared batches
    shown        the weights that messages print
    mix          range of numbers that are equal on all ranks if the weights fit all loss terms
    copies       checksum of the buffers and frozen parameters that ranks do not average
    used         per parameter: whether it has a gradient
    late         per bucket: whether a gradient arrived after the bucket was launched
    news         a buffer changed for the first time
    several      there was more than one backward pass
    unsaved      a background save has failed
    asked        the signal that asks this rank to stop, or 0; in the totals, the maximum
    written      user code has written to parameters
    divisor      divisor of the summed losses; 0 for means, -1 if unknown
    alone        a loss is correct only if it is the step's only loss
    experts      number of token copies per expert
    buffer_rows  the numbers of rows by which the averages of buffers are weighted
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
    experts: list[float]
    buffer_rows: list[float]

    def row(self, device: torch.device) -> Tensor:
        """Return the report as an fp64 vector on `device`."""
        # Pack flags into fp64 numbers, because a large model has thousands of parameters.
        flags = self.news, self.several, self.unsaved, self.asked, self.written
        numbers = [*pack(self.used), *pack(self.late), *map(float, flags)]
        numbers += [self.divisor, float(self.alone), *self.experts, *self.buffer_rows]
        known = [float(self.backwards), self.shares, self.options, self.calls, self.rows]
        known += [self.shown, *self.mix, self.copies, *numbers]
        return _row([*self.weights, *self.losses, self.squared_norm, *known], device)

    def start_read(self, group: Collectives) -> Callable[[], StepReport]:
        """Start copying the numbers on an accelerator to the host, in one copy.

        Returns a function that waits for the copy and returns this report with all numbers on the
        host.
        """
        numbers = [*self.weights, *self.losses, *self.mix, self.rows, self.shown, self.copies]
        far = [n for n in (*numbers, self.squared_norm) if isinstance(n, Tensor) and _is_far(n)]
        if not far:
            return lambda: self
        copy, event = start_to_host(torch.cat([number.double().reshape(-1) for number in far]))

        def finish() -> StepReport:
            group.wait_for(event)
            read = iter(copy.tolist())
            near = iter([next(read) if _is_far(number) else number for number in numbers])
            return replace(
                self,
                weights=list(islice(near, len(self.weights))),
                losses=list(islice(near, len(self.losses))),
                mix=(next(near), next(near)),
                rows=next(near),
                shown=next(near),
                copies=next(near),
                squared_norm=torch.tensor(list(read), dtype=torch.float64, device="cpu")
                if _is_far(self.squared_norm)
                else self.squared_norm,
            )

        return finish

    @property
    def is_near(self) -> bool:
        """True if no number is on an accelerator."""
        numbers = [*self.weights, *self.losses, self.squared_norm, *self.mix]
        return not any(map(_is_far, [*numbers, self.rows, self.shown, self.copies]))

    def totals_of_one(self, aggregation: Aggregation) -> StepTotals:
        """Return what `join` returns if there is only this rank, in a fraction of the time.

        All numbers must be on the host.
        """
        lowest, highest = map(float, self.mix)
        return StepTotals(
            weight=aggregation.total([list(map(float, self.weights))]),
            shown=float(self.shown),
            loss=aggregation.total([list(map(float, self.losses))]),
            squared_norm=aggregation.total_of_squares([self.squared_norm.reshape(-1).tolist()]),
            backwards=self.backwards,
            shares=self.shares,
            options=self.options,
            calls=self.calls,
            rows_differ=False,
            # A rank without numbers has an empty range (inf, -inf).
            is_mixed=(lowest < highest and not nearly_alike([lowest, highest]))
            or (self.alone and self.backwards > 1),
            copies_differ=False,
            used=list(self.used),
            late=self.late,
            news=self.news,
            several=self.several,
            unsaved=self.unsaved,
            asked=self.asked,
            written=self.written,
            divisor=self.divisor if self.divisor >= 0 else 0.0,
            experts=tuple(map(int, self.experts)),
        )

    def join(self, table: list[list[float]], aggregation: Aggregation) -> StepTotals:
        """Return the step's totals: sums, and flags set by any rank. `table` has a row per rank."""
        lengths = (
            len(self.weights),
            len(self.losses),
            self.squared_norm.numel(),
            9,
            words(len(self.used)),
            words(len(self.late)),
            7,
            len(self.experts),
            len(self.buffer_rows),
        )
        # Split the rows in the same order as `row` builds them.
        ends = list(accumulate(lengths))
        weights, losses, squares, known, used, late, flags, experts, _ = (
            [row[end - length : end] for row in table]
            for length, end in zip(lengths, ends, strict=True)
        )
        # One tuple per statistic, with a value per rank.
        counts, shares, options, calls, rows, shown, lows, highs, copies = zip(*known, strict=True)
        news, several, unsaved, asked, written, divisors, alone = zip(*flags, strict=True)
        backwards = int(sum(counts))
        # Ranks whose losses do not determine the divisor (-1) accept the other ranks' divisor.
        determined = [divisor for divisor in divisors if divisor >= 0]
        # A rank without numbers reports an empty range (inf, -inf).
        lowest, highest = min(lows), max(highs)
        return StepTotals(
            weight=aggregation.total(weights),
            shown=sum(shown),
            loss=aggregation.total(losses),
            squared_norm=aggregation.total_of_squares(squares),
            backwards=backwards,
            shares=sum(shares),
            options=_common(options),
            calls=_common(calls),
            rows_differ=not nearly_alike(rows),
            is_mixed=(lowest < highest and not nearly_alike([lowest, highest]))
            or (any(alone) and backwards > 1),
            copies_differ=len(set(copies)) > 1,
            used=any_of(used, len(self.used)),
            late=any_of(late, len(self.late)),
            news=any(news),
            several=any(several),
            unsaved=any(unsaved),
            asked=int(max(asked)),
            written=any(written),
            divisor=_common(determined) if determined else 0.0,
            experts=tuple(int(sum(column)) for column in zip(*experts, strict=True)),
        )


def _common(numbers: Sequence[float]) -> float:
    """Return the number if it is the same in all of `numbers` (one per rank), otherwise NaN."""
    return numbers[0] if len(set(numbers)) == 1 else math.nan


def _row(numbers: list[Number], device: torch.device) -> Tensor:
    """Concatenate `numbers` into an fp64 vector on `device`, with one copy from the host.

    Numbers on an accelerator are not copied to the host, which would synchronise.
    """
    near: list[float] = []
    for number in numbers:
        if not isinstance(number, Tensor):
            near.append(number)
        elif not _is_far(number):
            near += number.reshape(-1).tolist()
    sent = to_device(torch.tensor(near, dtype=torch.float64), device)
    far = [n.double().reshape(-1) for n in numbers if isinstance(n, Tensor) and _is_far(n)]
    if not far:
        return sent
    # Interleave runs of numbers from the two vectors, in the original order.
    sources, ends, parts = {True: torch.cat(far).to(device), False: sent}, [0, 0], []
    for is_far, run in groupby(numbers, key=_is_far):
        first = ends[is_far]
        ends[is_far] += sum(n.numel() if isinstance(n, Tensor) else 1 for n in run)
        parts.append(sources[is_far][first : ends[is_far]])
    return torch.cat(parts)


def _is_far(number: Number) -> bool:
    """Return whether reading `number` would synchronise the host with a device."""
    return isinstance(number, Tensor) and number.device.type != "cpu"
