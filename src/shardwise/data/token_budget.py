"""Ends steps by a token budget, and balances the samples of a step across ranks.

    lengths, in the epoch's order    5 3 9 2 4 8 1
    steps of at most 17 tokens       5 3 9 | 2 4 8 1       a function of (seed, epoch, lengths)
    shares of 2 ranks                9 , 5 3 | 8 , 4 2 1   longest first, to the least loaded rank
    micro-batches of at most 9       9 ; . , 5 ; 3 | ...   padded; the same number on every rank

Only shares and micro-batches depend on the number of ranks, so a run has the same steps at any
world size.
"""

from __future__ import annotations

import hashlib
import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from shardwise.data import order
from shardwise.data.batch_schedule import (
    BatchSchedule,
    check_same_dataset,
    comparison_group,
    epoch_order,
)
from shardwise.data.length_cache import LengthCache
from shardwise.data.packing.packing import Packing
from shardwise.data.packing.rows import close_steps as close_packed_steps
from shardwise.data.packing.rows import pack_rows
from shardwise.data.source import MicroBatch
from shardwise.errors import DataError
from shardwise.layout.bucket_layout import even_cuts
from shardwise.layout.sum_tree import MicroShards
from shardwise.world.generator_states import preserved
from shardwise.world.world import World

T = TypeVar("T")

REPORT_SECONDS = 5.0
"""Seconds between two reports of the number of lengths that have been read."""


