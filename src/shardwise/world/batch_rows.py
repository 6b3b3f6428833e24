"""Cuts a total batch by rows: those that a rank is given, and those that it draws."""

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
from shardwise.world.common_calls import SHARE, CommonCalls
from shardwise.world.common_random_stream import CommonRandomStream
from shardwise.world.current_batch import Batch, CurrentBatch, StreamShape
from shardwise.world.nested_batch import Rows, dimension
from shardwise.world.step_log import StepLog

T = TypeVar("T")

_OWN_PARTS = "each worker has a part of its own"

_LOST = (
    "shardwise: before training some workers drew what others did not, or ran a forward with "
    "gradients alone, so what is drawn in common goes on from worker 0's place. Let all workers "
    "draw the same up to the first batch, and run what is one worker's alone under torch.no_grad()."
)


class BatchRows(ABC):
    """The part of a World that gives a rank its rows of total batches, and of draws for them."""

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
        """Which replica of the model this rank is of."""

    @property
    @abstractmethod
    def data_size(self) -> int:
        """How many replicas there are."""

    def share(self, batch: T, dim: int = 0) -> T:
        """This rank's rows of a total batch, for loops without a Loader; those of its replica.

        `batch` is a tensor of shape (rows, ...) or a nest of such tensors, alike on all ranks; with
        `dim` rows are counted along that dimension, as in (time, rows, ...) along 1. Tensors may be
        sparse, or nested with a component for each row. A list is a nest, not a list of samples:
        one of six or more tensors of one shape is refused. Shares are
        contiguous and differ by a row at most. Outside of a loop over a Loader the number of rows
        becomes the weight of the next `engine.backward`; what is shared out under
        `torch.no_grad()` changes nothing of that. A rank left without rows gets one, at weight 0.
        """
        self._check_takes_rows("world.share")
        rows = Rows(batch, dim, call="world.share")
        rows.refuse_samples(batch)
        total = rows.total
        cuts = even_cuts(total, self.data_size)
        first, end = cuts[self.data_rank], cuts[self.data_rank + 1]
        mine, count = rows.taken(first, end), end - first
        if torch.is_grad_enabled() and self.data_size > 1:
            self.calls.note_batch(SHARE, rows.digest)
        plan = StreamShape(batch_size=total, micro_batches=1, steps_per_epoch=None)
        training = torch.is_grad_enabled()
        given = Batch(samples=count, whole=total, rows=(first, end), total=total)
        self.current_batch.share(SHARE, plan, given, training=training)
        if torch.is_grad_enabled():
            self.step_log.given(count)
        return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(self.device), mine)  # type: ignore[no-any-return]

    def draw(self, make: Callable[[int], T], *, rows: int | None = None, dim: int = 0) -> T:
        """This rank's rows of what one process draws for the whole batch: noise, time steps.

        `make(n)` is called with the number of rows of the total batch that the Loader (or
        `world.share`) last gave a part of, or with `rows`, and returns a tensor of n rows along
        `dim` or a nest of such: `noise = world.draw(lambda n: torch.randn(n, 100))`. It draws from
        the global generators as they are in one process that has drawn what this run has drawn in
        common, from the seed on, so it is the same for any number of workers and micro-batches;
        checkpoints go on with it. Every rank calls it, as often as the others.

        Raises DataError where the number of rows is not known, or is not what `make` returns;
        UsageError in a forward that is recomputed, and in a batch that some ranks sit out.
        """
        self._check_takes_rows("world.draw")
        self._check_draws_once("world.draw")
        batch = self.current_batch.batch
        total, (first, end) = self._place(batch, rows)
        # Before drawing: all ranks must start from the same state of the generators.
        self._meet()
        self.calls.note("world.draw")
        whole = self.draws.draw(
            lambda: make(total),
            step=None if batch is None else batch.step,
            batch=batch,
            goes_on=batch is not None and not batch.last,
        )
        drawn = Rows(whole, dim, call=f"world.draw, of what make({total}) returned,")
        if drawn.total != total:
            raise DataError(
                f"world.draw called make({total}), which returned tensors whose {dimension(dim)} "
                f"is [{drawn.total}]: let it return {total} rows there."
            )
        mine = drawn.taken(first, end)
        return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(self.device), mine)  # type: ignore[no-any-return]

    @overload
    def alike(self) -> AbstractContextManager[None]: ...

    @overload
    def alike(self, batches: Iterable[T]) -> Alike[T]: ...

    def alike(self, batches: Iterable[T] | None = None) -> AbstractContextManager[None] | Alike[T]:
        """Inside the block every rank draws the same, as one process goes on to draw: the order of
        own batches, what is taken out of a replay buffer, the steps of an environment.

        torch, numpy and random are meant. What is drawn outside of it in training is each rank's
        own. Checkpoints go on with it. Every rank enters it, as often as the others. Training in
        the block is refused.

        `for batch in world.alike(loader):` enters it around what gives the batches alone (`iter`
        and each `next`), for a DataLoader that shuffles, or whose dataset draws: the body of the
        loop is outside. A batch comes whole on every rank: `world.share(batch)` gives its rows.
        """
        return self._alike() if batches is None else Alike(batches, self._alike)

    @contextmanager
    def _alike(self) -> Iterator[None]:
        self._check_draws_once("world.alike")
        self._meet()
        self.calls.note("world.alike")
        with self.draws.alike():
            yield

    @property
    def rows(self) -> int:
        """How many rows of the batch that the Loader or `world.share` gave last this rank has.

        0 where it has a stand-in, a row of another rank's to run with. Sums and counts by hand are
        over the first `world.rows` rows: `scores[: world.rows]`.

        Raises DataError where there was no batch yet.
        """
        if self.current_batch.batch is None:
            raise DataError(
                "world.rows before the first batch: it is of what the Loader or world.share gave "
                "last."
            )
        # A script that reads this knows of stand-ins: it need not be warned of them.
        self.current_batch.stand_in = None
        return self.current_batch.batch.samples

    def gather_rows(self, mine: Tensor, dim: int = 0) -> Tensor:
        """What all ranks have computed of their rows of the batch given last, in the batch's order:
        embeddings for a loss over pairs of samples.

        `mine` has this rank's rows along `dim`, or those of a stand-in, which are left out:
        the result has the rows of the total batch, whatever the number of ranks. This rank's own
        rows are in it with their graph, those of others without: a loss of it that every rank
        computes whole takes `engine.backward(loss, reduction="sum")`, and is `loss.item()`.
        Every rank calls it.

        Raises DataError for another number of rows, and where shapes or dtypes differ; UsageError
        where the batch is cut into micro-batches, which no loss over pairs can be.
        """
        self._check_takes_rows("world.gather_rows")
        if self.data.size < self.data_size:
            raise UsageError(
                "world.gather_rows joins the rows of a batch, and with --islands no worker "
                f"sees those of all {self.data_size}: leave --islands out for a loss over pairs "
                "of rows."
            )
        self._check_draws_once("world.gather_rows")
        batch = self.current_batch.batch
        if batch is None or batch.rows is None:
            raise DataError(
                "world.gather_rows does not know which rows are this worker's, since "
                + ("there was no batch yet" if batch is None else _OWN_PARTS)
                + ": take the batch from sw.Loader(...) or by world.share."
            )
        (first, end), total = batch.rows, batch.total
        _check_own(mine, end - first, dim)
        own = mine.narrow(dim, 0, end - first)
        moved = own.detach().movedim(dim, 0).contiguous()
        form = [list(moved.shape[1:]), str(mine.dtype)]
        told = self.data.gather_plain([form, first, end])
        _check_joined(told, total)
        width = math.prod(moved.shape[1:]) * mine.element_size()
        # As bytes, which every transport moves, and each rank's into its place among all rows.
        joined = torch.empty(total * width, dtype=torch.uint8, device=self.data.small_device)
        joined[first * width : end * width] = moved.view(-1).view(torch.uint8)
        cuts = [place * width for _, place, _ in told] + [total * width]
        self.data.all_gather(joined, cuts).wait()
        rows = joined.view(mine.dtype).view(total, *moved.shape[1:]).movedim(0, dim)
        rows = rows.to(mine.device)
        # No row of a stand-in, but its graph: backward is to come on this rank, too.
        return torch.cat([rows.narrow(dim, 0, first), own, rows.narrow(dim, end, total - end)], dim)

    def _meet(self) -> None:
        """Let all ranks draw from one place, and say where they have lost each other."""
        if self.draws.meet(self.collectives.gather_objects) and self.collectives.rank == 0:
            print(_LOST, file=sys.stderr, flush=True)

    def _check_draws_once(self, call: str) -> None:
        """Raise UsageError where not all ranks come to `call`, or this one comes twice."""
        self.current_batch.check_even(call)
        if torch._C._current_graph_task_id() != -1:
            raise UsageError(
                f"{call} in a forward that backward runs again (--activations recomputed, "
                "torch.utils.checkpoint), which would draw other numbers there: draw before the "
                "forward, and hand it in."
            )

    def _place(self, batch: Batch | None, rows: int | None) -> tuple[int, tuple[int, int]]:
        """How many rows a draw has in all, and which of them are this rank's."""
        if rows is not None:
            cuts = even_cuts(rows, self.data_size)
            return rows, (cuts[self.data_rank], cuts[self.data_rank + 1])
        if batch is None or batch.rows is None:
            raise DataError(
                "world.draw does not know how many rows the total batch has, since "
                + ("there was none yet" if batch is None else _OWN_PARTS)
                + ": write world.draw(make, rows=n)."
            )
        return batch.total, batch.rows

    def _check_takes_rows(self, call: str) -> None:
        """Raise UsageError where total batches are not cut into contiguous shares."""
        if self.settings.exact is not None and call == "world.share":
            raise UsageError(
                f"world.share gives one share of a batch, and --exact {self.settings.exact} cuts "
                "it into micro-shards: use sw.Loader(...), or leave --exact out."
            )
        if self.settings.batch == "worker":
            raise UsageError(
                f"{call} takes rows out of a total batch, and --batch worker lets every worker "
                "have a batch of its own: use sw.Loader(...), or leave --batch out."
            )


