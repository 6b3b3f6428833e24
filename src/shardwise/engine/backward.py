"""Runs backward passes: weights each loss, seeds autograd, and accumulates gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine import expert_parallel, gradient_hooks, loss_terms, start_lines, usage_checks
from shardwise.engine.engine_state import EngineState
from shardwise.engine.gradient_weighting import LossWeight, divisor_of, share_of, weigh
from shardwise.engine.loss_accumulation import LossTerm
from shardwise.engine.loss_terms import UNKNOWN, LossTerms
from shardwise.engine.random_state import RandomState
from shardwise.engine.user_objects import living
from shardwise.errors import CollectiveError, UsageError
from shardwise.model import precision
from shardwise.parallel.pipeline import LayerTimes, StageTensor, runner
from shardwise.parallel.pipeline.runner import LookAtLoss, Part, PipelineRunner
from shardwise.states.parameters import parameters_at_rest
from shardwise.timeline import span
from shardwise.world import randomness
from shardwise.world.current_batch import Batch


class BackwardRunner:
    """Runs backward passes, and accumulates their gradients until the next step.

    `timing` measures the time per layer, and may be None.
    """

    def __init__(
        self, state: EngineState, randoms: RandomState, timing: LayerTimes | None = None
    ) -> None:
        self._state = state
        self._world = state.world
        self._spec = state.spec
        self._objects = state.objects
        self._accumulation = state.accumulation
        self._weighting = state.weighting
        self._randoms = randoms
        self._timing = timing
        line = state.spec.pipeline
        self._pipeline = (
            None
            if line is None
            else PipelineRunner(
                line, state.spec.settings, state.weighting, self._note_share, self._crossing
            )
        )
        self._announced = self._announced_loss = False

    # -- called by the engine ---------------------------------------------------------------

    def backward(
        self,
        loss: Tensor,
        *,
        weight: float | Tensor | None,
        reduction: str,
        same_items: bool | None,
        last: bool | None,
        retain_graph: bool,
    ) -> None:
        """See Engine.backward."""
        loss = usage_checks.check_loss(loss, weight)
        given, divisor = weight is not None, self._divisor(reduction, weighted=weight is not None)
        is_said = given or divisor > 0
        batch = self._begin(weighted=is_said, anew=given and not same_items)
        in_parts = isinstance(loss, StageTensor)
        value = loss.value if isinstance(loss, StageTensor) else loss
        if value is None:  # only the last pipeline stage has the loss's graph
            terms = UNKNOWN
        elif batch is None:
            terms = loss_terms.read(value, None)
        else:
            terms = loss_terms.read(value, max(batch.samples, 1), total=batch.total)
        if not is_said and not in_parts:
            divisor = self._accumulation.divisor_from(terms)
        if in_parts and batch is None:
            # Give every loss weight 1, because only the last stage knows the terms.
            terms = UNKNOWN
        if self._spec.context is not None:
            # Only the last stage knows the terms, but all stages must raise the same error.
            known = UNKNOWN if in_parts else terms
            if value is not None:
                self._spec.context.note_shift(value, batch)
            self._spec.context.check_shift(agrees=in_parts)
            self._spec.context.check_loss(known, batch, reduction, is_weighted=given)
        # An explicit sum needs no weight, so there is nothing to compare with the graph.
        compares = given or reduction == "mean"
        weighed = weigh(batch, weight, summed=divisor > 0, terms=UNKNOWN if in_parts else terms)
        term = self._accumulation.term(
            batch, weighed, given=given, divisor=divisor, same_items=same_items, terms=terms
        )
        if self._spec.routing is not None:
            self._spec.routing.divisor = divisor
        share = self._share(batch, summed=divisor > 0)
        self._announce(None, averaged=reduction == "ddp", share=share)
        self._announce_loss(terms, is_said=is_said)
        if last is None:
            last = batch.last if batch is not None else True
        factor = term.weight.factor
        if isinstance(loss, StageTensor):
            part = float(factor), (), share
            loss = self._stage_by_stage(loss, part, last=last, keep_graph=retain_graph)
        else:
            # A sum's seed is 1 anyway, so leaving the weight out only helps for a mean.
            is_sole = last and not divisor and self._weighting.is_sole(factor, share)
            self._seed_autograd(
                loss, factor, share, last=last, is_sole=is_sole, keep_graph=retain_graph
            )
        self._end(loss, term, divisor, share, compares=compares)

    def forward_backward(
        self,
        loss_of: Callable[..., Tensor],
        batch: Sequence[Any],
        *,
        weight: Callable[..., float | Tensor] | None,
        reduction: str,
        same_items: bool | None,
        cut: bool,
    ) -> Tensor:
        """See Engine.forward_backward."""
        if self._spec.context is not None:
            self._spec.context.check_weighted(reduction, is_weighted=weight is not None)
        # Training starts before the first forward pass, as with the hook on the model's forward.
        self._world.draws.begin()
        given, divisor = weight is not None, self._divisor(reduction, weighted=weight is not None)
        summed = divisor > 0
        of = self._begin(weighted=given or summed, anew=given and not same_items)
        if cut:  # collective with `--pipeline`: all stages must agree on the number
            count = runner.microbatch_count(self._spec.settings, batch, self._spec.data_group)
            micro = runner.split_batch(batch, count)
        else:  # the caller has split it; for sums, the parts need no rows
            micro = [(1 if summed else runner.row_count(part), part) for part in batch]
        # A stand-in has weight 0 in every micro-batch, even if `weight` returns something else.
        empty = of is not None and of.samples == 0
        items = [
            0.0 if empty or not rows else float(weight(*part) if weight else rows)
            for rows, part in micro
        ]
        factors = [float(each > 0) for each in items] if summed else items
        weighed = LossWeight(factor=sum(factors), items=sum(items), shown=sum(items))
        term = self._accumulation.term(
            of, weighed, given=given, divisor=divisor, same_items=same_items
        )
        self._announce(len(micro), averaged=reduction == "ddp")
        found: list[tuple[LossTerms, float]] = []

        def look_at(loss: Tensor, number: int) -> None:
            # Read the graph before the backward pass, which frees its saved tensors.
            found.append((loss_terms.read(loss, micro[number][0]), factors[number]))
            if self._spec.context is not None:
                self._spec.context.note_shift(loss, of)

        if self._spec.routing is not None:
            self._spec.routing.divisor = divisor
        share = self._share(of, summed=summed)
        # In a mean, a micro-batch's share is proportional to its rows. A sum's share is always 1.
        whole = 1 if summed else max(sum(rows for rows, _ in micro), 1)
        parts = [
            (factor, part, share * (bool(rows) if summed else rows) / whole)
            for factor, (rows, part) in zip(factors, micro, strict=True)
        ]
        last = of.last if of is not None else True
        run = self._one_by_one if self._pipeline is None else self._through_stages
        with self.abandoning():
            loss = run(loss_of, parts, last=last, look_at=look_at)
            if self._spec.context is not None:
                self._spec.context.check_shift(agrees=True)
        if found:
            self._announce_loss(found[0][0], is_said=given or summed)
        # `found` is empty on pipeline stages without the loss.
        term = replace(term, parts=found)
        shares = sum(part[2] for part in parts)
        self._end(loss, term, divisor, shares, compares=given or not summed)
        # `run` returns the weighted mean of the micro-batches. For sums every factor is 1, so
        # multiplying by the total factor gives their sum.
        return loss * weighed.factor if summed else loss

    def abandon(self) -> None:
        """Discard this step's gradients, after an error or at the user's request."""
        states = self._objects.states
        self.reset_stages()
        if states.shown is not None:
            states.shown.residency.reset()
        states.gradients.abandon()
        self._objects.buffers.abandon()
        if self._spec.routing is not None:
            self._spec.routing.abandon()
        self._accumulation.clear()
        self._weighting.clear()
        self._state.totals = None

    def reset_stages(self) -> None:
        """With `--pipeline`, discard a failed pass and close the channels between stages."""
        if self._pipeline is not None:
            self._show_stage(None)
            self._pipeline.reset()

    @contextmanager
    def abandoning(self) -> Iterator[None]:
        """Context manager that discards the step if its block raises."""
        try:
            yield
        except BaseException:
            with suppress(CollectiveError):  # the first error is the one to show
                self.abandon()
            raise

    def check_gradients(self) -> None:
        """Discard the step and raise if user code cleared gradients that are being reduced."""
        if self._objects.states.gradients.were_cleared():
            self.abandon()
            raise usage_checks.cleared_gradients()

    # -- before and after -------------------------------------------------------------------

    def _begin(self, *, weighted: bool, anew: bool) -> Batch | None:
        """Return the batch of a new backward pass. Raise UsageError if no pass is allowed now.

        `anew` is True if the user passed a weight and did not say that an earlier backward pass has
        already counted the same items.
        """
        state, world = self._state, self._world
        self._world.draws.check_outside("engine.backward")
        usage_checks.check_unreduced(is_reduced=state.totals is not None)
        usage_checks.check_block(
            averaged=state.in_ema, uneven=state.in_uneven, whole=self._spec.is_whole
        )
        if self._spec.context is not None:
            self._spec.context.check_parts()
        # A signal asked the run to stop. In a loop without a Loader this is the first call of the
        # next step, so exit here; its forward pass is lost. With a Loader, the run stops when the
        # next batch is requested, so that other engines can still step in the loop body.
        if state.asked_to_end and not world.current_batch.in_loop():
            world.preemption.leave_between_steps()
        self._objects.look_for_changes()
        batch = world.current_batch.batch_of_loss(weighted=weighted, anew=anew)
        self.check_gradients()
        return batch

    def _divisor(self, reduction: str, *, weighted: bool) -> float:
        return divisor_of(reduction, weighted=weighted, replicas=self._spec.replicas)

    def _share(self, batch: Batch | None, *, summed: bool) -> float:
        replicas = self._spec.replicas
        groups = self._world.mesh.data // replicas
        if (exact := self._spec.settings.exact) is not None:
            # Use the number of micro-shards, so that shares do not depend on the number of workers.
            replicas = exact
        share = share_of(batch, summed=summed, replicas=replicas, groups=groups)
        # The ranks of a context group have the same rows, and each a part of their sequences.
        cut = self._spec.context is not None and batch is not None and not summed
        return share / self._world.context_size if cut else share

    def _announce(self, parts: int | None, *, averaged: bool, share: float = 1.0) -> None:
        """At the first backward pass, print how a batch is split, and start testing gradient hooks.

        `parts` is the number of micro-batches, or None for `engine.backward`. If `averaged` is
        true, losses are averaged across workers (reduction="ddp").
        """
        if not self._announced:
            # Print once per engine. Later batches may be split differently, but the user has seen
            # how it works.
            self._announced = True
            whole = share == 1.0 and self._spec.replicas == 1 and (parts or 1) == 1
            # Under DistributedDataParallel, too, hooks see one worker's gradient, so don't test
            # them then.
            if not whole and not averaged:
                gradient_hooks.watch(self._objects.states.parameters.named)
            start_lines.announce_batch(self._world, self._spec, parts, averaged=averaged)

    def _announce_loss(self, terms: LossTerms, *, is_said: bool) -> None:
        """At the first backward pass, print how a loss with these `terms` is weighted.

        `is_said` is True if the user passed a weight or a reduction.
        """
        if not self._announced_loss:
            self._announced_loss = True
            start_lines.announce_loss(self._world, self._spec, terms, is_said=is_said)

    def _end(
        self, loss: Tensor, term: LossTerm, divisor: float, share: float, *, compares: bool
    ) -> None:
        # Update the buffers before `train`, which clears `own_rows`.
        self._objects.buffers.after_backward(term.batch, self._world.current_batch.own_rows)
        self._world.current_batch.train()
        self._accumulation.add(loss, term, divisor, share, compares=compares)
        if self._accumulation.backwards > 1 and len(kinds := self._accumulation.kinds) > 1:
            # A mean over elements and a mean over rows have no common item to be averaged by.
            raise UsageError(
                "The losses of this step are means over different kinds of items "
                f"({', '.join(kinds)}), so their weights are ambiguous. Pass a weight with each "
                "loss: engine.backward(loss, weight=rows) to weight all of them by rows, or "
                "weight=items."
            )
        # Reseeds after every backward pass in exact mode; otherwise only a step reseeds.
        self._randoms.reseed()
        # Do this last: from here until the step, any use of `param.grad` raises, because its value
        # is a pending sum.
        self._objects.states.gradients.guard()

    # -- one graph on this rank -------------------------------------------------------------

    def _seed_autograd(
        self,
        loss: Tensor,
        factor: float | Tensor,
        share: float,
        *,
        last: bool,
        is_sole: bool = False,
        keep_graph: bool = False,
    ) -> None:
        """Run autograd from `loss`, and accumulate its gradients multiplied by `factor`.

        `share` is the fraction that `loss` contributes to the loss that a single process would
        compute. `is_sole` is True if no other loss is expected in this step.
        """
        # The previous backward pass left out a weight that is 0. Drop its gradients: they would
        # count with weight 1, and may be NaN.
        if not self._weighting.settle():
            self._objects.states.gradients.abandon()
        is_sole = is_sole and not self._accumulation.backwards
        seed, rest = self._weighting.seed(loss, factor, share, is_sole=is_sole)
        # A sole loss with weight 0 still counts 1 here; the step is skipped later because of its
        # weight.
        counts = 1.0 if is_sole else factor
        with self._crossing(loss, counts, share, is_sole=is_sole) as counts:
            self._before_autograd(loss, seed)
            with self._collecting(counts, rest, last=last, keep_graph=keep_graph):
                torch.autograd.backward(loss, seed, retain_graph=keep_graph, inputs=self._inputs())
        reached = self._objects.states.gradients.reached
        if not reached and not isinstance(factor, Tensor) and factor > 0:
            usage_checks.check_reachable(loss, several=len(living) > 1)

    def _note_share(self, share: float | None) -> None:
        """Tell layers that the next forward pass is of a micro-batch with this share of the loss.

        `share` is 0 for a stand-in, whose tokens do not count, and None after the last micro-batch.
        """
        if self._spec.routing is not None:
            self._spec.routing.is_empty = share == 0

    @contextmanager
    def _crossing(
        self, loss: Tensor | None, weight: float | Tensor, share: float, *, is_sole: bool = False
    ) -> Iterator[float | Tensor]:
        """Context manager for a backward pass in which gradients may cross between replicas.

        Yields the weight of its gradients: 1 if they cross, because other replicas' losses then
        depend on this one's activations, and the seeds have the full weight.
        """
        run, context = self._spec.routing, self._spec.context
        if run is not None:
            weight = expert_parallel.begin_backward(
                run, self._weighting, loss, weight, share, is_sole=is_sole
            )
        crossing = nullcontext(weight) if context is None else context.backward(loss, weight)
        preset = precision.PRESETS[self._spec.settings.precision]
        with crossing as counts, preset.in_backward():
            yield counts

    def _before_autograd(self, loss: Tensor, seed: Tensor | None) -> None:
        """Called before autograd starts from `loss` with `seed`. Overridden by the guard."""

    def _one_by_one(
        self,
        loss_of: Callable[..., Tensor],
        parts: Sequence[Part],
        *,
        last: bool,
        look_at: LookAtLoss,
    ) -> Tensor:
        """Run the forward and backward passes of each micro-batch in `parts`.

        Returns the mean loss, a 0-dim fp64 tensor.
        """
        losses = []
        for number, (weight, part, share) in enumerate(parts):
            self._note_share(share)
            loss = loss_of(*part)
            loss = usage_checks.check_loss(loss, weight)
            look_at(loss, number)
            self._seed_autograd(loss, weight, share, last=last and number == len(parts) - 1)
            value = loss.detach().double().reshape(())
            # Don't compute value * 0, because a stand-in's loss may be NaN.
            losses.append(value * weight if weight else torch.zeros_like(value))
        self._note_share(None)
        return torch.stack(losses).sum() / max(sum(weight for weight, *_ in parts), 1e-300)

    def _inputs(self) -> list[nn.Parameter] | None:
        """Return autograd's `inputs`: this engine's parameters, or None with a single engine."""
        if len(living) == 1:
            return None
        # Without inputs=, autograd would also run the hooks of other engines' parameters. Leave out
        # frozen parameters, because torch rejects them.
        named = (each.parameter for each in self._objects.states.parameters.named)
        return [parameter for parameter in named if parameter.requires_grad]

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
        """Context manager in which hooks accumulate the gradients that autograd computes.

        If `by_hand` is true, they are accumulated from `param.grad` at the end of the block
        instead.
        """
        gradients = self._objects.states.gradients
        gradients.begin(last=last, weight=weight, factor=factor, among=among, usual=usual)
        if self._timing is not None:
            self._timing.backward_begins()
        try:
            with span("backward"):
                with self._units(keep_graph=keep_graph) if usual else nullcontext():
                    yield
                    if by_hand:
                        gradients.take_all()
                if self._timing is not None:
                    self._timing.backward_ended()
                gradients.finish()
        except BaseException:
            with suppress(CollectiveError):  # the first error is the one to show
                self.abandon()
            raise

    @contextmanager
    def _units(self, *, keep_graph: bool) -> Iterator[None]:
        """With sharded parameters, gather each unit when the backward pass reaches it."""
        shown = self._objects.states.shown
        if shown is None:
            yield
            return
        # From here on, units are gathered when the backward pass reaches them, then freed.
        shown.residency.open_backward()
        try:
            yield
        finally:
            failed = sys.exc_info()[0] is not None
            with suppress(CollectiveError) if failed else nullcontext():
                shown.residency.close_backward(keep_graph=keep_graph, failed=failed)

    # -- the stages of a pipeline -----------------------------------------------------------

    def _through_stages(
        self,
        loss_of: Callable[..., Tensor],
        parts: Sequence[Part],
        *,
        last: bool,
        look_at: LookAtLoss,
    ) -> Tensor:
        """Run the micro-batches in `parts` through the pipeline, and return the mean loss."""
        assert self._pipeline is not None
        coordinates = self._state.coordinates
        return self._pipeline.train(
            loss_of,
            parts,
            seed=randomness.seed_from(self._world.seed, "forward_backward", *coordinates),
            last=last,
            buckets=self._objects.states.buckets_by,
            inputs=self._inputs(),
            on_stage=self._show_stage,
            refusal=self._refusal,
            collect=self._collecting,
            look_at=look_at,
        )

    def _refusal(self, used: Sequence[nn.Parameter]) -> str | None:
        """Return the error to raise if one of the parameters in `used` is freed too early, or None.

        These parameters are used outside the layers, but only some units stay gathered between the
        forward and the backward pass.
        """
        shown = self._objects.states.shown
        if shown is None:
            return None
        freed_early = {
            id(named.parameter)
            for unit in shown.residency.units
            if not (unit.lasting or unit.always)
            for named in unit.named
        }
        first = next((each for each in used if id(each) in freed_early), None)
        return None if first is None else str(parameters_at_rest.used_outside(first))

    def _show_stage(self, stage: int | None) -> None:
        """With sharded parameters, gather only units of pipeline stage `stage` from now on."""
        shown = self._objects.states.shown
        if shown is not None:
            shown.residency.part = stage

    def _stage_by_stage(
        self, loss: StageTensor, part: Part, *, last: bool, keep_graph: bool
    ) -> Tensor:
        """Run the backward pass of a loss, one pipeline stage after another."""
        assert self._pipeline is not None
        return self._pipeline.backward(
            loss,
            part,
            last=last,
            keep_graph=keep_graph,
            buckets=self._objects.states.buckets_by,
            inputs=self._inputs(),
            collect=self._collecting,
        )


def layer_times_of(state: EngineState) -> LayerTimes | None:
    """Return the layer timing of this process's first model if `time_layers` is set.

    Only rank 0's first engine times layers. Returns None for other ranks and engines.
    """
    path = state.spec.settings.time_layers
    if path is None or state.number or not state.world.is_main:
        return None
    return LayerTimes(state.spec.models[0], state.spec.settings.units, path)
