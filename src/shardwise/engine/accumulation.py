"""What one step has seen so far: the weights and losses between one `step()` and the next."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate, groupby

import torch
from torch import Tensor

from shardwise.current_batch import Batch
from shardwise.engine.exact_mean import Share
from shardwise.engine.step_statistics import Number, Parts
from shardwise.errors import UsageError
from shardwise.tiers.copy_stream import to_device


@dataclass
class Window:
    """This rank's backwards since the last step: by backward the items that it counts, its loss x
    factor, and its samples. Numbers stay on the device where that is a GPU."""

    weights: list[Number] = field(default_factory=list)
    losses: list[Number] = field(default_factory=list)
    indices: list[tuple[int, ...]] = field(default_factory=list)
    divisor: float = 0.0
    """What the added losses are divided by; 0 where they are means: by the items."""
    stepping: bool = False
    """Whether the step has begun; it stays so where the step fails."""
    _seen: list[_Seen] = field(default_factory=list)

    def clear(self) -> None:
        """The step is over, or forgotten: begin anew."""
        self.weights, self.losses, self.indices, self._seen = [], [], [], []
        self.divisor, self.stepping = 0.0, False

    @property
    def backwards(self) -> int:
        return len(self.weights)

    @property
    def weighty(self) -> int:
        """Backwards whose weight is not known to be 0."""
        return sum(isinstance(weight, Tensor) or weight != 0 for weight in self.weights)

    def is_again(
        self, share: Share, batch: Batch | None, *, given: bool, same_items: bool | None
    ) -> bool:
        """Whether a loss is of items that an earlier backward of this step has counted: losses of
        the same items add up, those of other items are averaged by their numbers.

        Unless `same_items` says it, losses of one batch are of the same items, as in plain PyTorch,
        where the batch tells their number. Raises UsageError where a weight was `given` for one
        of them, since they may as well be of parts of it, and for items of another number.
        """
        if same_items is False or (not isinstance(share.items, Tensor) and share.items == 0):
            return False
        earlier = [seen for seen in self._seen if batch is not None and seen.batch is batch]
        if same_items is None:
            if earlier and (given or earlier[-1].given):
                raise UsageError(
                    "A second engine.backward of one batch with weight=: say whether this loss is "
                    "of the same items as the one before, so that the two add up "
                    "(same_items=True), or of other items of the batch, so that they are averaged "
                    "by weight (same_items=False). Adding the losses before one engine.backward "
                    "needs neither."
                )
            return bool(earlier)
        if not self._seen:
            raise UsageError(
                "same_items=True is for a further loss of items that an earlier engine.backward "
                "of this step has counted, and this is the first one: leave it out here."
            )
        before = (earlier or self._seen)[-1].items
        if not self.divisor and float(share.items) != float(before):
            raise UsageError(
                f"same_items=True, but this loss is a mean over {float(share.items):g} items and "
                f"the one before over {float(before):g}. Means over other numbers cannot be added "
                "beside each other: divide both by totals over all workers (world.sum) yourself, "
                'and write engine.backward(loss, reduction="sum").'
            )
        return True

    def check_reduction(self, divisor: float) -> None:
        """Raise UsageError where earlier losses of the step were reduced in another way."""
        if self.backwards and divisor != self.divisor:
            raise UsageError(
                'One step has losses that are sums (reduction="sum" or "ddp") and losses that are '
                "means, or both kinds of sums, which are divided by different numbers: add them to "
                "one loss before engine.backward, or write all in one way."
            )

    def add(
        self, loss: Tensor, share: Share, batch: Batch | None, *, given: bool, again: bool
    ) -> None:
        """Count one backward of `loss`, of `batch`; its items do not count `again`."""
        self.indices.append(() if batch is None else batch.indices)
        self.weights.append(0.0 if again else share.items)
        self.losses.append(_weighted(loss, share.factor))
        self._seen.append(_Seen(batch, share.items, given))


@dataclass(frozen=True)
class _Seen:
    """One backward: of which batch, of how many items, and whether the user gave their number."""

    batch: Batch | None
    items: Number
    given: bool


def _weighted(loss: Tensor, weight: Number) -> Number:
    """`loss` x `weight` (a factor); zero where that is, whatever the loss."""
    if not isinstance(weight, Tensor) and weight == 0:
        return 0.0
    value = loss.detach().double()
    if isinstance(weight, Tensor):
        value = value.to(weight.device)
        return torch.where(weight == 0, 0.0, value * weight)
    return weight * (value.item() if value.device.type == "cpu" else value)


@dataclass(frozen=True)
class StepStats:
    """What a step did, over all workers. Plain numbers, alike on all ranks.

    `loss` is the mean over all items of all workers and micro-batches, or their sum where the
    losses were sums (with reduction="ddp" the mean of the workers' sums); `weight` is the number of
    items, `grad_norm` the global 2-norm of the gradient before clipping. `skipped` when nothing was
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

    | weights | losses x factor | squared norm | backwards | options | used, packed | late,
    packed | news | several | unsaved | asked | written | divisor |

    How many numbers the first three are is a matter of the step's parts. `backwards` leaves out
    those of weight 0. `options` is a checksum of the optimizers' options; joined it is NaN where
    ranks differ. `used` is by parameter: it had a gradient. `late` is by bucket: a gradient came
    after the bucket had started. `news`: a buffer was seen to change for the first time. `several`:
    there was more than one backward. `unsaved`: a save in the background has failed. `asked`: the
    signal that asked this rank to end, or 0; of all ranks the highest. `written`: user code has
    written into parameters. `divisor`: what the added losses are divided by, 0 for means.
    """

    weights: list[Number]
    losses: list[Number]
    squared_norm: Tensor
    backwards: int
    options: float
    used: list[bool]
    late: list[bool]
    news: bool
    several: bool
    unsaved: bool
    asked: int
    written: bool
    divisor: float

    def row(self, device: torch.device) -> Tensor:
        """The vector, on `device`. Numbers of an accelerator move together, or stay there."""
        told = self.news, self.several, self.unsaved, self.asked, self.written, self.divisor
        flags = [*_packed(self.used), *_packed(self.late), *map(float, told)]
        known = [float(self.backwards), self.options, *flags]
        return _row([*self.weights, *self.losses, self.squared_norm, *known], device)

    def join(self, table: list[list[float]], parts: Parts) -> Totals:
        """The sums, and the flags that any rank set; `table` has one row of each rank."""
        lengths = (
            len(self.weights),
            len(self.losses),
            self.squared_norm.numel(),
            2,
            _words(self.used),
            _words(self.late),
            6,
        )
        ends = list(accumulate(lengths))
        weights, losses, squares, known, used, late, flags = (
            [row[end - length : end] for row in table]
            for length, end in zip(lengths, ends, strict=True)
        )
        return Totals(
            weight=parts.joined(weights),
            loss=parts.joined(losses),
            squared_norm=parts.joined_squares(squares),
            backwards=int(sum(backwards for backwards, _ in known)),
            options=known[0][1] if len({options for _, options in known}) == 1 else math.nan,
            used=_any_of(used, len(self.used)),
            late=_any_of(late, len(self.late)),
            news=any(row[0] for row in flags),
            several=any(row[1] for row in flags),
            unsaved=any(row[2] for row in flags),
            asked=int(max(row[3] for row in flags)),
            written=any(row[4] for row in flags),
            divisor=flags[0][5] if len({row[5] for row in flags}) == 1 else math.nan,
        )


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What all ranks know of a step after its exchange, alike.

    `weight` and `loss` (x weight) are sums over the ranks, `squared_norm` that of the summed
    gradients. `backwards` is the number of those that had a weight, `options` the checksum of the
    optimizers' options, NaN where ranks differ. `used` says by parameter whether any rank had a
    gradient for it, `late` by bucket whether any came after it had started; `news` whether a buffer
    was seen to change for the first time, `several` whether any rank made more than one backward,
    `unsaved` whether a save in the background has failed. `asked` is the signal that asked any to
    end, or 0. `written` says whether user code has written into parameters of any rank, `divisor`
    what the added losses are divided by, 0 for means: NaN where ranks differ.
    """

    weight: float
    loss: float
    squared_norm: float
    backwards: int
    options: float
    used: list[bool]
    late: list[bool]
    news: bool
    several: bool
    unsaved: bool
    asked: int
    written: bool
    divisor: float

    @property
    def denominator(self) -> float:
        """What the added losses and gradients are divided by."""
        return self.divisor or self.weight

    @property
    def alike(self) -> bool:
        """Whether the optimizers' options are."""
        return not math.isnan(self.options)


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
