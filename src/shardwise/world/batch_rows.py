"""Splits a global batch, or random values drawn for it, into rows for each rank."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise import config
from shardwise.comm.base import Collectives
from shardwise.errors import DataError, UsageError
from shardwise.layout.bucket_layout import even_cuts
from shardwise.world import sequence_parts
from shardwise.world.common_calls import SHARE, CommonCalls
from shardwise.world.common_random_stream import CommonRandomStream
from shardwise.world.current_batch import Batch, CurrentBatch, StreamShape
from shardwise.world.nested_batch import Rows, dimension
from shardwise.world.sequence_parts import SequenceDim
from shardwise.world.step_log import StepLog

T = TypeVar("T")

_OWN_PARTS = (
    "each worker has its own part of the data, or rows that are not contiguous (Loader(tokens=...))"
)

_STREAMS_DIFFER = (
    "shardwise: before training some workers drew random numbers that others did not, or ran a "
    "forward with gradients that others did not. From now on all continue with worker 0's random "
    "stream. Draw the same numbers on all workers up to the first batch, and put forwards of a "
    "single worker under torch.no_grad()."
)


class BatchRows(ABC):
    """The part of `World` that splits global batches and random draws into rows for each rank."""

    device: torch.device
    settings: config.Settings
    collectives: Collectives
    data: Collectives
    current_batch: CurrentBatch
    draws: CommonRandomStream
    calls: CommonCalls
    step_log: StepLog

    @property
    @abstractmethod
    def data_rank(self) -> int:
        """Index of the share of the samples that this rank trains on, from 0."""

    @property
    @abstractmethod
    def data_size(self) -> int:
        """Number of shares into which the samples are divided."""

    @property
    @abstractmethod
    def context_rank(self) -> int:
        """Index of this rank's part of each sequence, from 0."""

    @property
    @abstractmethod
    def context_size(self) -> int:
        """Number of ranks across which each sequence is split."""

    def share(self, batch: T, dim: int = 0, sequence_dim: SequenceDim | None = None) -> T:
        """Return this rank's rows of a global batch, for training loops without a Loader.

        The rows are contiguous, and row counts differ by at most one between ranks. The ranks of a
        replica get the same rows. Outside a loop over a Loader, the row count becomes the weight of
        the next `engine.backward`, unless `share` is called under `torch.no_grad()`. If there are
        fewer rows than ranks, a rank without rows gets a stand-in: one row, with weight 0.

        With `--context`, the ranks of a context group get the same rows, and each rank gets its
        part of dimension 1, the sequence, or of `sequence_dim`.

        Args:
            batch: Tensor of shape (rows, ...), or a nested container of such tensors, the same on
                all ranks. Sparse tensors are allowed, and so are nested tensors with one component
                per row. A list is a container, not a list of samples: a list of six or more tensors
                of the same shape raises an error.
            dim: Dimension along which rows are counted, such as 1 for (time, rows, ...). Default:
                0.
            sequence_dim: With `--context`, the dimension along which sequences are split, such as 0
                for (time, rows, ...), or a dict from names or positions in the batch to dimensions.
                None in the dict: the tensor is not split. Default: 1.

        Returns:
            The rows on this rank's device, in the same containers as `batch`.

        Raises:
            UsageError: With `--exact` or `--batch worker`, which do not split batches this way.

        Example:
            x, y = world.share((images, labels))
            engine.backward(loss_fn(model(x), y))
        """
        self._check_takes_rows("world.share")
        rows = Rows(batch, dim, call="world.share")
        rows.refuse_samples(batch)
        total = rows.total
        cuts = even_cuts(total, self.data_size)
        first, end = cuts[self.data_rank], cuts[self.data_rank + 1]
        mine, count = rows.taken(first, end), end - first
        # Compare only training batches, because ranks may evaluate different batches.
        if torch.is_grad_enabled() and self.data_size * self.context_size > 1:
            self.calls.note_batch(SHARE, rows.digest)
        sequence = None
        if self.context_size > 1:
            mine, sequence = sequence_parts.cut(
                mine,
                self.context_rank,
                self.context_size,
                call="world.share",
                dim=sequence_dim,
                rows_dim=dim,
            )
        elif sequence_dim is not None:  # so that a typo does not first show up in the large run
            sequence_parts.cut(mine, 0, 1, call="world.share", dim=sequence_dim, rows_dim=dim)
        # The number of batches per epoch is unknown, because the script owns the loop.
        plan = StreamShape(batch_size=total, micro_batches=1, steps_per_epoch=None)
        training = torch.is_grad_enabled()
        given = Batch(samples=count, whole=total, rows=(first, end), total=total, sequence=sequence)
        self.current_batch.share(SHARE, plan, given, training=training)
        if torch.is_grad_enabled():
            self.step_log.given(count)
        return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(self.device), mine)  # type: ignore[no-any-return]

    def draw(self, make: Callable[[int], T], *, rows: int | None = None, dim: int = 0) -> T:
        """Draw random values for the global batch (noise, time steps), and return this rank's rows.

        The values are those that a single process would draw, so they do not depend on the number
        of workers or micro-batches. Checkpoints save the position in the random stream. Every rank
        must make the same number of calls.

        Args:
            make: Function of n, the number of rows in the current global batch. It draws from the
                global generators, and returns a tensor with n rows along `dim`, or a nested
                container of such tensors.
            rows: Number of rows to draw. Default: the number of rows in the current global batch,
                from which the Loader or `world.share` last returned rows.
            dim: Dimension along which rows are counted. Default: 0.

        Returns:
            The rows on this rank's device.

        Raises:
            DataError: The number of rows is unknown, or `make` returns a different number of rows.
            UsageError: The call is inside a forward pass that the backward pass recomputes, or
                inside an evaluation batch that some ranks skip.

        Example:
            noise = world.draw(lambda n: torch.randn(n, 100))
        """
        self._check_takes_rows("world.draw")
        self._check_draws_once("world.draw")
        batch = self.current_batch.batch
        total, (first, end) = self._place(batch, rows)
        # Before drawing, make all ranks start from the same generator state.
        self._meet()
        self.calls.note("world.draw")
        whole = self.draws.draw(
            lambda: make(total),
            step=None if batch is None else batch.step,
            batch=batch,
            # Later micro-batches of this step must repeat the same draws.
            goes_on=batch is not None and not batch.last,
        )
        drawn = Rows(whole, dim, call=f"world.draw, of what make({total}) returned,")
        if drawn.total != total:
            raise DataError(
                f"world.draw called make({total}), which returned tensors whose {dimension(dim)} "
                f"is [{drawn.total}]: return {total} rows there."
            )
        mine = drawn.taken(first, end)
        return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(self.device), mine)  # type: ignore[no-any-return]

    @overload
    def alike(self) -> AbstractContextManager[None]: ...

    @overload
    def alike(self, batches: Iterable[T]) -> Alike[T]: ...

    def alike(self, batches: Iterable[T] | None = None) -> AbstractContextManager[None] | Alike[T]:
        """Make every rank draw the same random numbers inside the block.

        Use it for the order of your own batches, samples from a replay buffer, or the steps of an
        environment. It covers torch, numpy and random, and draws the numbers that a single process
        would draw. Outside the block, each rank draws its own numbers during training. Checkpoints
        save the position in the stream. Every rank must enter the block the same number of times.
        Training inside the block raises an error.

        Args:
            batches: A DataLoader or another iterable to loop over: `for batch in
                world.alike(loader)`. Only `iter` and each `next` run inside the block, not the
                loop's body. Every rank gets the full batch; call `world.share(batch)` to get its
                rows.

        Returns:
            A context manager or, if `batches` is passed, an iterable over the batches.

        Example:
            with world.alike():
                order = torch.randperm(len(dataset))
        """
        return self._alike() if batches is None else Alike(batches, self._alike)

    @contextmanager
    def _alike(self) -> Iterator[None]:
        self._check_draws_once("world.alike")
        self._meet()
        self.calls.note("world.alike")
        with self.draws.shared_draws():
            yield

    @property
    def rows(self) -> int:
        """Number of this rank's rows in the batch that the Loader or `world.share` returned last.

        It is 0 for a stand-in: a row that a rank gets if it has no rows, so that it runs the same
        code as the other ranks. Your own sums and counts must use only the first `world.rows` rows:
        `scores[: world.rows]`.

        Raises:
            DataError: There has been no batch yet.
        """
        if self.current_batch.batch is None:
            raise DataError(
                "world.rows was read before the first batch. It is the number of rows of the "
                "last batch from the Loader or world.share, so read it after one of them."
            )
        # A script that reads this handles stand-ins, so it needs no warning about them.
        self.current_batch.stand_in = None
        return self.current_batch.batch.samples

    def gather_rows(self, mine: Tensor, dim: int = 0) -> Tensor:
        """Return the rows that all ranks computed for the current batch, in batch order.

        Use it for a loss over pairs of samples, such as a contrastive loss. In the result, only
        this rank's rows are part of its autograd graph; the other ranks' rows are constants. Every
        rank computes the full loss, so sum its gradients: `engine.backward(loss, reduction="sum")`.
        Collective.

        Args:
            mine: This rank's rows along `dim`, such as embeddings of shape (rows, features). Rows
                of a stand-in are dropped.
            dim: Dimension along which rows are counted. Default: 0.

        Returns:
            Tensor with all rows of the global batch along `dim`.

        Raises:
            DataError: The number of rows is wrong, or shapes or dtypes differ between ranks.
            UsageError: The batch is split into micro-batches, which a loss over pairs does not
                allow.

        Example:
            features = world.gather_rows(model(x))
            engine.backward(contrastive_loss(features), reduction="sum")
        """
        self._check_takes_rows("world.gather_rows")
        # With islands, `data` contains only the replicas of this island.
        if self.data.size < self.data_size:
            raise UsageError(
                "world.gather_rows joins the rows of a batch, but with --islands no worker can "
                f"see the rows of all {self.data_size} workers. Remove --islands."
            )
        self._check_draws_once("world.gather_rows")
        batch = self.current_batch.batch
        if batch is None or batch.rows is None:
            raise DataError(
                "world.gather_rows does not know which rows are this worker's, because "
                + ("there was no batch yet" if batch is None else _OWN_PARTS)
                + ": get the batch from sw.Loader(...) or world.share."
            )
        (first, end), total = batch.rows, batch.total
        _check_own(mine, end - first, dim)
        own = mine.narrow(dim, 0, end - first)
        moved = own.detach().movedim(dim, 0).contiguous()  # (own rows, ...)
        # Compare shapes before the gather, which would mix up rows of different sizes.
        form = [list(moved.shape[1:]), str(mine.dtype)]
        parts = self.data.gather_plain([form, first, end])
        _check_joined(parts, total)
        width = math.prod(moved.shape[1:]) * mine.element_size()  # bytes per row
        # Gather bytes, because every transport can send uint8. Each rank fills in its own rows.
        joined = torch.empty(total * width, dtype=torch.uint8, device=self.data.small_device)
        joined[first * width : end * width] = moved.view(-1).view(torch.uint8)
        cuts = [start * width for _, start, _ in parts] + [total * width]
        self.data.all_gather(joined, cuts).wait()
        rows = joined.view(mine.dtype).view(total, *moved.shape[1:]).movedim(0, dim)
        rows = rows.to(mine.device)
        # A stand-in contributes no rows. Its empty slice still connects the graph, so that the
        # backward pass runs on this rank as on the others.
        return torch.cat([rows.narrow(dim, 0, first), own, rows.narrow(dim, end, total - end)], dim)

    def _meet(self) -> None:
        """Move all ranks to the same position in the random stream. Warn if positions differed."""
        if self.draws.meet(self.collectives.gather_objects) and self.collectives.rank == 0:
            print(_STREAMS_DIFFER, file=sys.stderr, flush=True)

    def _check_draws_once(self, call: str) -> None:
        """Raise UsageError if some ranks skip this `call`, or if recomputation would repeat it."""
        self.current_batch.check_even(call)
        if torch._C._current_graph_task_id() != -1:  # a backward pass is running
            raise UsageError(
                f"{call} in a forward that backward runs again (--activations recomputed, "
                "torch.utils.checkpoint) and would then draw different numbers: draw before the "
                "forward, and pass the result to it."
            )

    def _place(self, batch: Batch | None, rows: int | None) -> tuple[int, tuple[int, int]]:
        """Return the number of rows to draw, and this rank's range [first, end)."""
        if rows is not None:
            cuts = even_cuts(rows, self.data_size)
            return rows, (cuts[self.data_rank], cuts[self.data_rank + 1])
        if batch is None or batch.rows is None:
            raise DataError(
                "world.draw does not know how many rows the total batch has, because "
                + ("there was no batch yet" if batch is None else _OWN_PARTS)
                + ": write world.draw(make, rows=n)."
            )
        return batch.total, batch.rows

    def _check_takes_rows(self, call: str) -> None:
        """Raise UsageError if this run does not split global batches into contiguous shares."""
        if self.settings.exact is not None and call == "world.share":
            raise UsageError(
                f"world.share returns one contiguous share of a batch, but --exact "
                f"{self.settings.exact} cuts it into micro-shards: use sw.Loader(...), or remove "
                "--exact."
            )
        if self.context_size > 1 and call != "world.share":
            raise UsageError(
                f"{call} cannot be combined with --context {self.context_size} yet: a row is cut "
                "over several workers. Draw values in the dataset, or start without --context."
            )
        if self.settings.batch == "worker":
            raise UsageError(
                f"{call} takes rows of a total batch, but with --batch worker each worker has its "
                "own batch: use sw.Loader(...), or remove --batch."
            )


