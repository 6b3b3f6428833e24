"""Runs a batch through the stages of a pipeline, in micro-batches, following a schedule.

For each micro-batch and each stage of this rank, the user's program runs once and computes only
that stage's layers. The schedule determines the order. The gradients of a stage's inputs are sent
back to the stage that sent the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.comm import Collectives
from shardwise.config import Settings
from shardwise.errors import DataError, ParameterAccess, UsageError
from shardwise.layout.bucket_layout import even_cuts
from shardwise.model.precision import NARROW
from shardwise.parallel.pipeline.pipeline_group import PipelineGroup
from shardwise.parallel.pipeline.schedule import Action, actions_of
from shardwise.parallel.pipeline.split_backward import SplitBackward
from shardwise.parallel.pipeline.stage_tensors import StageRun, StageTensor
from shardwise.world.nested_batch import Rows
from shardwise.world.randomness import seed_everything, seed_from

MICROBATCHES_PER_STAGE = 4
"""Default number of micro-batches per pipeline rank.

Ranks are then idle about a fifth of the time.
"""


def microbatch_count(settings: Settings, batch: Any, group: Collectives) -> int:
    """Return the number of micro-batches for `batch`, which is the same in all replicas.

    If `settings.microbatches` is None, the call is collective over `group`, the ranks with the
    same index in each replica.
    """
    if settings.microbatches is not None:
        return settings.microbatches
    size = settings.pipeline
    if size == 1:
        return 1
    rows_here = torch.tensor([float(row_count(batch))], device=group.small_device)
    # The largest batch of all replicas determines the number, which must be the same everywhere.
    # The last batch of an epoch may be smaller in some replicas.
    most = int(group.gather_rows(rows_here).max())
    return max(1, min(MICROBATCHES_PER_STAGE, most // size)) * size


def split_batch(batch: Any, count: int) -> list[tuple[int, Any]]:
    """Split `batch` into `count` parts of nearly equal size.

    Returns (number of rows, part) pairs. If there are fewer rows than parts, the number of rows is
    0 for some parts. These still contain one row, because the program needs a row to run.
    """
    rows = _rows(batch)
    cuts = even_cuts(rows.total, count)
    return [(end - first, rows.taken(first, end)) for first, end in pairwise(cuts)]


def row_count(batch: Any) -> int:
    """Return the number of rows of a batch. Raises UsageError if it cannot be determined."""
    return _rows(batch).total


def _rows(batch: Any) -> Rows:
    try:
        rows = Rows(batch, call="engine.forward_backward(loss_of, *batch)")
        for argument in batch if isinstance(batch, tuple) else ():
            rows.refuse_samples(argument)
        return rows
    except DataError as error:
        raise UsageError(
            f"{error} It cuts the batch into micro-batches. If a value must not be cut, pass it "
            "to loss_of in another way, for example in a closure."
        ) from None


Part = tuple[float, Any, float]
"""A micro-batch: its weight, the arguments of `loss_of`, and its share of the single-process loss.
"""

BucketsByKey = Callable[[Callable[[nn.Parameter], int]], Mapping[int, frozenset[int]]]
"""Groups parameters by a key. Returns the indices of the buckets that hold each group."""

Refusal = Callable[[Sequence[nn.Parameter]], str | None]
"""Returns an error message if a parameter is owned here but freed between forward passes.

Otherwise returns None.
"""

OnStage = Callable[[int | None], None]
"""Called with the stage that runs next, and with None at the end of the schedule."""


NoteShare = Callable[[float | None], None]
"""Called before each forward pass with the micro-batch's share, and with None at the end."""


Crossing = Callable[[Tensor | None, float, float], AbstractContextManager[float | Tensor]]
"""Wraps a backward pass of a loss with a weight and share. Yields the weight of its gradients.

The loss is None on stages that do not compute it.
"""


LookAtLoss = Callable[[Tensor, int], None]
"""Called before each backward pass with the loss and the index of the micro-batch."""


