"""Makes buffers independent of the number of ranks, in the exact mode.

Every micro-shard starts from the same buffer values. The weighted mean of the resulting values is
the start of the next step. Otherwise, each micro-shard would update the running statistics left by
the preceding one on the same rank, and results would depend on the number of ranks.

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
    """Averages the models' buffers over the micro-shards of a step.

    Requires exactly one forward pass per backward pass.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        group: Collectives,
        shards: MicroShards,
        *,
        compares: Callable[[nn.Parameter], bool] = lambda parameter: False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        # Set these first, because super().__init__ calls `_watch`.
        self._shards = shards
        self._turns: list[dict[int, Tensor]] = []
        self._start: dict[int, Tensor] = {}
        # `alone` is False even on one rank, because its micro-shards are averaged with each other.
        super().__init__(models, group, set(), alone=False, compares=compares, say=say)

    def _renumber(self, numbers: Mapping[int, int]) -> None:
        super()._renumber(numbers)
        self._start = {numbers[i]: value for i, value in self._start.items() if i in numbers}
        self._turns = [
            {numbers[i]: value for i, value in results.items() if i in numbers}
            for results in self._turns
        ]

    def _watch(self, index: int) -> None:
        super()._watch(index)
        buffer = self._tensor(index)
        if index in self._seen and buffer is not None:
            self._start[index] = buffer.detach().clone()

    def remember(self) -> None:
        """Use the current values as the starting point of the next step's micro-shards."""
        for index in self._seen:
            buffer = self._tensor(index)
            if buffer is not None and (index not in self._start or self._has_changed(index)):
                self._start[index] = buffer.detach().clone()
        self._turns = []
        super().remember()

    def _has_changed(self, index: int) -> bool:
        """Return whether a buffer has changed since `remember`.

        A bitwise comparison finds writes that torch does not count. On an accelerator, the host
        would wait for its result, so the comparison runs only in some steps.
        """
        if self._mark(index) != self._seen[index] or any(f.index == index for f in self._averaged):
            return True
        buffer, start = self._tensor(index), self._start.get(index)
        if buffer is None or start is None or not fingerprints.can_be_taken(buffer):
            return False
        looks = buffer.device.type == "cpu" or self._compares_now
        return looks and not torch.equal(buffer, start)

    def before_batch(self, batch: Batch) -> None:
        """Before a step's first batch, adopt values that user code has written since the last step.

        All micro-shards start from these values.
        """
        del batch
        if not self._turns:
            self.remember()

    def after_backward(self, batch: Batch | None, own_rows: int | None = None) -> None:
        """Store the buffers that this micro-shard's forward pass has changed, and reset them."""
        super().after_backward(batch, own_rows)
        # Decide per module, because torch's batch_norm counts writes to only one of its buffers.
        changed = {self._places[index][0] for index in self._seen if self._has_changed(index)}
        results: dict[int, Tensor] = {}
        for index in self._seen:
            buffer, start = self._tensor(index), self._start.get(index)
            if self._places[index][0] not in changed or buffer is None:
                continue
            results[index] = buffer.detach().clone()
            if start is not None and start.shape == buffer.shape:
                # In place, because the module and maybe user code hold this tensor.
                with torch.no_grad():
                    write(buffer, start)
        self._turns.append(results)
        super().remember()

    def abandon(self) -> None:
        """Discard the results of this step's micro-shards."""
        super().abandon()
        self._turns = []

    def news(self) -> list[int]:
        """Return the indices of changed buffers that are not averaged yet."""
        known = {followed.index for followed in self._averaged} | self._unequal
        return sorted({index for results in self._turns for index in results} - known)

    def _average_from_now(self, index: int, *, noticed: bool) -> None:
        if not noticed:  # a frozen parameter: each micro-shard saw the previous one's changes
            raise UsageError(
                f"--exact {self._shards.count}: forward changes the {self._name(index)}, so a "
                "micro-shard depends on the micro-shards before it on the same worker, and results "
                "depend on the number of workers. Make it a buffer: register_buffer(...)."
            )
        super()._average_from_now(index, noticed=noticed)

    def shares(self, *, counts: bool = True) -> list[float]:
        """Return the number of rows in each of this rank's micro-shards (0 unless `counts`)."""
        return [float(own_rows) if counts else 0.0 for own_rows, _ in self._window.open]

    def weighted(self, *, counts: bool = True) -> Tensor:
        """Return this rank's micro-shard tensors that are to be averaged, concatenated.

        The values of each micro-shard are weighted by its row count.
        """
        shares = self.shares(counts=counts)
        # Use zeros for a stand-in, because 0 x its values would be NaN if they are infinite.
        present = [
            self._flat(self._start | results) * share if share else torch.zeros_like(self.values())
            for results, share in zip(self._turns, shares, strict=True)
        ]
        return torch.cat(present)

    def average(self, rows: Tensor, shares: Tensor) -> None:
        """Set the averaged tensors to the mean over micro-shards, in a fixed order."""
        super().average(self._by_micro_shard(rows), self._by_micro_shard(shares))

    def _by_micro_shard(self, rows: Tensor) -> Tensor:
        """Reorder `rows` from (ranks, turns x k) to (micro-shards, k)."""
        workers, count = len(rows), self._shards.count
        # In turn t, rank r ran micro-shard t * workers + r, so turns are the outer dim.
        by_turn = rows.reshape(workers, count // workers, -1)
        return by_turn.transpose(0, 1).reshape(count, -1)
