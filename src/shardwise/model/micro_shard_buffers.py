"""Buffers in the exact mode: each micro-shard starts from the same, and their mean goes on.

Otherwise running statistics would follow one micro-shard after the other on a rank and be
averaged over ranks, so that their bits, and more than those, depended on the number of ranks:

    start ─┬─▶ forward of micro-shard 0 ─▶ b0 ─┐
           ├─▶ forward of micro-shard 1 ─▶ b1 ─┼─▶ mean by weight ─▶ start of the next step
           └─▶ ...                             ┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from shardwise.comm import Collectives
from shardwise.errors import UsageError
from shardwise.layout import fingerprints
from shardwise.layout.sum_tree import MicroShards
from shardwise.model.buffers import Buffers, write
from shardwise.world.current_batch import Batch


class MicroShardBuffers(Buffers):
    """The buffers of the models through the turns of a step. One forward to each backward."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        group: Collectives,
        shards: MicroShards,
        *,
        compares: Callable[[nn.Parameter], bool] = lambda parameter: False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._shards = shards
        self._turns: list[dict[int, Tensor]] = []
        self._start: dict[int, Tensor] = {}
        # They have one another, also on one rank.
        super().__init__(models, group, set(), alone=False, compares=compares, say=say)

    def _renumber(self, numbers: Mapping[int, int]) -> None:
        super()._renumber(numbers)
        self._start = {numbers[i]: value for i, value in self._start.items() if i in numbers}
        self._turns = [
            {numbers[i]: value for i, value in made.items() if i in numbers} for made in self._turns
        ]

    def _greet(self, index: int) -> None:
        super()._greet(index)
        buffer = self._tensor(index)
        if index in self._seen and buffer is not None:
            self._start[index] = buffer.detach().clone()

    def remember(self) -> None:
        """Take the present values as what the micro-shards of the next step start from."""
        for index in self._seen:
            buffer = self._tensor(index)
            if buffer is not None and (index not in self._start or self._has_changed(index)):
                self._start[index] = buffer.detach().clone()
        self._turns = []
        super().remember()

    def _has_changed(self, index: int) -> bool:
        """Whether a buffer is not as it was at `remember`. Bits tell of writes that torch does not
        count; on an accelerator, where the host waits for that, in some steps only."""
        if self._mark(index) != self._seen[index] or any(f.index == index for f in self._followed):
            return True
        buffer, start = self._tensor(index), self._start.get(index)
        if buffer is None or start is None or not fingerprints.can_be_taken(buffer):
            return False
        looks = buffer.device.type == "cpu" or self._compares_now
        return looks and not torch.equal(buffer, start)

    def before_batch(self, batch: Batch) -> None:
        """A batch is about to be handed out: with the first of a step, take what user code has
        written since the last one as what all start from."""
        del batch
        if not self._turns:
            self.remember()

    def after_backward(self, batch: Batch | None, own_rows: int | None = None) -> None:
        """Set aside what this micro-shard's forward made of the buffers, and go back to what it
        started from."""
        super().after_backward(batch, own_rows)
        changed = {self._places[index][0] for index in self._seen if self._has_changed(index)}
        made: dict[int, Tensor] = {}
        for index in self._seen:
            buffer, start = self._tensor(index), self._start.get(index)
            if self._places[index][0] not in changed or buffer is None:
                continue
            made[index] = buffer.detach().clone()
            if start is not None and start.shape == buffer.shape:
                with torch.no_grad():
                    write(buffer, start)
        self._turns.append(made)
        super().remember()

    def abandon(self) -> None:
        """Forget what the micro-shards of this step made."""
        super().abandon()
        self._turns = []

    def news(self) -> list[int]:
        """Buffers, by index, not followed yet that a micro-shard has changed."""
        known = {followed.index for followed in self._followed} | self._apart
        return sorted({index for made in self._turns for index in made} - known)

    def _follow(self, index: int, *, noticed: bool) -> None:
        if not noticed:  # a frozen parameter: each micro-shard went on with the one before's
            raise UsageError(
                f"--exact {self._shards.count}: forward changes the {self._name(index)}, so that "
                "a micro-shard computes with what others on its worker have made of it, and "
                "results depend on the number of workers. Make it a buffer: register_buffer(...)."
            )
        super()._follow(index, noticed=noticed)

    def shares(self, *, counts: bool = True) -> list[float]:
        """The rows of each micro-shard of this rank."""
        return [float(mine) if counts else 0.0 for mine, _ in self._window.open]

    def weighted(self, *, counts: bool = True) -> Tensor:
        """What is followed, as each turn left it, one after the other, each times its rows."""
        shares = self.shares(counts=counts)
        present = [
            self._flat(self._start | made) * share if share else torch.zeros_like(self.values())
            for made, share in zip(self._turns, shares, strict=True)
        ]
        return torch.cat(present)

    def average(self, rows: Tensor, shares: Tensor) -> None:
        """The mean over the micro-shards, in their order."""
        super().average(self._by_micro_shard(rows), self._by_micro_shard(shares))

    def _by_micro_shard(self, rows: Tensor) -> Tensor:
        """`rows` (ranks, turns x k) as (micro-shards, k)."""
        shards = self._shards
        by_turn = rows.view(shards.workers, shards.turns, rows.shape[1] // shards.turns)
        return by_turn.transpose(0, 1).reshape(shards.count, -1)
