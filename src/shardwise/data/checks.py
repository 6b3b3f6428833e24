"""Validates the arguments of a Loader. Each mistake has its own error message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DistributedSampler, IterableDataset

from shardwise.data.batch_cuts import BatchCut, MicroShardCut, ShareCut
from shardwise.data.batch_schedule import samples_per_epoch
from shardwise.data.token_budget import TokenBudget
from shardwise.errors import DataError
from shardwise.layout.sum_tree import MicroShards
from shardwise.messages.printable import many

SHARDINGS = ("auto", "slice", "dataset")


class UnknownLength(DataError, TypeError):
    """Raised by `len` of a Loader over a stream of unknown length.

    It is also a TypeError, because `list(loader)` calls `len` and ignores only a TypeError.
    """


@dataclass(frozen=True, kw_only=True)
class LoaderArguments:
    """The arguments of a Loader that determine its batches, and the number of ranks, `size`."""

    dataset: Any
    batch_size: int | None
    shuffle: bool
    drop_last: bool
    sampler: Any
    batch_sampler: Any
    sharding: str
    micro_batch_size: int | None
    shards: MicroShards | None
    seed_samples: bool | None
    collate_fn: Callable[[list[Any]], Any] | None
    size: int
    rank: int
    budget: TokenBudget | None = None
    compared: set[int] = field(default_factory=set)
    """The admissions after which the ranks have compared their datasets."""

    @property
    def cut(self) -> BatchCut:
        """The object that splits global batches into this rank's micro-batches."""
        if self.shards is not None:
            return MicroShardCut(self.shards)
        return ShareCut(self.size, self.rank, self.micro_batch_size, self.batch_size)

    @property
    def stream(self) -> bool:
        """True if the dataset is iterable rather than map-style."""
        return isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__getitem__")

    def check(self) -> None:
        """Raise DataError if arguments are invalid or incompatible with each other."""
        if self.budget is not None:
            self._check_budget(self.budget)
        elif self.batch_sampler is None:
            self._check_batch_size()
        else:
            self._check_batch_sampler()
        if self.sharding not in SHARDINGS:
            raise DataError(
                f"sharding must be one of {', '.join(SHARDINGS)}, not {self.sharding!r}."
            )
        if self.stream:
            self._check_stream()
        else:
            self._check_map_style()

    def _check_batch_size(self) -> None:
        size = self.batch_size
        if size is None:
            raise DataError(
                "A Loader needs batch_size, the TOTAL batch of all workers, or a batch_sampler, or "
                "tokens and length."
            )
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise DataError(f"batch_size must be an integer of 1 or more, not {size!r}.")
        if size < self.size:
            raise DataError(
                f"batch_size={size} is the TOTAL batch and cannot be shared by {self.size} "
                f"workers. Make it {self.size} or more, or start at most {many(size, 'worker')}."
            )
        if self.shards is not None and size < self.shards.count:
            raise DataError(
                f"batch_size={size} cannot be cut into the {self.shards.count} micro-shards of "
                f"--exact {self.shards.count}. Make it {self.shards.count} or more, or use a "
                "smaller --exact."
            )

    def _check_budget(self, budget: TokenBudget) -> None:
        others = {
            "batch_size": self.batch_size is not None,
            "sampler": self.sampler is not None,
            "batch_sampler": self.batch_sampler is not None,
            "drop_last": self.drop_last,
        }
        _refuse_together("tokens", others)
        for name, value in (
            ("tokens", budget.tokens),
            ("micro_batch_tokens", budget.micro_batch_tokens),
        ):
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise DataError(f"{name} must be an integer of 1 or more, not {value!r}.")
        if budget.packing is not None:
            self._check_packing(budget, budget.packing.row)
        if not callable(budget.length) and not hasattr(budget.length, "__len__"):
            raise DataError(
                f"length must be a function of a sample or one length per sample, not "
                f"{budget.length!r}: write length=lambda sample: len(sample['input_ids'])."
            )
        if self.stream:
            raise DataError(
                f"tokens needs a map-style dataset, but {type(self.dataset).__name__} is iterable, "
                "and its lengths are unknown before it is read: pass batch_size."
            )
        if self.micro_batch_size is not None:
            raise DataError(
                f"micro_batch_size={self.micro_batch_size} counts rows, but tokens closes steps by "
                "their tokens: leave it out and write micro_batch_tokens=M in the Loader."
            )
        if self.shards is not None and budget.micro_batch_tokens is not None:
            raise DataError(
                f"micro_batch_tokens cannot be combined with --exact {self.shards.count}, whose "
                "micro-shards are the micro-batches: leave it out, or pass --exact a larger number."
            )

    def _check_packing(self, budget: TokenBudget, row: int) -> None:
        if self.collate_fn is not None:
            raise DataError(
                "pack builds the batches, so collate_fn cannot be combined with it: leave it out, "
                "and change samples in the dataset."
            )
        if budget.tokens % row:
            raise DataError(
                f"tokens={budget.tokens} is not a multiple of row={row}, so a step cannot consist "
                f"of full rows: write tokens={max(budget.tokens // row, 1) * row}."
            )
        if budget.micro_batch_tokens is not None and budget.micro_batch_tokens < row:
            raise DataError(
                f"micro_batch_tokens={budget.micro_batch_tokens} is less than a packed row of "
                f"{row} tokens: write micro_batch_tokens={row} or more."
            )
        if self.shards is not None and budget.tokens // row < self.shards.count:
            raise DataError(
                f"tokens={budget.tokens} is {budget.tokens // row} rows, which cannot be cut into "
                f"the {self.shards.count} micro-shards of --exact {self.shards.count}: write "
                f"tokens={row * self.shards.count} or more, or use a smaller --exact."
            )

    def _check_batch_sampler(self) -> None:
        others = {
            "batch_size": self.batch_size is not None,
            "shuffle": self.shuffle,
            "sampler": self.sampler is not None,
            "drop_last": self.drop_last,
        }
        _refuse_together("batch_sampler", others)

    def _check_stream(self) -> None:
        kind = type(self.dataset).__name__
        if not hasattr(self.dataset, "__iter__"):
            raise DataError(
                f"{kind} is not a dataset: it has neither __getitem__ and __len__ nor __iter__. "
                "Pass a torch Dataset or IterableDataset."
            )
        if isinstance(self.dataset, Iterator):
            raise DataError(
                f"{kind} is an iterator, which can be read only once. "
                "Pass an IterableDataset whose __iter__ starts from the beginning."
            )
        named = {"sampler": self.sampler, "batch_sampler": self.batch_sampler}
        for name in [name for name, value in named.items() if value is not None]:
            raise DataError(
                f"{kind} is iterable, so no {name} can choose its samples: leave {name} out."
            )
        if self.sharding == "dataset" and self.shards is not None:
            raise DataError(
                'With sharding="dataset" each worker reads a separate part, so the samples of a '
                f"step depend on the number of workers. --exact {self.shards.count} needs the same "
                'steps on any number of workers: write sharding="slice".'
            )
        if self.shuffle:
            raise DataError(
                f"shuffle=True needs a map-style dataset, but {kind} is iterable and defines its "
                "own order. Shuffle inside it, for example in a buffer: torch's generator has the "
                "same seed there on all ranks."
            )

    def _check_map_style(self) -> None:
        kind = type(self.dataset).__name__
        if not hasattr(self.dataset, "__len__"):
            raise DataError(
                f"{kind} has __getitem__ but no __len__, so ranks cannot share it: add __len__."
            )
        length = len(self.dataset)
        if length == 0:
            raise DataError(f"{kind} has length 0: check its path or filter.")
        if self.sharding != "auto":
            raise DataError(
                f"sharding={self.sharding!r} is for iterable datasets. {kind} is map-style, and "
                "every rank takes its share of one order: leave sharding out."
            )
        if self.shuffle and self.sampler is not None:
            raise DataError("shuffle and sampler both decide the order: pass only one of them.")
        for sampler in (
            self.sampler,
            self.batch_sampler,
            getattr(self.batch_sampler, "sampler", 0),
        ):
            if isinstance(sampler, DistributedSampler):
                raise DataError(
                    "DistributedSampler gives each rank a part of the dataset, but the Loader "
                    "already does that. Write Loader(dataset, batch_size=TOTAL, shuffle=True) "
                    "without it. set_epoch is not needed."
                )
        length = samples_per_epoch(self.dataset)
        if self.drop_last and self.sampler is None and length < (self.batch_size or 0):
            raise DataError(
                f"drop_last with batch_size={self.batch_size} drops all {length} samples of "
                f"{kind}: make batch_size {length} or smaller, or leave drop_last out."
            )


def _refuse_together(argument: str, others: Mapping[str, bool]) -> None:
    """Raise DataError if one of `others` is passed next to `argument`."""
    if clash := [name for name, is_given in others.items() if is_given]:
        raise DataError(
            f"{argument} decides the batches, so {' and '.join(clash)} cannot be combined with it: "
            "leave one of them out."
        )
