"""`hvd.elastic.ElasticSampler`: what is left of an epoch, over however many ranks there are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from itertools import cycle, islice
from typing import Any

from torch.utils.data import Sampler

from shardwise.horovod.context import current


class ElasticSampler(Sampler[int]):
    """The indices of `dataset` that this rank reads of the present epoch.

    All ranks shuffle alike, by (seed, epoch), and take turns. `record_batch` counts what all have
    read of it; after a restart the rest is shared among the ranks that there are then. The last
    turn is filled with indices of that rest, so that all ranks have as many.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Go on to an epoch; call it at the end of the one before, not at the beginning."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Mind that every rank has read a batch of `batch_size` samples."""
        del batch_idx  # Horovod's interface has it
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many samples all ranks have read of it."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there, with the ranks that there are now."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share what is left among the ranks that there are now."""
        world = current().world
        self.rank, self.num_replicas = world.rank, world.size
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        rest = indices[self.processed_num :]
        missing = -len(rest) % self.num_replicas
        filled = [*rest, *islice(cycle(rest), missing)]
        self.indices = filled[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)
