"""The part of an engine that makes gradients: forward is the user's, backward is here."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from shardwise import randomness
from shardwise.current_batch import Batch
from shardwise.engine import pipeline_runner, start_lines, usage_checks
from shardwise.engine.accumulation import Totals
from shardwise.engine.build import States
from shardwise.engine.drawing import Drawing
from shardwise.engine.exact_mean import Seeds, Share, divisor_of, share_of
from shardwise.engine.pipeline_runner import Pipelining
from shardwise.engine.user_objects import Takeover
from shardwise.errors import CollectiveError
from shardwise.parallel.pipeline import LayerTimes, Piece
from shardwise.timeline import span

living: WeakSet[Backwards] = WeakSet()
"""All engines of this process."""


class Backwards(Drawing):
    """What adds up gradients until the next step; an engine is one."""

    _held: Takeover
    _seeds: Seeds
    _totals: Totals | None
    """What all ranks know of this step, once its gradients are reduced."""
    _pipelining: Pipelining | None
    _timing: LayerTimes | None
    _announced: bool
    _averaged: bool
    _uneven: bool

    @property
    @abstractmethod
    def gathers_together(self) -> bool:
        """Whether a forward of this engine's models takes all ranks."""

    @property
    @abstractmethod
    def _states(self) -> States:
        """The three states as they are laid out now."""

    def backward(
        self,
        loss: Tensor,
        *,
        weight: float | Tensor | None = None,
        reduction: str = "mean",
        same_items: bool | None = None,
        last: bool | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Add the gradient of `loss`, a scalar that is a mean over `weight` items of this rank.

        Without `weight` it is the number of samples that the Loader last gave; without a Loader,
        1. A device tensor is fine. With `reduction="sum"` the loss is a sum over items, and those
        of all workers and backwards are added. With `reduction="ddp"` losses are what
        DistributedDataParallel takes them for: those of a worker add up, whatever they are means
        over, and the sums are averaged over the workers.

        Several losses of one batch add up, as in plain PyTorch: its samples count once. With
        `weight`, `same_items` says so of a further loss of the items that an earlier backward of
        this step has counted, or that it is of others (False). `last=False` says that more
        backwards come in this step, which saves communication and never changes a result. Touches
        this engine's parameters only. Where gradients are sharded each backward is collective:
        every rank makes as many.

        Raises UsageError for a loss that is not a scalar of the graph, and where the weight of the
        loss cannot be told.
        """
        usage_checks.check_loss(loss)
        given, divisor = weight is not None, self._divisor(reduction, weighted=weight is not None)
        summed = divisor > 0
        batch = self._begin_backward(weighted=given or summed, anew=given and not same_items)
        share = share_of(batch, weight, summed=summed)
        again = self._weigh(share, batch, given=given, divisor=divisor, same_items=same_items)
        self._announce(None, loss, batch, summed=summed, averaged=reduction == "ddp")
        if last is None:
            last = batch.last if batch is not None else True
        factor = share.factor
        if isinstance(loss, Piece):
            loss = self._backward_in_turn(loss, float(factor), last=last, keep_graph=retain_graph)
        else:
            seed, rest = self._seeds.seed(loss, factor)
            with self._collecting(factor, rest, last=last, keep_graph=retain_graph):
                torch.autograd.backward(
                    loss, seed, retain_graph=retain_graph, inputs=self._inputs()
                )
            if not self._states.gradients.reached and not isinstance(factor, Tensor) and factor > 0:
                usage_checks.check_reachable(loss, several=len(living) > 1)
        self._end_backward(loss, share, batch, given=given, again=again)

    def forward_backward(
        self,
        loss_of: Callable[..., Tensor],
        *batch: Any,
        weight: Callable[..., float | Tensor] | None = None,
        reduction: str = "mean",
        same_items: bool | None = None,
    ) -> Tensor:
        """`loss = loss_of(*batch)`, then `backward(loss)`, in micro-batches; returns the mean loss,
        or with `reduction="sum"` or `"ddp"` the sum.

        `loss_of` calls the model and returns a scalar loss that is a mean over the items of what
        it is given: the rows of `batch`, a nest of tensors of one equal first dimension, are cut
        into `--microbatches` parts (default: 1, with `--pipeline P` up to 4 P). What a loss is a
        mean over, where that is not rows, `weight` tells of the same parts. With `--pipeline` this
        is what keeps all workers busy; without, it is what the two lines do. The result, 0-dim in
        fp64, is known on all ranks of the replica. `same_items` and what is raised are as for
        `backward`.
        """
        self.world.draws.begin()
        given, divisor = weight is not None, self._divisor(reduction, weighted=weight is not None)
        summed = divisor > 0
        of = self._begin_backward(weighted=given or summed, anew=given and not same_items)
        count = pipeline_runner.count_of(self.settings, batch, self._recipe.group)
        cut = pipeline_runner.parts_of(batch, count)
        empty = of is not None and of.samples == 0
        items = [
            0.0 if empty or not count else float(weight(*part) if weight else count)
            for count, part in cut
        ]
        factors = [float(each > 0) for each in items] if summed else items
        share = Share(factor=sum(factors), items=sum(items))
        again = self._weigh(share, of, given=given, divisor=divisor, same_items=same_items)
        self._announce(count)
        parts = [(factor, part) for factor, (_, part) in zip(factors, cut, strict=True)]
        last = of.last if of is not None else True
        try:
            if self._pipelining is None:
                loss = self._one_by_one(loss_of, parts, last=last)
            else:
                loss = self._through_stages(loss_of, parts, last=last)
        except BaseException:
            with suppress(CollectiveError):  # the first error is the one to show
                self._abandon()
            raise
        self._end_backward(loss, share, of, given=given, again=again)
        return loss * share.factor if summed else loss

    def _one_by_one(
        self, loss_of: Callable[..., Tensor], parts: Sequence[tuple[float, Any]], *, last: bool
    ) -> Tensor:
        """Forward and backward of each of `parts`; their mean loss."""
        losses = []
        for number, (weight, part) in enumerate(parts):
            loss = loss_of(*part)
            usage_checks.check_loss(loss)
            seed, rest = self._seeds.seed(loss, weight)
            with self._collecting(weight, rest, last=last and number == len(parts) - 1):
                torch.autograd.backward(loss, seed, inputs=self._inputs())
            if not self._states.gradients.reached and weight > 0:
                usage_checks.check_reachable(loss, several=len(living) > 1)
            told = loss.detach().double().reshape(())
            losses.append(told * weight if weight else torch.zeros_like(told))
        return torch.stack(losses).sum() / max(sum(weight for weight, _ in parts), 1e-300)

    def _through_stages(
        self, loss_of: Callable[..., Tensor], parts: Sequence[tuple[float, Any]], *, last: bool
    ) -> Tensor:
        """The same over the workers that share out the layers."""
        assert self._pipelining is not None
        coordinates = self._number, self.steps, self.world.data_rank, self._window.backwards
        return self._pipelining.train(
            loss_of,
            parts,
            seed=randomness.seed_from(self.world.seed, "forward_backward", *coordinates),
            last=last,
            buckets=self._states.buckets_by,
            inputs=self._inputs(),
            telling=self._tell_stage,
            collecting=self._collecting,
        )

    def _tell_stage(self, stage: int | None) -> None:
        """Which stage runs from now on, where units are shown for it."""
        if self._states.shown is not None:
            self._states.shown.residency.part = stage

    def _backward_in_turn(
        self, loss: Piece, weight: float, *, last: bool, keep_graph: bool
    ) -> Tensor:
        """Backward of a loss whose layers are on several ranks, one after the other."""
        assert self._pipelining is not None
        return self._pipelining.backward(
            loss,
            weight,
            last=last,
            keep_graph=keep_graph,
            buckets=self._states.buckets_by,
            inputs=self._inputs(),
            collecting=self._collecting,
        )

    def _begin_backward(self, *, weighted: bool, anew: bool) -> Batch | None:
        """Look whether a backward may come now, and of which batch; `anew`: its items have a weight
        of their own and are not known to be those of an earlier one."""
        usage_checks.check_unreduced(is_reduced=self._totals is not None)
        usage_checks.check_block(
            averaged=self._averaged, uneven=self._uneven, whole=self._recipe.is_whole
        )
        self._leave_if_asked()
        self._held.look_for_changes()
        batch = self.world.feed.batch_of_loss(weighted=weighted, anew=anew)
        self._check_gradients()
        return batch

    def _divisor(self, reduction: str, *, weighted: bool) -> float:
        return divisor_of(reduction, weighted=weighted, replicas=self.world.data_size)

    def _weigh(
        self,
        share: Share,
        batch: Batch | None,
        *,
        given: bool,
        divisor: float,
        same_items: bool | None,
    ) -> bool:
        """Whether the items of a loss count already; raises where it does not go with others."""
        self._window.check_reduction(divisor)
        again = self._window.is_again(share, batch, given=given, same_items=same_items)
        self._window.divisor = divisor
        return again

    def _announce(
        self,
        parts: int | None,
        loss: Tensor | None = None,
        batch: Batch | None = None,
        *,
        summed: bool = False,
        averaged: bool = False,
    ) -> None:
        """Say of the first batch how it goes: through the stages in so many `parts`, or whole, and
        whether losses are `averaged` over workers; and of its `loss`, where it is known, whether it
        looks like a sum but is not `summed`."""
        if not self._announced:
            self._announced = True
            start_lines.announce_batch(self.world, self._recipe, parts, averaged=averaged)
            if loss is not None and batch is not None and not summed:
                start_lines.announce_sum(self.world, self._recipe, loss, batch.samples)

    @contextmanager
    def _collecting(
        self,
        weight: float | Tensor,
        factor: float | Tensor,
        *,
        last: bool,
        keep_graph: bool = False,
        by_hand: bool = False,
        among: frozenset[int] | None = None,
        usual: bool = True,
    ) -> Iterator[None]:
        """Inside the block gradients are taken in as they come; `by_hand`, when it ends."""
        gradients = self._states.gradients
        gradients.begin(last=last, weight=weight, factor=factor, among=among, usual=usual)
        if self._timing is not None:
            self._timing.backward_begins()
        try:
            with span("backward"):
                with self._showing(keep_graph=keep_graph) if usual else nullcontext():
                    yield
                    if by_hand:
                        gradients.bring()
                if self._timing is not None:
                    self._timing.backward_ended()
                gradients.finish()
        except BaseException:
            with suppress(CollectiveError):  # the first error is the one to show
                self._abandon()
            raise

    def _end_backward(
        self, loss: Tensor, share: Share, batch: Batch | None, *, given: bool, again: bool
    ) -> None:
        self.world.feed.train()
        self._window.add(loss, share, batch, given=given, again=again)
        if batch is not None and batch.samples == 0:
            self._held.buffers.restore()
        self._held.buffers.after_backward()
        self._reseed()
        self._states.gradients.guard()

    @contextmanager
    def _showing(self, *, keep_graph: bool) -> Iterator[None]:
        """Let backward have the units that it comes to, where parameters are sharded."""
        if self._states.shown is None:
            yield
            return
        residency = self._states.shown.residency
        residency.open_backward()
        try:
            yield
        finally:
            failed = sys.exc_info()[0] is not None
            with suppress(CollectiveError) if failed else nullcontext():
                residency.close_backward(keep_graph=keep_graph, failed=failed)

    def _inputs(self) -> list[nn.Parameter] | None:
        """This engine's parameters where the graph may hold those of another engine too."""
        if len(living) == 1:
            return None
        # torch refuses one that is frozen.
        tracked = (each.parameter for each in self._states.parameters.tracked)
        return [parameter for parameter in tracked if parameter.requires_grad]

    def _check_gradients(self) -> None:
        """Raise, and forget the step, if user code cleared gradients that are on their way."""
        if self._states.gradients.were_cleared():
            self._abandon()
            raise usage_checks.cleared_gradients()

    def _abandon(self) -> None:
        """A backward failed: forget this step."""
        if self._pipelining is not None:
            self._tell_stage(None)
            self._pipelining.abandon()
        if self._states.shown is not None:
            self._states.shown.residency.reset()
        self._states.gradients.abandon()
        self._held.buffers.abandon()
        self._window.clear()
        self._totals = None
