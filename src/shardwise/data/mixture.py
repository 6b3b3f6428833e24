"""Draws an epoch from several datasets with fixed weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, IterableDataset

from shardwise.data import order
from shardwise.errors import DataError
from shardwise.world.randomness import seed_from


class Mixture(ConcatDataset[Any]):
    """Draws from several map-style datasets, in proportion to their weights.

    Pass it to `sw.Loader` as the dataset. The number of samples that an epoch draws from each
    dataset is fixed: its weight times `samples`, rounded so that the sum is `samples`. A dataset is
    drawn without replacement: a sample is used again only after all others have been used, in the
    same epoch or in a later one. So small datasets are repeated, and large ones are continued in
    the next epoch.

    With shuffle=True, the Loader shuffles the order of each epoch and each pass over a dataset.
    Otherwise every dataset is read in its own order, and its samples are spread evenly over the
    epoch. In both cases the order depends only on (seed, epoch, lengths, weights, samples). A run
    that is resumed in the middle of an epoch therefore gets the remaining samples, whatever the
    number of workers.

    An index of a Mixture is an index into the concatenated datasets, as in a ConcatDataset, and
    `len` is the sum of their lengths.

    Args:
        datasets: Maps the name of each dataset to the dataset.
        weights: Maps the same names to positive numbers. Only their ratios matter.
        samples: Number of samples in an epoch. Default: the sum of the lengths.

    Raises:
        DataError: If names differ, a weight is invalid, or a dataset is a stream, is empty, or
            would contribute no sample.

    Example:
        ```python
        mixture = sw.Mixture({"web": web, "code": code}, {"web": 0.7, "code": 0.3}, samples=100_000)
        loader = sw.Loader(mixture, batch_size=256, shuffle=True)
        ```
    """

    def __init__(
        self,
        datasets: Mapping[str, Any],
        weights: Mapping[str, float],
        samples: int | None = None,
    ) -> None:
        if datasets.keys() != weights.keys() or not datasets:
            raise DataError(
                f"A Mixture needs one weight per dataset, but the datasets are {sorted(datasets)} "
                f"and the weights are of {sorted(weights)}."
            )
        for name, dataset in datasets.items():
            is_map = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
            if isinstance(dataset, IterableDataset) or not is_map:
                raise DataError(
                    f"The dataset {name} is a {type(dataset).__name__}, which is not map-style: a "
                    "Mixture needs __getitem__ and __len__, to continue after a resume."
                )
            if len(dataset) == 0:
                raise DataError(f"The dataset {name} has length 0: check its path or filter.")
            weight = weights[name]
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not is_number or not 0 < weight < float("inf"):
                raise DataError(f"The weight of {name} must be a number above 0, not {weight!r}.")
        super().__init__(list(datasets.values()))
        self.names = list(datasets)
        if samples is None:
            samples = self.cumulative_sizes[-1]
        if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
            raise DataError(f"samples must be an integer of 1 or more, not {samples!r}.")
        self.samples = samples
        self.weights = [float(weights[name]) for name in self.names]
        self.counts = _apportion(self.weights, samples)
        for name, count in zip(self.names, self.counts, strict=True):
            if count == 0:
                raise DataError(
                    f"The weight of {name} is so small that an epoch of {samples} samples has no "
                    "sample of it: write a larger samples=, or leave the dataset out."
                )

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
        """Return the indices of `epoch` for all ranks, an int64 tensor of shape (samples,)."""
        parts, places = [], []
        starts = [0, *self.cumulative_sizes[:-1]]
        for name, count, start, end in zip(
            self.names, self.counts, starts, self.cumulative_sizes, strict=True
        ):
            length = end - start
            # Number the draws from this dataset through all epochs. Each pass of `length` draws
            # uses every sample once.
            first, last = epoch * count, (epoch + 1) * count
            own_seed = seed_from(seed, "mixture", name)
            for number in range(first // length, -(-last // length)):
                whole = order.epoch_order(own_seed, number, length, shuffle=shuffle)
                before = number * length
                rows = max(first - before, 0), min(last - before, length)
                parts.append(torch.as_tensor(order.indices(whole, rows)) + start)
            places.append((torch.arange(count, dtype=torch.float64) + 0.5) / count)
        drawn = torch.cat(parts)
        if shuffle:
            turns = order.epoch_order(seed, epoch, self.samples, shuffle=True)
            assert isinstance(turns, Tensor)
            return drawn[turns]
        # Stable, so that ties have the same order on every machine.
        return drawn[torch.sort(torch.cat(places), stable=True).indices]


def _apportion(weights: list[float], samples: int) -> list[int]:
    """Return integers proportional to `weights` that sum to `samples` (largest remainders)."""
    total = sum(weights)
    shares = [weight / total * samples for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda at: (counts[at] - shares[at], at))
    for at in by_remainder[: samples - sum(counts)]:
        counts[at] += 1
    return counts
