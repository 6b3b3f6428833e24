"""A batch on its way through the stages of a model, in micro-batches.

For each micro-batch, and for each stage that this rank has, the program of the user is run once:
what is not of that stage is skipped (parallel/pipeline). A schedule says when; gradients of what a
stage was given go back to the stage that gave it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.collectives import Collectives
from shardwise.config import Settings
from shardwise.engine.exact_mean import Seeds
from shardwise.errors import DataError, UsageError
from shardwise.layout import even_cuts
from shardwise.model.precision import NARROW
from shardwise.nested_batch import Rows
from shardwise.parallel.pipeline import (
    Action,
    Line,
    Piece,
    Run,
    order_of,
)
from shardwise.parallel.pipeline import (
    split_backward as halves,
)
from shardwise.randomness import seed_everything, seed_from

SPREAD = 4
"""Micro-batches for each worker of a line, where nothing is said: a fifth of the time is lost."""


def count_of(settings: Settings, batch: Any, group: Collectives) -> int:
    """Into how many micro-batches `batch` is cut, alike in the replicas, of which `group` has this
    rank's twins. Collective where that is to be found out."""
    if settings.microbatches is not None:
        return settings.microbatches
    size = settings.pipeline
    if size == 1:
        return 1
    told = torch.tensor([float(rows_of(batch))], device=group.small_device)
    most = int(group.gather_rows(told).max())
    return max(1, min(SPREAD, most // size)) * size


def parts_of(batch: Any, count: int) -> list[tuple[int, Any]]:
    """`batch` in `count` parts of nearly equal size, with the rows of each; where there are fewer
    rows, parts with none of them have one row to run with."""
    found = _rows(batch)
    cuts = even_cuts(found.total, count)
    return [(end - first, found.taken(first, end)) for first, end in pairwise(cuts)]


def rows_of(batch: Any) -> int:
    """How many rows a batch has. Raises UsageError where that cannot be told."""
    return _rows(batch).total


def _rows(batch: Any) -> Rows:
    try:
        return Rows(batch, call="engine.forward_backward(loss_of, *batch)")
    except DataError as error:
        raise UsageError(
            f"{error} It cuts the batch into micro-batches: give what is not cut to loss_of in "
            "another way."
        ) from None


Buckets = Callable[[Callable[[nn.Parameter], int]], Mapping[int, frozenset[int]]]
"""By a key of parameters the numbers of the buckets that have such ones."""

Telling = Callable[[int | None], None]
"""Says which stage runs from now on; None when no schedule does."""


class Collecting(Protocol):
    """Inside the block gradients are taken in: of the buckets `among`, if given; of a backward
    that is not `usual` it is not learned which ones come."""

    def __call__(
        self,
        weight: float,
        factor: float | Tensor,
        *,
        last: bool,
        keep_graph: bool = False,
        by_hand: bool = False,
        among: frozenset[int] | None = None,
        usual: bool = True,
    ) -> AbstractContextManager[None]: ...


@dataclass(eq=False)
class _Pass:
    """A micro-batch on a stage, from its forward to the end of its backward."""

    run: Run
    dtype: torch.dtype
    loss: Tensor | None
    halves: halves.Halves | None = None
    factor: float | Tensor = 1.0


@dataclass(eq=False)
class _Call:
    """A batch on its way through the stages."""

    loss_of: Callable[..., Tensor]
    parts: Sequence[tuple[float, Any]]
    """By micro-batch its weight and what `loss_of` takes."""
    seed: int
    last: bool
    """Whether nothing more comes in this step."""
    collecting: Collecting
    passes: dict[tuple[int, int], _Pass] = field(default_factory=dict)
    inputs: Sequence[Tensor] | None = None
    """What gradients are made of, where the graph may reach further."""
    borrowed: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    home: int = 0


class Pipelining:
    """Runs batches through `line`."""

    def __init__(self, line: Line, settings: Settings, seeds: Seeds) -> None:
        self._line = line
        self._settings = settings
        self._seeds = seeds
        self._tried = False

    def train(
        self,
        loss_of: Callable[..., Tensor],
        parts: Sequence[tuple[float, Any]],
        *,
        seed: int,
        last: bool,
        buckets: Buckets,
        inputs: Sequence[Tensor] | None,
        telling: Telling,
        collecting: Collecting,
    ) -> Tensor:
        """Forward and backward of all `parts`; returns their mean loss, in fp64, on all ranks."""
        line, cut = self._line, self._line.cut
        rank, ranks = line.group.rank, line.group.size
        order = order_of(self._settings.schedule, ranks, cut.stages, len(parts), rank)
        call = _Call(loss_of, parts, seed, last, collecting, inputs=inputs)
        line.loans.changed()  # whatever user code has written since
        self._seeds.begin(sum(weight for weight, _ in parts))
        self._try(call)
        ends = {a.stage: n for n, a in enumerate(order) if a.kind in "BW"}
        several = len(line.stages) > 1
        apart = several and not line.shares_at_home
        among = buckets(lambda p: cut.owners[p]) if apart else {}
        for number, action in enumerate(order):
            telling(action.stage if several else None)
            if action.kind == "F":
                self._forward(call, action)
            else:
                is_last = ends[action.stage] == number
                self._backward(call, action, among.get(action.stage), is_last=is_last)
        telling(None)
        line.loans.give_back(call.borrowed)  # before any waits: two ranks may lend to each other
        for stage in sorted(line.stages):
            self._take_back(call, stage, buckets)
        mean = self._mean(call)
        line.settle()
        return mean

    def abandon(self) -> None:
        """A batch has failed on its way: what is still to come of it must not be taken for that of
        another."""
        self._line.reset()
        self._tried = False

    def _try(self, call: _Call) -> None:
        """Once, find out what goes between which stages, and open the ways for it. Collective."""
        if self._tried:
            return
        run = Run(frozenset(), planned=True, trying=True)
        seed_everything(call.seed)
        with self._line.running(run), torch.enable_grad():
            self._checked(call.loss_of(*call.parts[0][1]))
        self._tried = True

    def _checked(self, loss: Any) -> Piece:
        if not isinstance(loss, Piece):
            shown = type(loss).__name__
            raise UsageError(
                f"engine.forward_backward: loss_of returned a {shown} that no layer of the model "
                "has made. It takes the batch, calls the model and returns the loss: "
                "lambda x, y: F.cross_entropy(model(x), y)."
            )
        if loss.numel() != 1 or not loss.dtype.is_floating_point:
            raise UsageError(
                "engine.forward_backward: loss_of returns a scalar loss, a mean over the items of "
                f"its micro-batch, not {loss.dtype} of shape {tuple(loss.shape)}."
            )
        return loss

    def _forward(self, call: _Call, action: Action) -> None:
        line, stage = self._line, action.stage
        run = Run(frozenset([stage]), planned=True)
        seed = seed_from(call.seed, "micro", action.micro)
        seed_everything(seed)
        line.begin(seed)
        with line.running(run):
            loss = self._checked(call.loss_of(*call.parts[action.micro][1]))
        call.home = loss.home
        value = loss.value if loss.home == stage else None
        if value is not None:
            call.losses[action.micro] = value.detach()
        call.passes[stage, action.micro] = _Pass(run, loss.dtype, value)

    def _backward(
        self, call: _Call, action: Action, among: frozenset[int] | None, *, is_last: bool
    ) -> None:
        stage = action.stage
        one, weight = call.passes[stage, action.micro], call.parts[action.micro][0]
        if action.kind != "W":
            self._fetch(call, one, weight)
        if action.kind == "I":
            self._give(one)
            return
        assert one.halves is not None
        del call.passes[stage, action.micro]
        with call.collecting(
            weight,
            one.factor,
            last=is_last and call.last,
            by_hand=one.halves.puts_by_hand,
            among=among,
        ):
            one.halves.finish()
            if not one.halves.is_half:
                self._send_back(one.run)
        self._take_borrowed(call, weight, one.factor)

    def _take_back(self, call: _Call, stage: int, buckets: Buckets) -> None:
        """Take in the gradients of what `stage` has lent: sums over all micro-batches."""
        grads = self._line.loans.take_back(stage)
        if not grads:
            return
        lent = set(self._line.loans.of(stage))
        tied = buckets(lambda p: int(p in lent))[1]
        with call.collecting(1.0, 1.0, last=call.last, among=tied, usual=False):
            several, values = zip(*grads, strict=True)
            torch.autograd.backward(several, values)

    def _fetch(self, call: _Call, one: _Pass, weight: float) -> None:
        """The roots of a backward, and the gradients that it starts from."""
        roots: list[Tensor] = []
        grads: list[Tensor] = []
        like = torch.empty((), dtype=one.dtype, device=self._line.device)
        seed, one.factor = self._seeds.seed(like, weight)
        if one.loss is not None:
            roots.append(one.loss)
            grads.append(seed.view_as(one.loss))
        for source, target, value in one.run.sent:
            roots.append(value)
            grads.append(self._line.gradient(source, target, value))
        self._line.arrived(one.run)
        leaves = [leaf for _, _, leaf in one.run.received]
        inputs = None if call.inputs is None else [*call.inputs, *leaves]
        one.halves = halves.Halves(roots, grads, leaves, self._line.trained, inputs)

    def _give(self, one: _Pass) -> None:
        """The first half of a backward, for what waits for it."""
        assert one.halves is not None
        if one.run.received:
            one.halves.begin()
            self._send_back(one.run)

    def _send_back(self, run: Run) -> None:
        for source, target, leaf in run.received:
            self._line.return_gradient(source, target, leaf)

    def _take_borrowed(self, call: _Call, weight: float, factor: float | Tensor) -> None:
        """Keep the gradients of what another rank trains until they are complete."""
        for parameter in self._line.loans.borrowed:
            if (grad := parameter.grad) is not None:
                parameter.grad = None
                if not weight:
                    continue  # whatever it is, it counts for nothing
                grad = (grad.float() if grad.dtype in NARROW else grad) * factor
                held = call.borrowed.get(parameter)
                call.borrowed[parameter] = grad if held is None else held.add_(grad)

    def _mean(self, call: _Call) -> Tensor:
        """The mean loss, told by the rank that has it. Collective."""
        line = self._line
        weights = torch.tensor([weight for weight, _ in call.parts], dtype=torch.float64)
        told = torch.zeros(len(call.parts), dtype=torch.float64, device=line.group.small_device)
        if line.rank_of(call.home) == line.group.rank:
            rows = [call.losses[micro].double() for micro in range(len(call.parts))]
            told.copy_(torch.stack([row.reshape(()) for row in rows]))
        line.group.broadcast(told, line.rank_of(call.home)).wait()
        counted = torch.where(weights > 0, told.cpu() * weights, 0.0)
        return counted.sum() / weights.sum() if float(weights.sum()) else counted.sum()

    # -- a forward that nobody has planned ------------------------------------------------

    def backward(
        self,
        loss: Piece,
        weight: float,
        *,
        last: bool,
        keep_graph: bool,
        buckets: Buckets,
        inputs: Sequence[Tensor] | None,
        collecting: Collecting,
    ) -> Tensor:
        """Backward of a loss that a plain loop has made, stage after stage; returns its value."""
        line = self._line
        if line.cut.stages > line.group.size:
            raise UsageError(
                "engine.backward with several stages on each worker (--schedule "
                f"{self._settings.schedule}): write loss = engine.forward_backward(loss_of, "
                "*batch), which knows their order."
            )
        if any(run.is_over for run in loss.runs):
            raise UsageError(
                "engine.backward of a loss whose forward another backward has used up: write "
                "retain_graph=True there, or give the sum of the losses to one backward."
            )
        run = Run(line.stages)
        for part in loss.runs:
            run.sent += part.sent
            run.received += part.received
            run.flying += part.flying
            part.flying.clear()
        one = _Pass(run, loss.dtype, loss.value if loss.home in line.stages else None)
        call = _Call(
            lambda: loss, [(weight, ())], 0, last, collecting, inputs=inputs, home=loss.home
        )
        if one.loss is not None:
            call.losses[0] = one.loss.detach()
        self._fetch(call, one, weight)
        assert one.halves is not None
        with collecting(weight, one.factor, last=last, keep_graph=keep_graph):
            one.halves.finish(keep_graph=keep_graph)
        self._send_back(run)
        self._take_borrowed(call, weight, one.factor)
        line.loans.give_back(call.borrowed)
        (stage,) = line.stages
        self._take_back(call, stage, buckets)
        value = self._mean(call)
        line.settle()
        for part in loss.runs if not keep_graph else ():
            part.is_over = True
            part.sent.clear()
            part.received.clear()
        return value
