"""Small collectives for scripts that use their own process group."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class StockGroup:
    """The ranks of a torch.distributed process group, or this process alone.

    Args:
        group: The process group. If None, the default one if it exists, else this process alone.
        device: Device of small tensors, which the group's backend must support.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        joined = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if joined else 0
        self.size = dist.get_world_size(group) if joined else 1
        on_device = joined and dist.get_backend(group) != "gloo"
        self.small_device = device if on_device else torch.device("cpu")

    def gather_rows(self, row: Tensor) -> Tensor:
        """Stack a small vector from every rank: (k,) on each rank becomes (size, k). Blocks."""
        if self.size == 1:
            return row[None]
        rows = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(rows, row, group=self._group)
        return torch.stack(rows)

    def read(self, rows: Tensor) -> Tensor:
        return rows.cpu()

    def gather_plain(self, value: Any) -> list[Any]:
        """Return every rank's JSON `value`."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor([data.numel()], dtype=torch.int64, device=self.small_device)
        lengths = self.gather_rows(length).flatten().tolist()
        # all_gather needs the same shape on all ranks.
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self.small_device)
        padded[: data.numel()] = data.to(self.small_device)
        rows = self.gather_rows(padded).cpu()
        return [
            json.loads(row[:length].numpy().tobytes())
            for row, length in zip(rows, lengths, strict=True)
        ]

    def copy_from(self, source: int, value: Tensor) -> None:
        """Copy rank `source`'s `value` to every rank, in place."""
        if self.size > 1:
            sent = value.to(self.small_device, copy=True)
            dist.broadcast(sent, group=self._group, group_src=source)
            value.copy_(sent)
