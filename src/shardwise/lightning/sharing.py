"""Shares loaders out: training data in its order, an evaluation with every sample once.

Lightning's sampler repeats samples until every rank has as many:

    5 samples, 2 ranks, batches of 2    Lightning  0 2 | 4    and  1 3 | 0
                                        here       0 2 | 4    and  1 3
    with batches of 1                   Lightning  0 | 2 | 4  and  1 | 3 | 0
                                        here       0 | 2 4    and  1 | 3

The rank with one sample more has a longer last batch, where it would have a batch more than the
others: so ranks make as many forwards, and a collective in a step meets its like.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
)


class Marked(int):
    """The number of workers, given to Lightning for its samplers: by it they are told apart from
    those that the script has made itself."""


def share_in_order(connector: Any, workers: int) -> None:
    """Let `connector`, which puts samplers into the loaders of a Trainer, keep their order.

    Lightning shuffles every loader that it shares out to train on. Here only `shuffle=True`
    shuffles: a sampler of the script, such as a curriculum, gives the order, as in one process.
    With one worker there is nothing to share out, and loaders stay as they are.
    """
    needed, resolve = connector._requires_distributed_sampler, connector._resolve_sampler
    if "_resolve_sampler" in vars(connector):
        return

    def resolve_in_order(dataloader: Any, shuffle: bool, mode: Any = None) -> Any:
        shuffle = shuffle and isinstance(dataloader.sampler, RandomSampler)
        with warnings.catch_warnings():
            # Lightning warns of samples that count twice, which `count_once` sees to.
            warnings.filterwarnings("ignore", message="Using `DistributedSampler`")
            return resolve(dataloader, shuffle=shuffle, mode=mode)

    connector._requires_distributed_sampler = lambda loader: workers > 1 and needed(loader)
    connector._resolve_sampler = resolve_in_order


def count_once(loader: Any) -> Any:
    """`loader`, of an evaluation, with every sample once, where Lightning has shared it out."""
    sampler = getattr(loader, "sampler", None)
    batches = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or not isinstance(sampler, DistributedSampler):
        return loader
    total = len(sampler.dataset)  # type: ignore[arg-type]
    fits = total % sampler.num_replicas == 0
    if not isinstance(sampler.num_replicas, Marked) or type(batches) is not BatchSampler or fits:
        return loader
    if batches.drop_last or total < sampler.num_replicas:
        return loader  # a rank without a sample would make no forward: one is repeated there
    shared = EvenBatches(sampler, batches.batch_size, total)
    # DataLoader refuses the change of what it was made with; it has begun nothing yet.
    object.__setattr__(loader, "batch_sampler", shared)
    return loader


class EvenBatches(BatchSampler):
    """This rank's share of `total` samples, without those that `sampler` repeats, in batches of
    `batch_size`; the last one may have one more."""

    def __init__(self, sampler: DistributedSampler[Any], batch_size: int, total: int) -> None:
        super().__init__(sampler, batch_size, drop_last=False)
        self._count = own_share(sampler)
        self._batches = -(-(total // sampler.num_replicas) // batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        rows = list(self.sampler)[: self._count]
        for number in range(self._batches):
            last = number == self._batches - 1
            start = number * self.batch_size
            yield rows[start:] if last else rows[start : start + self.batch_size]

    def __len__(self) -> int:
        return int(self._batches)


def own_share(sampler: DistributedSampler[Any]) -> int:
    """How many of the rows that `sampler` gives its rank are no repetitions: the first ones."""
    total = len(sampler.dataset)  # type: ignore[arg-type]
    return len(range(sampler.rank, total, sampler.num_replicas))