class Alike(Generic[T]):
    """An iterable over batches that makes all ranks draw the same random numbers for them.

    `world.alike(batches)` creates it. Each loop over it iterates over `batches` from the start.
    """

    def __init__(
        self, batches: Iterable[T], block: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._batches = batches
        self._block = block

    def __iter__(self) -> Iterator[T]:
        with self._block():  # a DataLoader draws its order and its workers' seed here
            batches = iter(self._batches)
        while True:
            with self._block():  # the dataset may draw, too
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


def _check_own(mine: Tensor, count: int, dim: int) -> None:
    """Raise DataError unless `mine` has `count` rows along `dim`, or this rank has a stand-in."""
    length = mine.shape[dim] if -mine.ndim <= dim < mine.ndim else 0
    if length != count and (count or not length):  # a stand-in may be two rows
        raise DataError(
            f"world.gather_rows takes one row for each of this worker's {count} row(s), not "
            f"{length} along {dimension(dim)}: if there are several views, gather them one by "
            "one, as in torch.cat([world.gather_rows(view) for view in features.chunk(2)])."
        )


def _check_joined(parts: Sequence[tuple[Any, int, int]], total: int) -> None:
    """Raise an error if shapes or dtypes differ between ranks, or if rows are missing."""
    form_of_first = parts[0][0]
    for rank, (form, _, _) in enumerate(parts):
        if form != form_of_first:
            raise DataError(
                f"world.gather_rows got rows of shape {tuple(form_of_first[0])} and "
                f"{form_of_first[1]} on worker 0, and of {tuple(form[0])} and {form[1]} on worker "
                f"{rank}: pass the same shape and dtype on all workers."
            )
    ends = [0, *(end for _, _, end in parts)]
    if [first for _, first, _ in parts] != ends[:-1] or ends[-1] != total:
        raise UsageError(
            "world.gather_rows: the batch is cut into micro-batches, but a loss over pairs of rows "
            "needs all of it at once. Remove --micro-batch-size (or --exact), and do not "
            "accumulate gradients."
        )