@dataclass
class TokenBudget:
    """The token budget of a step, and the sample lengths once they have been read.

    The Loader reuses this object when it recreates its reader, so that lengths are read only once.
    """

    tokens: int
    length: Callable[[Any], int] | Sequence[int]
    micro_batch_tokens: int | None = None
    cost: Callable[[int], float] | None = None
    """Returns the work for a sample of a given length. Default: the length itself."""
    packing: Packing | None = None
    """How documents share rows, or None if samples are padded."""
    cache: str | Path | None = None
    """File that stores the lengths for later runs."""
    lengths: list[int] | None = field(default=None, repr=False)

    @property
    def most(self) -> int:
        """Maximum number of tokens in one sample."""
        row = self.tokens if self.packing is None else self.packing.row
        return min(self.tokens, self.micro_batch_tokens or self.tokens, row)

    def close(self, indices: Iterable[int]) -> Iterator[Sequence[int]]:
        """Yield the steps: consecutive `indices` that fit into the budget."""
        assert self.lengths is not None
        if self.packing is None:
            return close_steps(indices, self.lengths, self.tokens)
        row = self.packing.row
        return close_packed_steps(indices, self.lengths, row, self.tokens // row)

    def rows_of(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the items in each packed row of a step whose samples have these `lengths`."""
        assert self.packing is not None
        return pack_rows(lengths, self.packing.row, self.tokens // self.packing.row)

    def read(self, dataset: Any, world: World) -> list[int]:
        """Return the length of every sample. Collective on the first call.

        Raises:
            DataError: On all ranks, if a length is invalid or exceeds the budget.
        """
        if self.lengths is not None:
            return self.lengths
        check_same_dataset(world, dataset)
        lengths: list[Any] | None
        if callable(self.length):
            lengths = self._cached(dataset, world)
            is_new = lengths is None
            if lengths is None:
                lengths = self._called(dataset, self.length, world)
        else:
            is_new = False
            lengths = [_as_int(value) for value in self.length]
            if len(lengths) != len(dataset):
                raise DataError(
                    f"length= holds {len(lengths)} lengths, but the dataset has {len(dataset)} "
                    "samples: pass one length per sample, in the order of the dataset."
                )
        self._check_agreement(lengths, world)
        self._check(lengths)
        if is_new:
            self._keep(dataset, lengths, world)
        self.lengths = lengths
        return lengths

    def _called(self, dataset: Any, length: Callable[[Any], int], world: World) -> list[Any]:
        """Return `length(sample)` for every sample. Collective."""
        # Each rank reads a part of the dataset, because reading may include tokenization.
        group = comparison_group(world)
        cuts = even_cuts(len(dataset), group.size)
        part = range(cuts[group.rank], cuts[group.rank + 1])

        def read() -> list[Any]:
            return list(_lengths_of(dataset, part, length, world))

        parts = _gathered(read, f"length(sample) failed on the samples {part}", world)
        return [each for part in parts for each in part]

    def _cached(self, dataset: Any, world: World) -> list[int] | None:
        """Return the lengths in the first rank's file, or None if it has none. Collective."""
        cache = self._file_of(dataset)
        is_first = is_first_rank(world)

        def load() -> tuple[bool, list[int] | None]:
            # The dataset may draw random numbers, which must not affect the training loop.
            with preserved():
                return cache is not None, cache.load() if cache and is_first else None

        answers = _gathered(load, "length(sample) failed", world)
        if len({has_cache for has_cache, _ in answers}) > 1:
            raise DataError("Pass the same length_cache on every rank: some ranks have none.")
        lengths = answers[0][1]
        if lengths is None and cache is not None and cache.file.exists():
            world.say_once(
                f"the lengths in {cache.file} are of another dataset, or length has changed: they "
                "are read again"
            )
        return lengths

    def _file_of(self, dataset: Any) -> LengthCache | None:
        if self.cache is None or not callable(self.length):
            return None
        return LengthCache(self.cache, dataset, self.length)

    def _keep(self, dataset: Any, lengths: list[int], world: World) -> None:
        """Write the lengths to the file on the first rank. Collective if there is a cache."""
        if (cache := self._file_of(dataset)) is None:
            return
        is_first = is_first_rank(world)

        def save() -> None:
            with preserved():
                if is_first:
                    cache.save(lengths)

        _gathered(save, "length(sample) failed", world)

    def _check_agreement(self, lengths: Sequence[Any], world: World) -> None:
        """Raise DataError on all ranks if the ranks' steps would differ. Collective."""
        if world.size == 1:
            return
        digests = [
            hashlib.blake2b(repr(values).encode(), digest_size=16).hexdigest()
            for values in (lengths, self._works_of(lengths))
        ]
        answers = comparison_group(world).gather_objects(
            (self.tokens, self.micro_batch_tokens, *digests, self.packing and self.packing.row)
        )
        for rank, theirs in enumerate(answers):
            if theirs != answers[0]:
                raise DataError(
                    f"Rank 0 has tokens={answers[0][0]} and micro_batch_tokens={answers[0][1]}, "
                    f"rank {rank} has {theirs[0]} and {theirs[1]}"
                    f"{', and other lengths' if theirs[2] != answers[0][2] else ''}"
                    f"{', and other costs' if theirs[3] != answers[0][3] else ''}"
                    f"{', and rows of another length' if theirs[4] != answers[0][4] else ''}. Pass "
                    "the same budget, lengths, cost and rows on every rank."
                )

    def _works_of(self, lengths: Sequence[Any]) -> list[Any]:
        """Return the work for each distinct length, or the error raised while computing it."""
        try:
            return [self.work(length) for length in sorted(set(lengths))]
        except Exception as error:  # `_check` reports it, after the ranks have compared theirs
            return [repr(error)]

    def _check(self, lengths: Sequence[Any]) -> None:
        for index, length in enumerate(lengths):
            if not isinstance(length, int) or isinstance(length, bool) or length < 1:
                raise DataError(
                    f"The length of sample {index} is {length!r}. A length is an integer of 1 "
                    "or more: remove empty samples from the dataset."
                )
            if length > self.most:
                name, value = "tokens", self.most
                if self.packing is not None:
                    name = "row"
                elif self.most < self.tokens:
                    name = "micro_batch_tokens"
                raise DataError(
                    f"Sample {index} has {length} tokens, which is more than {name}={value}: "
                    f"shorten the sample in the dataset, or pass {name}={length} or more."
                )
        for length in set(lengths) if self.cost is not None else ():
            if not self.work(length) > 0:
                raise DataError(
                    f"cost({length}) is {self.work(length)!r}: return a number above 0 for every "
                    "length."
                )

    def work(self, length: int) -> float:
        return float(length) if self.cost is None else self.cost(length)


class ByTokens(BatchSchedule):
    """A schedule whose steps end before their samples exceed a token budget.

    `epoch_length` is always None. Positions therefore also store the number of steps, which cannot
    be computed from the number of samples.
    """

    def __init__(self, dataset: Any, budget: TokenBudget, *, world: World, shuffle: bool) -> None:
        self._dataset, self._budget, self._world = dataset, budget, world
        self._seed, self._shuffle = world.seed, shuffle

    def batches(self, epoch: int, offset: int) -> Iterator[Sequence[int]]:
        self._budget.read(self._dataset, self._world)
        whole = epoch_order(self._dataset, self._seed, epoch, shuffle=self._shuffle)
        # A step starts with an empty budget, so the steps after `offset` do not depend on earlier
        # ones, and a resumed epoch has the same steps.
        rest = order.indices(whole, (offset, len(whole)))
        return self._budget.close(rest)


def close_steps(
    indices: Iterable[int], lengths: Sequence[int], tokens: int
) -> Iterator[Sequence[int]]:
    """Yield the steps: consecutive `indices` whose lengths sum to at most `tokens`."""
    step: list[int] = []
    used = 0
    for index in indices:
        if step and used + lengths[index] > tokens:
            yield step
            step, used = [], 0
        step.append(index)
        used += lengths[index]
    if step:
        yield step


def balance(works: Sequence[float], bins: int, *, same_number: bool = False) -> list[list[int]]:
    """Distribute items over `bins` so that the largest sum of work is small.

    Adds the items, largest first, to the bin with the least work so far (LPT, Graham 1969: at most
    4/3 of the optimum). Ties are resolved in favour of the earlier item and the lower bin. If
    `same_number` is true, the numbers of items in two bins differ by at most 1.

    Returns:
        The item numbers in each bin, in increasing order.
    """
    loads = [(0.0, number) for number in range(bins)]  # a heap
    members: list[list[int]] = [[] for _ in range(bins)]
    filled: list[tuple[float, int]] = []  # with `same_number`: bins that have an item of this turn
    for item in sorted(range(len(works)), key=lambda item: (-works[item], item)):
        load, least = heapq.heappop(loads)
        members[least].append(item)
        filled.append((load + works[item], least))
        if not same_number or not loads:
            for entry in filled:
                heapq.heappush(loads, entry)
            filled = []
    return [sorted(items) for items in members]


def split_share(items: Sequence[int], lengths: Sequence[int], most: int | None) -> list[list[int]]:
    """Split a rank's share into micro-batches of at most `most` padded tokens.

    `lengths` covers all items of the step. Because padding extends every row to the length of the
    longest, the items are split from the longest to the shortest.
    """
    if most is None or not items:
        return [list(items)]
    micros: list[list[int]] = []
    for item in sorted(items, key=lambda item: (-lengths[item], item)):
        # The first item of a micro-batch is its longest.
        if not micros or (len(micros[-1]) + 1) * lengths[micros[-1][0]] > most:
            micros.append([])
        micros[-1].append(item)
    return micros


def extend_share(micros: list[list[int]], count: int) -> list[list[int]]:
    """Halve micro-batches until there are `count`. Add empty ones if none can be halved."""
    micros = [list(micro) for micro in micros]
    while len(micros) < count:
        largest = max(range(len(micros)), key=lambda number: len(micros[number]))
        items = micros[largest]
        if len(items) < 2:
            micros += [[] for _ in range(count - len(micros))]
            break
        # Both halves remain next to each other, so that all ranks run long micro-batches first.
        half = -(-len(items) // 2)
        micros[largest : largest + 1] = [items[:half], items[half:]]
    return micros


@dataclass(frozen=True)
class BudgetCut:
    """Splits each step for one rank: balanced shares, or the balanced micro-shards of `--exact`."""

    budget: TokenBudget
    size: int
    rank: int
    shards: MicroShards | None

    def turns(self, step: Sequence[int]) -> list[list[list[int]]]:
        """Return the dataset indices in each micro-batch of each rank.

        Args:
            step: The dataset indices of a step.

        Returns:
            Dataset indices, indexed as `result[turn][rank]`.
        """
        assert self.budget.lengths is not None
        lengths = [self.budget.lengths[index] for index in step]
        works = [self.budget.work(length) for length in lengths]
        if self.shards is not None:
            # Micro-shards depend on their number and never on the world size: the leaves of the
            # sum tree must be the same at every world size.
            leaves = balance(works, self.shards.count)
            width = self.shards.workers
            turns = [leaves[first : first + width] for first in range(0, len(leaves), width)]
        else:
            most = self.budget.micro_batch_tokens
            shares = [split_share(items, lengths, most) for items in balance(works, self.size)]
            # All ranks reduce gradients in each micro-batch, so all run the same number.
            count = max(map(len, shares))
            shares = [extend_share(share, count) for share in shares]
            turns = [[share[turn] for share in shares] for turn in range(count)]
        return [[[step[item] for item in sorted(items)] for items in turn] for turn in turns]

    def micro_batches(self, steps: Iterable[Sequence[int]], epoch: int) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of `steps`.

        The shortest sample of a step is the stand-in for a rank without samples.
        """
        own = self.rank if self.shards is None else self.shards.rank
        lengths = self.budget.lengths
        assert lengths is not None
        for step in steps:
            turns, stand_in = self.turns(step), self._stand_in(step)
            for part, ranks in enumerate(turns):
                mine = ranks[own]
                used = mine or stand_in
                yield MicroBatch(
                    epoch=epoch,
                    part=part,
                    parts=len(turns),
                    total=len(step),
                    samples=len(mine),
                    whole=sum(map(len, ranks)),
                    # Shares are not contiguous, so this rank has no range of rows.
                    place=None,
                    indices=tuple(used),
                    all_have=all(ranks),
                    tokens=sum(lengths[index] for indices in ranks for index in indices),
                    positions=sum(
                        len(indices) * max(lengths[index] for index in indices)
                        for indices in (each or stand_in for each in ranks)
                    ),
                )

    def _stand_in(self, step: Sequence[int]) -> list[int]:
        lengths = self.budget.lengths
        assert lengths is not None
        shortest = min(step, key=lambda index: lengths[index])
        # Two rows for BatchNorm, like any other stand-in, if the budget allows them.
        most = self.budget.micro_batch_tokens
        return [shortest] * (1 if most is not None and 2 * lengths[shortest] > most else 2)


def is_first_rank(world: World) -> bool:
    """Return whether this rank is the first of the ranks that compare their data."""
    return world.size == 1 or comparison_group(world).rank == 0


def _gathered(read: Callable[[], T], failure: str, world: World) -> list[T]:
    """Return all ranks' results of `read`. Raises DataError on all ranks if any of them failed."""
    mine: T | DataError
    try:
        mine = read()
    except DataError as error:
        mine = error
    except Exception as error:
        # The other ranks wait in the gather, so send them the error instead of raising.
        mine = DataError(f"{failure}: {error!r}")
    answers: list[T | DataError] = (
        [mine] if world.size == 1 else comparison_group(world).gather_objects(mine)
    )
    results: list[T] = []
    for answer in answers:
        if isinstance(answer, DataError):
            raise answer
        results.append(answer)
    return results


def _lengths_of(
    dataset: Any, part: range, length: Callable[[Any], int], world: World
) -> Iterator[Any]:
    reported = time.monotonic()
    # The dataset may draw random numbers, which must not affect the training loop.
    with preserved():
        for index in part:
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                world.print(
                    f"shardwise: reading lengths: {index - part.start:,} of {len(part):,} samples "
                    "on worker 0"
                )
            yield _as_int(length(dataset[index]))


def _as_int(value: Any) -> Any:
    """Return `value` as an int if it is a NumPy integer or an integer tensor, else unchanged."""
    is_index = hasattr(value, "__index__") and not isinstance(value, bool)
    return value.__index__() if is_index else value