class CollectGradients(Protocol):
    """Interface: returns a context manager that collects gradients into buckets.

    `among` selects the buckets; by default, all of them. If `usual` is False, the engine does not
    learn from the backward pass which gradients to expect.
    """

    def __call__(
        self,
        weight: float | Tensor,
        factor: float | Tensor,
        *,
        last: bool,
        keep_graph: bool = False,
        by_hand: bool = False,
        among: frozenset[int] | None = None,
        usual: bool = True,
    ) -> AbstractContextManager[None]: ...


class BackwardSeeds(Protocol):
    """Computes the initial gradients of backward passes, so that the engine's mean is exact."""

    def begin(self, weight: float | Tensor, share: float) -> None:
        """Prepare for a step, given the weight and share of this rank's first loss.

        The step's first call is collective.
        """

    def seed(
        self, loss: Tensor, weight: float | Tensor, share: float
    ) -> tuple[Tensor, float | Tensor]:
        """Return the initial gradient of `loss`, and a factor for the resulting gradients."""


@dataclass(eq=False)
class _MicroBatchPass:
    """A micro-batch's state on a stage, from its forward pass to the end of its backward pass."""

    run: StageRun
    dtype: torch.dtype
    loss: Tensor | None
    backward: SplitBackward | None = None
    factor: float | Tensor = 1.0


@dataclass(eq=False)
class _PipelineBatch:
    """The state of a batch while it runs through the stages."""

    loss_of: Callable[..., Tensor]
    parts: Sequence[Part]
    seed: int
    last: bool  # the last batch of the step
    collect: CollectGradients
    look_at: LookAtLoss | None = None
    passes: dict[tuple[int, int], _MicroBatchPass] = field(default_factory=dict)
    inputs: Sequence[Tensor] | None = None
    """The tensors that receive gradients, or None for all tensors in the graph."""
    tied_gradients: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    loss_stage: int = 0


