"""Cuts a total batch by rows: those that a rank is given, and those that it draws."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise import config
from shardwise.collectives.base import Collectives
from shardwise.common_draws import CommonDraws
from shardwise.current_batch import Batch, CurrentBatch, StreamShape
from shardwise.errors import DataError, UsageError
from shardwise.layout import even_cuts
from shardwise.step_log import StepLog

T = TypeVar("T")

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
    current_batch: CurrentBatch
    draws: CommonDraws
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
        `dim` rows are counted along that dimension, as in (time, rows, ...) along 1. Shares are
        contiguous and differ by a row at most. Outside of a loop over a Loader the number of rows
        becomes the weight of the next `engine.backward`; what is shared out under
        `torch.no_grad()` changes nothing of that. A rank left without rows gets one, at weight 0.
        """
        self._check_takes_rows("world.share")
        lengths = row_counts(batch, dim)
        if len(lengths) != 1 or 0 in lengths:
            raise DataError(
                f"world.share takes tensors of one equal {_dimension(dim)} above 0, not {lengths}."
            )
        total = lengths.pop()
        cuts = even_cuts(total, self.data_size)
        count, mine = rows_of_part(batch, cuts, self.data_rank, dim)
        plan = StreamShape(batch_size=total, micro_batches=1, steps_per_epoch=None)
        training = torch.is_grad_enabled()
        place = cuts[self.data_rank], cuts[self.data_rank + 1]
        given = Batch(samples=count, rows=place, total=total)
        self.current_batch.share("world.share", plan, given, training=training)
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
        self._meet()
        whole = self.draws.draw(
            lambda: make(total),
            step=None if batch is None else batch.step,
            batch=batch,
            goes_on=batch is not None and not batch.last,
        )
        if (lengths := row_counts(whole, dim)) != [total]:
            raise DataError(
                f"world.draw called make({total}), which returned tensors whose {_dimension(dim)} "
                f"is {lengths}: let it return {total} rows there."
            )
        mine = take_rows(whole, first, end, dim)
        return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(self.device), mine)  # type: ignore[no-any-return]

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Inside the block every rank draws the same, as one process goes on to draw: the order of
        own batches, what is taken out of a replay buffer, the steps of an environment.

        torch, numpy and random are meant. What is drawn outside of it in training is each rank's
        own. Checkpoints go on with it. Every rank enters it, as often as the others.
        """
        self._check_draws_once("world.alike")
        self._meet()
        with self.draws.alike():
            yield

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
                + ("there was none yet" if batch is None else "each worker has a part of its own")
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


def _dimension(dim: int) -> str:
    return "first dimension" if dim == 0 else f"dimension {dim}"


# -- rows of a nest of tensors --------------------------------------------------------------


def row_counts(batch: Any, dim: int = 0) -> list[int]:
    """The sizes that its tensors have in dimension `dim`, each once, in ascending order; 0 for a
    tensor without it, and for none."""
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return sorted({leaf.shape[dim] if -leaf.ndim <= dim < leaf.ndim else 0 for leaf in leaves})


def rows_of_part(batch: Any, cuts: Sequence[int], number: int, dim: int = 0) -> tuple[int, Any]:
    """How many rows part `number` of those between `cuts` has, and the part; one row to run with
    where it has none."""
    first, end = cuts[number], cuts[number + 1]
    return end - first, take_rows(batch, first, end, dim)


def take_rows(batch: Any, first: int, end: int, dim: int = 0) -> Any:
    """Rows [first, end) of `batch`; its first one where that is none."""
    if end == first:
        first, end = 0, 1
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.narrow(dim, first, end - first), batch)