class Alike(Generic[T]):
    """Batches that all ranks draw alike, one after the other, and what is done with them outside;
    made by `world.alike(batches)`. Each loop over it begins anew."""

    def __init__(
        self, batches: Iterable[T], block: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._batches = batches
        self._block = block

    def __iter__(self) -> Iterator[T]:
        with self._block():  # a DataLoader draws its order and its workers' seed here
            batches = iter(self._batches)
        while True:
            with self._block():
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


def _check_own(mine: Tensor, count: int, dim: int) -> None:
    """Raise DataError unless `mine` has a row for each of this rank's."""
    found = mine.shape[dim] if -mine.ndim <= dim < mine.ndim else 0
    if found != count and (count or not found):  # a stand-in may be two rows
        raise DataError(
            f"world.gather_rows takes what was computed of this worker's {count} row(s), not "
            f"{found} along {dimension(dim)}: gather views one by one, as in "
            "torch.cat([world.gather_rows(view) for view in features.chunk(2)])."
        )


def _check_joined(told: Sequence[tuple[Any, int, int]], total: int) -> None:
    """Raise unless the ranks' rows have one form, and are those of the batch."""
    for rank, (form, _, _) in enumerate(told):
        if form != told[0][0]:
            raise DataError(
                f"world.gather_rows got rows of shape {tuple(told[0][0][0])} and {told[0][0][1]} "
                f"on worker 0, and of {tuple(form[0])} and {form[1]} on worker {rank}: let all "
                "have one shape."
            )
    ends = [0, *(end for _, _, end in told)]
    if [first for _, first, _ in told] != ends[:-1] or ends[-1] != total:
        raise UsageError(
            "world.gather_rows: the workers have a part of the batch now, in micro-batches, and a "
            "loss over pairs of rows needs all of it. Leave --micro-batch-size (or --exact) out, "
            "and accumulate nothing."
        )
