"""Implements `hvd.SyncBatchNorm`, which computes BatchNorm statistics across ranks.

Horovod has a module of the same name.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from shardwise.horovod.gather_scatter import allgather_async
from shardwise.horovod.operations import wait
from shardwise.horovod.process_sets import ProcessSet, global_process_set
from shardwise.model import sync_batch_norm
from shardwise.world.current_batch import CurrentBatch


class _Rows:
    """Gathers rows from all ranks of a process set."""

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set

    def of_forward(self, row: Tensor) -> tuple[Tensor, int]:
        """Gather every rank's `row` (k,) into (size, k). Return it with the call number 0."""
        return self.of_backward(row, 0), 0

    def of_backward(self, row: Tensor, call: int) -> Tensor:
        """Gather every rank's `row` (k,) into (size, k).

        All ranks must make these calls in the same order.
        """
        del call
        return wait(allgather_async(row.unsqueeze(0), None, self._process_set))  # type: ignore[no-any-return]


class SyncBatchNorm(sync_batch_norm._SyncBatchNorm):
    """BatchNorm for (N, C, ...) inputs, with training statistics across all ranks of a process set.

    Each rank's statistics are weighted by its number of rows. All ranks of the set must run their
    SyncBatchNorm modules in the same order.

    Args:
        num_features: C, the number of channels.
        eps, momentum, affine, track_running_stats: As in torch.nn.BatchNorm2d.
        process_set: The ranks whose rows are normalised together (default: all).

    Example:
        ```python
        model = nn.Sequential(nn.Conv2d(3, 8, 3), hvd.SyncBatchNorm(8), nn.ReLU())
        ```
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self._ranks = _Rows(process_set)
        self._feed = CurrentBatch()

    def _check_input_dim(self, input: Tensor) -> None:  # torch's name
        if input.ndim < 2:
            raise ValueError(
                f"SyncBatchNorm needs an input (N, C, ...), not one of {input.ndim} dimension(s)."
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary module does, so that a copy is also a SyncBatchNorm."""
        return nn.Module.__reduce_ex__(self, cast(Any, protocol))
