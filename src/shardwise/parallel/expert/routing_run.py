"""Connects an engine to the mixture-of-experts layers of its models.

A layer's `RoutingRun` provides the ranks with which the layer exchanges tokens and counts, and
tells it whether the current batch is a stand-in. The engine sets two values before each backward
pass:

    loss_seed   initial gradient of the router losses, which are computed inside the graph
    drops       true if this rank's loss has weight 0, so that its gradients (possibly NaN) must not
                reach the experts of other ranks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from shardwise.comm import Collectives
from shardwise.parallel.expert.expert_counts import ExpertCounts, StepCounts
from shardwise.parallel.expert.token_share import ALONE
from shardwise.world.current_batch import CurrentBatch


class RoutedLayer(Protocol):
    """Interface of the mixture-of-experts layers that a `RoutingRun` uses."""

    @property
    def has_losses(self) -> bool:
        """True if the layer has router losses in training."""

    @property
    def step_counts(self) -> StepCounts:
        """This rank's number of token copies per expert since the last update."""

    def update_bias(self, counts: Sequence[int]) -> None:
        """Update the selection bias. `counts` holds the sums over all ranks."""


@dataclass(eq=False)
class RoutingRun:
    """State that an engine's mixture-of-experts layers share: rank groups and the backward pass.

    Args:
        group: The ranks that together hold every expert once.
        everyone: All ranks that dispatch tokens of the same batch, on separate channels.
        feed: The current batch.
        lanes: The ranks of this replica that have the same tokens and each dispatch a share of
            them. Just this rank if `--tensor` is not set or experts are not split.
        own_randomness: Returns a context manager that gives this rank a random stream different
            from those of the rest of its replica.
        reports: False if another rank of the replica has counted the same tokens.
        is_exact: True if results must not depend on the number of ranks (`--exact`). `everyone` is
            then only this rank, because each micro-shard has router losses of its own.
        in_stages: True if the model's layers are on several ranks (`--pipeline`), which run layers
            of other ranks on fake tensors to learn their shapes.
        in_graphs: True if layers run inside the graphs of compiled units (compiled_experts.py).
    """

    group: Collectives
    everyone: Collectives
    feed: CurrentBatch
    lanes: Collectives = ALONE
    own_randomness: Callable[[], AbstractContextManager[None]] = nullcontext
    reports: bool = True
    is_exact: bool = False
    in_stages: bool = False
    in_graphs: bool = False
    is_empty: bool = False
    """True while a micro-batch runs that has no rows of the batch, only a stand-in."""
    loss_seed: float | Tensor = 0.0
    drops: bool | Tensor = False
    has_tokens: bool = False
    """True if a forward pass since the last backward pass routed tokens of this rank."""
    divisor: float = 0.0
    """Divisor of the summed losses of the current backward pass; 0 if losses are means."""
    layers: dict[str, RoutedLayer] = field(default_factory=dict)
    """The layers of the engine's models, by name, in the same order on all ranks."""
    summed: set[int] = field(default_factory=set)
    """Ids of the parameters whose gradients this backward pass has added up in exact mode."""

    @property
    def has_losses(self) -> bool:
        return any(layer.has_losses for layer in self.layers.values())

    @property
    def crosses(self) -> bool:
        """True if the initial gradients of losses must include the full loss weights.

        They must if gradients of different ranks meet inside the graph, or if there are router
        losses, whose weight differs from that of the rank's loss. In exact mode they always do, so
        that rounding does not depend on whether experts are split.
        """
        return self.is_split or self.has_losses or self.is_exact

    @property
    def step_counts(self) -> list[int]:
        """This rank's token copies per expert in the step, concatenated over the layers.

        All counts are 0 if another rank of the replica reports them.
        """
        counts = [count for layer in self.layers.values() for count in layer.step_counts.values]
        return counts if self.reports else [0] * len(counts)

    def stepped(self, counts: Sequence[int], *, skipped: bool) -> dict[str, ExpertCounts]:
        """Finish a step: update the selection biases unless the step was skipped.

        Args:
            counts: The sum of all ranks' `step_counts`.
            skipped: True if the step has changed no parameter.

        Returns:
            The number of token copies per expert in the step, by layer.
        """
        found, rest = {}, iter(counts)
        for name, layer in self.layers.items():
            found[name] = ExpertCounts(islice(rest, len(layer.step_counts.values)))
            if not skipped:
                layer.update_bias(found[name])
        self.abandon()
        return found

    def abandon(self) -> None:
        """Discard the counts of a step that has ended or failed."""
        self.has_tokens = self.is_empty = False
        for layer in self.layers.values():
            layer.step_counts.clear()

    @property
    def is_split(self) -> bool:
        """True if other ranks hold some of the experts."""
        return self.group.size > 1

    def is_stand_in(self, *, recording: bool) -> bool:
        """Return whether the current forward pass runs on a stand-in, whose tokens do not count.

        `recording` is True if autograd is recording.
        """
        batch = self.feed.batch_of_forward(training=recording)
        return self.is_empty or (batch is not None and batch.samples == 0)

    def note_tokens(self) -> None:
        """Record that a forward pass has routed tokens that may count in the router losses."""
        self.has_tokens = True

    @staticmethod
    def gather_counts(row: Tensor, group: Collectives) -> Tensor:
        """Gather each rank's counts, as (ranks, n) int64 on the CPU. Collective and blocking.

        Args:
            row: (n,) int64, the counts of this rank.
            group: The ranks to gather from.
        """
        # Send counts as fp64, which holds integers up to 2**53 exactly.
        sent = row.to(device=group.small_device, dtype=torch.float64)
        return group.read(group.gather_rows(sent)).to(torch.int64)

    def of_group(self, rows: Tensor) -> Tensor:
        """Return the rows of the ranks in `group`.

        `rows` has one row for each rank in `everyone`, or one for each rank in `group`.
        """
        if rows.shape[0] == self.group.size:
            return rows
        # The ranks of `group` have consecutive places among all ranks of the batch.
        first = self.everyone.rank - self.group.rank
        return rows[first : first + self.group.size]
