"""Buffers in the exact mode: each micro-shard starts from the same, and their mean goes on.

Otherwise running statistics would follow one micro-shard after the other on a rank and be
averaged over ranks, so that their bits, and more than those, depended on the number of ranks:

    start ─┬─▶ forward of micro-shard 0 ─▶ b0 ─┐
           ├─▶ forward of micro-shard 1 ─▶ b1 ─┼─▶ mean by weight ─▶ start of the next step
           └─▶ ...                             ┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shardwise.collectives import Collectives
from shardwise.model.buffers import Buffers
from shardwise.sum_tree import MicroShards


class MicroShardBuffers(Buffers):
    """The buffers of the models through the turns of a step. One forward to each backward."""

    def __init__(
        self, models: Sequence[nn.Module], group: Collectives, shards: MicroShards
    ) -> None:
        self._shards = shards
        self._turns: list[dict[int, Tensor]] = []
        self._start: dict[int, Tensor] = {}
        super().__init__(models, group, left_out=set(), alone=False)  # they have one another

    def _renumber(self, numbers: Mapping[int, int]) -> None:
        super()._renumber(numbers)
        self._start = {numbers[i]: value for i, value in self._start.items() if i in numbers}
        self._turns = [
            {numbers[i]: value for i, value in made.items() if i in numbers} for made in self._turns
        ]

    def _greet(self, index: int) -> None:
        super()._greet(index)
        buffer = self._buffer(index)
        assert buffer is not None
        self._start[index] = buffer.detach().clone()

    def remember(self) -> None:
        """Take the present values as what the micro-shards of the next step start from."""
        held = {index: self._buffer(index) for index in range(len(self._places))}
        for index, buffer in held.items():
            if buffer is not None and (index not in self._start or self._may_differ(index)):
                self._start[index] = buffer.detach().clone()
        self._turns = []
        super().remember()

    def _may_differ(self, index: int) -> bool:
        """Whether a buffer may have changed since `remember`."""
        followed = any(each.index == index for each in self._followed)
        return followed or self._mark(index) != self._seen[index]

    def before_batch(self, stand_in: bool) -> None:
        """A batch is about to be handed out: with the first of a step, take what user code has
        written since the last one as what all start from."""
        super().before_batch(stand_in)
        if not self._turns:
            self.remember()

    def after_backward(self) -> None:
        """Set aside what this micro-shard's forward made of the buffers, and go back to what it
        started from."""
        changed = {
            module
            for index, (module, _) in enumerate(self._places)
            if self._mark(index) != self._seen[index]
        }
        made: dict[int, Tensor] = {}
        for index, (module, _) in enumerate(self._places):
            buffer, start = self._buffer(index), self._start.get(index)
            if module not in changed or buffer is None:
                continue
            made[index] = buffer.detach().clone()
            if start is not None and start.shape == buffer.shape:
                with torch.no_grad():
                    buffer.copy_(start)
        self._turns.append(made)
        super().remember()

    def abandon(self) -> None:
        """Forget what the micro-shards of this step made."""
        self._turns = []

    def news(self) -> list[tuple[int, tuple[int, ...]]]:
        """Index and shape of buffers not followed yet that a micro-shard has changed."""
        known = {followed.index for followed in self._followed}
        found = {i: tuple(b.shape) for made in self._turns for i, b in made.items()}
        return [(index, shape) for index, shape in sorted(found.items()) if index not in known]

    def values(self) -> Tensor:
        """What is followed, as each turn left it, one after the other."""
        present = [self._flat(made) for made in self._turns]
        return torch.cat(present).to(self._group.small_device)

    def _flat(self, made: dict[int, Tensor]) -> Tensor:
        parts = []
        for followed in self._followed:
            buffer = made.get(followed.index, self._start.get(followed.index))
            if buffer is None or buffer.shape != followed.shape:
                parts.append(torch.full((followed.shape.numel(),), torch.nan, dtype=torch.float64))
            else:
                parts.append(buffer.reshape(-1).double().to(self._group.small_device))
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def average(self, rows: Tensor, weights: Tensor) -> None:
        """The mean over the micro-shards, in their order."""
        super().average(self._by_micro_shard(rows), self._by_micro_shard(weights))

    def _by_micro_shard(self, rows: Tensor) -> Tensor:
        """`rows` (ranks, turns x k) as (micro-shards, k)."""
        shards = self._shards
        by_turn = rows.view(shards.workers, shards.turns, rows.shape[1] // shards.turns)
        return by_turn.transpose(0, 1).reshape(shards.count, -1)
