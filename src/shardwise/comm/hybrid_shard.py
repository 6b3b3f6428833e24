"""Transport for states that are sharded within a host and replicated across hosts.

Each rank holds one interval of the state, and every host holds the full state. Therefore only sums
are sent between hosts: each rank all-reduces its interval with the ranks that have the same index
on the other hosts, as in ZeRO++ (https://arxiv.org/abs/2306.10209) and FSDP's hybrid sharding.
16-bit sums are rounded twice, once within a host and once between hosts:

    host 0   rank 0 | rank 1        reduce-scatter and all-gather inside
                ▲        ▲
                ▼        ▼          all-reduce of an interval between
    host 1   rank 2 | rank 3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.comm.base import Collectives, Cuts, Handle
from shardwise.comm.ordered_sums import PLAIN, Sum
from shardwise.comm.same_host import host_key, ranks_by_host
from shardwise.errors import ConfigError


class HybridShard(Collectives):
    """Collectives that shard within this host, and sum gradients across hosts.

    `rank` and `size` refer to this host's ranks. `copies` is the number of hosts.
    """

    def __init__(self, inside: Collectives, between: Collectives) -> None:
        super().__init__(inside.rank, inside.size, inside.status_server)
        self.name = f"{inside.name} within a host, {between.name} between"
        self.copies = between.size
        self.sums_onto = inside.sums_onto
        self._inside = inside
        self._between = between

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, forkable: bool = False
    ) -> Tensor:
        return self._inside.allocate(numel, dtype, device, forkable=forkable)

    def common(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        return self._inside.common(numel, dtype, device)

    def all_reduce(self, buffer: Tensor, how: Sum = PLAIN) -> Handle:
        assert not how.in_tree, "refused in the exact mode"
        first = self._inside.all_reduce(buffer, how.partial)
        return self._then_between(first, first.reusable, buffer, how)

    def reduce_scatter(
        self, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN, *, into: Tensor | None = None
    ) -> Handle:
        assert not how.in_tree, "refused in the exact mode"
        own = buffer[cuts[self.rank] : cuts[self.rank + 1]] if into is None else into
        first = self._inside.reduce_scatter(buffer, cuts, how.partial, into=into)
        return self._then_between(first, first.wait, own, how)

    def reduce_scatter_onto(
        self, own: Tensor, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN
    ) -> Handle:
        assert not how.in_tree, "refused in the exact mode"
        first = self._inside.reduce_scatter_onto(own, buffer, cuts, how.partial)
        return self._then_between(first, first.wait, own, how)

    def _then_between(
        self, first: Handle, free: Callable[[], None], own: Tensor, how: Sum
    ) -> Handle:
        """Sum `own` across hosts once `first` has completed and `free` has returned.

        Once `free` has returned, no other rank on this host reads `own`.
        """
        second: list[Handle] = []

        def advance() -> None:
            first.wait()
            free()
            second.append(self._between.all_reduce(own, how))
            if self._between.in_one_order:
                # An all-reduce may consist of two calls, and ranks wait for their buckets at
                # different times. If the second call were made during the wait, it could precede
                # the next bucket's first call on one rank and follow it on another.
                second[0].advance()

        def finish() -> None:
            second[0].wait()
            first.reusable()

        return Handle(finish, advance)

    def all_gather(self, buffer: Tensor, cuts: Cuts) -> Handle:
        return self._inside.all_gather(buffer, cuts)

    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        return self._inside.broadcast(buffer, source)

    def gather_rows(self, row: Tensor) -> Tensor:
        return self._inside.gather_rows(row)

    def barrier(self) -> None:
        self._inside.barrier()

    def second_group(self) -> Collectives:
        return self._inside.second_group()

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        return self._inside.split(groups)

    @property
    def small_device(self) -> torch.device:
        return self._inside.small_device

    def close(self) -> None:
        self._inside.close()
        self._between.close()


def shard_within_hosts(group: Collectives) -> Collectives:
    """Return this host's ranks as a `HybridShard`, or `group` if it has one host. Collective.

    Raises ConfigError if hosts have different numbers of ranks.
    """
    hosts = ranks_by_host(group.gather_plain(host_key()))
    if len(hosts) == 1:
        return group
    if len({len(ranks) for ranks in hosts}) > 1:
        counts = ", ".join(str(len(ranks)) for ranks in hosts)
        raise ConfigError(
            "--shard-within host needs the same number of ranks on every host, and these hosts "
            f"have {counts}. Start equal numbers, or shard over all ranks: --shard-within all."
        )
    places = [list(ranks) for ranks in zip(*hosts, strict=True)]
    return HybridShard(group.split(hosts), group.split(places))