class PipelineRunner:
    """Runs batches through the stages of `pipeline`."""

    def __init__(
        self,
        pipeline: PipelineGroup,
        settings: Settings,
        weighting: BackwardSeeds,
        note_share: NoteShare,
        crossing: Crossing,
    ) -> None:
        self._pipeline = pipeline
        self._note_share = note_share
        self._crossing = crossing
        self._settings = settings
        self._weighting = weighting
        self._is_trial_done = False

    def train(
        self,
        loss_of: Callable[..., Tensor],
        parts: Sequence[Part],
        *,
        seed: int,
        last: bool,
        buckets: BucketsByKey,
        inputs: Sequence[Tensor] | None,
        on_stage: OnStage,
        refusal: Refusal,
        collect: CollectGradients,
        look_at: LookAtLoss,
    ) -> Tensor:
        """Run the forward and backward passes of all micro-batches in `parts`.

        Returns their mean loss, a scalar in fp64, on all ranks.
        """
        pipeline, partition = self._pipeline, self._pipeline.partition
        rank, ranks = pipeline.group.rank, pipeline.group.size
        order = actions_of(self._settings.schedule, ranks, partition.stages, len(parts), rank)
        batch = _PipelineBatch(loss_of, parts, seed, last, collect, look_at, inputs=inputs)
        # User code may have changed tied weights since the last batch, so send them again.
        pipeline.tied_weights.invalidate()
        self._weighting.begin(
            sum(weight for weight, _, _ in parts), sum(share for _, _, share in parts)
        )
        self._run_trial(batch, refusal)
        # The index of each stage's last backward action, after which its buckets may be launched.
        ends = {a.stage: n for n, a in enumerate(order) if a.kind in "BW"}
        has_several_stages = len(pipeline.stages) > 1
        # If this rank has several stages, each backward pass fills only its own stage's buckets.
        # But if stages on the same rank share tied weights, their buckets mix, and all backward
        # passes fill all buckets.
        by_stage = has_several_stages and not pipeline.has_local_ties
        buckets_of_stage = buckets(lambda p: partition.owners[p]) if by_stage else {}
        for number, action in enumerate(order):
            on_stage(action.stage if has_several_stages else None)
            if action.kind == "F":
                self._forward(batch, action)
            else:
                is_last = ends[action.stage] == number
                self._backward(batch, action, buckets_of_stage.get(action.stage), is_last=is_last)
        on_stage(None)
        self._note_share(None)
        # All ranks send before any rank receives. Two ranks may each own a weight that the other
        # uses, and would otherwise wait for each other.
        pipeline.tied_weights.send_gradients(batch.tied_gradients)
        for stage in sorted(pipeline.stages):
            self._receive_tied_gradients(batch, stage, buckets)
        mean = self._mean_loss(batch)
        # Messages are ordered within a channel, but not between channels. The next batch must not
        # overtake messages of this one.
        pipeline.settle()
        return mean

    def reset(self) -> None:
        """Discard a failed batch, so that its late messages cannot reach the next batch."""
        self._pipeline.reset()
        self._is_trial_done = False

    def _run_trial(self, batch: _PipelineBatch, refusal: Refusal) -> None:
        """Run the program once without computing, to open the channels that it needs. Collective.

        Raises ParameterAccess on all ranks if code outside all layers uses a parameter whose values
        exist only during forward passes.
        """
        # If there were no trial run, only the owner would raise an error, and the other ranks would
        # wait for it.
        if self._is_trial_done:
            return
        run = StageRun(frozenset(), scheduled=True, is_trial=True)
        seed_everything(batch.seed)
        with self._pipeline.running(run), torch.enable_grad():
            self._check_loss(batch.loss_of(*batch.parts[0][1]))
        if run.outside_uses:
            # Each rank may reject a different parameter. All ranks raise the first message.
            refusals = self._pipeline.group.gather_plain(refusal(run.outside_uses))
            if any(refusals):
                raise ParameterAccess(next(filter(None, refusals)))
        self._is_trial_done = True

    def _check_loss(self, loss: Any) -> StageTensor:
        if not isinstance(loss, StageTensor):
            shown = type(loss).__name__
            raise UsageError(
                f"engine.forward_backward: loss_of returned a {shown} that no layer of the model "
                "computed. It must take the batch, call the model and return the loss: "
                "lambda x, y: F.cross_entropy(model(x), y)."
            )
        if loss.numel() != 1 or not loss.dtype.is_floating_point:
            raise UsageError(
                "engine.forward_backward: loss_of must return a scalar loss, the mean over the "
                f"items of its micro-batch, not {loss.dtype} of shape {tuple(loss.shape)}."
            )
        return loss

    def _forward(self, batch: _PipelineBatch, action: Action) -> None:
        pipeline, stage = self._pipeline, action.stage
        run = StageRun(frozenset([stage]), scheduled=True)
        # Use the same seed on every stage, because each stage runs the complete program and must
        # draw the same random numbers outside the layers.
        seed = seed_from(batch.seed, "micro", action.micro)
        seed_everything(seed)
        pipeline.seed_forward(seed)
        _, part, share = batch.parts[action.micro]
        self._note_share(share)
        with pipeline.running(run):
            loss = self._check_loss(batch.loss_of(*part))
        batch.loss_stage = loss.stage
        value = loss.value if loss.stage == stage else None
        if value is not None:
            batch.losses[action.micro] = value.detach()
            if batch.look_at is not None:
                batch.look_at(value, action.micro)
        batch.passes[stage, action.micro] = _MicroBatchPass(run, loss.dtype, value)

    def _backward(
        self, batch: _PipelineBatch, action: Action, among: frozenset[int] | None, *, is_last: bool
    ) -> None:
        weight, _, share = batch.parts[action.micro]
        loss = batch.passes[action.stage, action.micro].loss
        with self._crossing(loss, weight, share) as counts:
            self._backward_of(batch, action, among, counts, is_last=is_last)

    def _backward_of(
        self,
        batch: _PipelineBatch,
        action: Action,
        among: frozenset[int] | None,
        counts: float | Tensor,
        *,
        is_last: bool,
    ) -> None:
        stage = action.stage
        micro = batch.passes[stage, action.micro]
        weight, _, share = batch.parts[action.micro]
        if action.kind != "W":
            self._prepare_backward(batch, micro, weight, share)
        assert micro.backward is not None
        in_one_piece = (
            action.kind == "I" and bool(micro.run.received) and micro.backward.is_in_one_piece
        )
        if action.kind == "I" and not in_one_piece:
            # Run only the first half, because the previous stage waits for it. "W" runs the second
            # half.
            if micro.run.received:
                micro.backward.input_backward()
                self._send_input_gradients(micro.run)
            return
        # A pass that cannot be split stays until its "W", which completes the stage's accounting.
        if not in_one_piece:
            # Dropping the pass frees its graph after the backward pass.
            del batch.passes[stage, action.micro]
        with batch.collect(
            counts,
            micro.factor,
            last=is_last and batch.last,
            by_hand=micro.backward.writes_grads_itself,
            among=among,
        ):
            # If the pass ran in one piece, nothing is left for its second half. But it may still be
            # the last action of the step, after which buckets are launched.
            if not micro.backward.is_done:
                micro.backward.weight_backward()
                if not micro.backward.inputs_done:
                    self._send_input_gradients(micro.run)
                    micro.backward.inputs_done = True
        self._keep_tied_gradients(batch, counts, micro.factor)

    def _receive_tied_gradients(
        self, batch: _PipelineBatch, stage: int, buckets: BucketsByKey
    ) -> None:
        """Collect the gradients of weights that stage `stage` owns and other ranks use.

        Each of these ranks has summed its gradients over micro-batches.
        """
        grads = self._pipeline.tied_weights.receive_gradients(stage)
        if not grads:
            return
        shared = set(self._pipeline.tied_weights.owned_by(stage))
        tied = buckets(lambda p: int(p in shared))[1]
        with batch.collect(1.0, 1.0, last=batch.last, among=tied, usual=False):
            parameters, values = zip(*grads, strict=True)
            # A backward pass that starts at the weights themselves runs their gradient hooks.
            torch.autograd.backward(parameters, values)

    def _prepare_backward(
        self, batch: _PipelineBatch, micro: _MicroBatchPass, weight: float, share: float
    ) -> None:
        """Set up the backward pass of `micro`, and receive the gradients of its roots."""
        roots: list[Tensor] = []
        grads: list[Tensor] = []
        like = torch.empty((), dtype=micro.dtype, device=self._pipeline.device)
        seed, micro.factor = self._weighting.seed(like, weight, share)
        if micro.loss is not None:
            roots.append(micro.loss)
            grads.append(seed.view_as(micro.loss))
        for source, target, value in micro.run.sent:
            roots.append(value)
            grads.append(self._pipeline.receive_gradient(source, target, value))
        # The gradients of the sent values have arrived, which proves that the values were received.
        self._pipeline.release_sent(micro.run)
        leaves = [leaf for _, _, leaf in micro.run.received]
        inputs = None if batch.inputs is None else [*batch.inputs, *leaves]
        micro.backward = SplitBackward(
            roots, grads, leaves, self._pipeline.trained_parameters, inputs
        )

    def _send_input_gradients(self, run: StageRun) -> None:
        for source, target, leaf in run.received:
            self._pipeline.send_gradient(source, target, leaf)

    def _keep_tied_gradients(
        self, batch: _PipelineBatch, weight: float | Tensor, factor: float | Tensor
    ) -> None:
        """Accumulate the gradients of weights that other ranks own.

        They are sent after the last micro-batch.
        """
        for parameter in self._pipeline.tied_weights.received:
            if (grad := parameter.grad) is not None:
                parameter.grad = None
                if not weight:
                    continue  # weight 0 must cancel the gradient even if it is NaN
                grad = (grad.float() if grad.dtype in NARROW else grad) * factor
                total = batch.tied_gradients.get(parameter)
                batch.tied_gradients[parameter] = grad if total is None else total.add_(grad)

    def _mean_loss(self, batch: _PipelineBatch) -> Tensor:
        """Return the mean loss, broadcast from the rank that computed it. Collective."""
        pipeline = self._pipeline
        # Use fp64, so that rounding hardly depends on the number of micro-batches.
        weights = torch.tensor([weight for weight, *_ in batch.parts], dtype=torch.float64)
        losses = torch.zeros(
            len(batch.parts), dtype=torch.float64, device=pipeline.group.small_device
        )
        if pipeline.rank_of(batch.loss_stage) == pipeline.group.rank:
            rows = [batch.losses[micro].double() for micro in range(len(batch.parts))]
            losses.copy_(torch.stack([row.reshape(()) for row in rows]))
        pipeline.group.broadcast(losses, pipeline.rank_of(batch.loss_stage)).wait()
        # Mask the products, because a NaN in a micro-batch of weight 0 must not count.
        counted = torch.where(weights > 0, losses.cpu() * weights, 0.0)
        return counted.sum() / weights.sum() if float(weights.sum()) else counted.sum()

    # -- a plain forward, outside any schedule ---------------------------------------------

    def backward(
        self,
        loss: StageTensor,
        whole: Part,
        *,
        last: bool,
        keep_graph: bool,
        buckets: BucketsByKey,
        inputs: Sequence[Tensor] | None,
        collect: CollectGradients,
    ) -> Tensor:
        """Run the backward pass of a loss from a plain training loop, stage by stage. Collective.

        Returns the value of the loss on all ranks.
        """
        pipeline = self._pipeline
        if pipeline.partition.stages > pipeline.group.size:
            raise UsageError(
                "engine.backward does not support several stages on each worker (--schedule "
                f"{self._settings.schedule}). Write loss = engine.forward_backward(loss_of, "
                "*batch), which runs them in the right order."
            )
        if any(run.is_over for run in loss.runs):
            raise UsageError(
                "engine.backward was called on a loss whose forward has already been used by "
                "another backward. Write retain_graph=True there, or call backward once on the "
                "sum of the losses."
            )
        # A loss may depend on several forward passes. Merge their runs into a single backward pass.
        run = StageRun(pipeline.stages)
        for part in loss.runs:
            run.sent += part.sent
            run.received += part.received
            run.in_flight += part.in_flight
            part.in_flight.clear()
        micro = _MicroBatchPass(
            run, loss.dtype, loss.value if loss.stage in pipeline.stages else None
        )
        batch = _PipelineBatch(
            lambda: loss, [whole], 0, last, collect, inputs=inputs, loss_stage=loss.stage
        )
        if micro.loss is not None:
            batch.losses[0] = micro.loss.detach()
        weight, _, share = whole
        self._prepare_backward(batch, micro, weight, share)
        assert micro.backward is not None
        with (
            self._crossing(micro.loss, weight, share) as counts,
            collect(counts, micro.factor, last=last, keep_graph=keep_graph),
        ):
            micro.backward.weight_backward(keep_graph=keep_graph)
        self._send_input_gradients(run)
        self._keep_tied_gradients(batch, counts, micro.factor)
        pipeline.tied_weights.send_gradients(batch.tied_gradients)
        (stage,) = pipeline.stages
        self._receive_tied_gradients(batch, stage, buckets)
        value = self._mean_loss(batch)
        pipeline.settle()
        for part in loss.runs if not keep_graph else ():
            part.is_over = True
            part.sent.clear()
            part.received.clear()
        return value
