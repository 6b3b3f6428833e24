"""Implements collectives over the participating elastic islands, whose number may change.

    ElasticRun     all ranks: the transport within this island, IslandLink between islands
    ElasticPeers   the ranks with the same index in all islands: IslandLink only

Each call is one exchange (membership.py). If an island fails, either all other islands receive its
contribution, or none of them does. `rank` and `size` reflect only the islands that currently take
part.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from shardwise.comm import OnMeeting, connect
from shardwise.comm.base import Collectives, Cuts, GroupRanks, Handle, check_groups
from shardwise.comm.ordered_sums import PLAIN, Sum
from shardwise.config import Settings
from shardwise.errors import CollectiveError, ConfigError, UsageError
from shardwise.islands.elastic import membership
from shardwise.islands.elastic.link import Bytes, IslandLink, IslandsChanged
from shardwise.islands.elastic.membership import BEGINS, BOUNDARY, ranks_here
from shardwise.net import authentication
from shardwise.net.identity import Identity

T = TypeVar("T")

_PICKLES = "an object of elastic islands"
"""The purpose of sealed pickles. Pickles can run code, and are sent between hosts."""


class _LinkCollectives(Collectives):
    """Base class of collectives between elastic islands.

    `island` is the group of this island's ranks. `link` connects this rank to the other islands.
    """

    has_changing_ranks = True

    def __init__(self, island: Collectives, link: IslandLink) -> None:
        self.island = island
        self.link = link
        self.status_server = island.status_server

    @property
    def is_outside(self) -> bool:
        """True while the other islands train without this one."""
        return self.link.outside

    @property
    def small_device(self) -> torch.device:
        return self.island.small_device

    def _swap(self, label: str, tensor: Tensor) -> list[Tensor]:
        """All-gather `tensor` from all islands. All ranks must pass the same shape and dtype."""
        flat = tensor.detach().cpu().contiguous().view(-1)
        mine = _bytes(flat)
        _, rows = self.link.exchange(label, mine)
        # Unlike transports, the launcher forwards any bytes, so check the sizes here.
        if any(len(row) != len(mine) for row in rows):
            raise UsageError(
                f"Islands contributed {', '.join(str(len(row)) for row in rows)} bytes to {label}. "
                "All must pass tensors of the same shape and dtype."
            )
        return [_tensor(row, tensor) for row in rows]

    def _gather_sealed(self, label: str, value: Any) -> list[Any]:
        """All-gather a picklable `value` from all participating islands."""
        # Loading a pickle can run code, and these are forwarded by other processes and hosts.
        secret = self.status_server.secret
        mine = authentication.sealed(secret, _PICKLES, pickle.dumps(value))
        _, rows = self.link.exchange(label, mine)
        try:
            return [
                pickle.loads(authentication.unsealed(secret, _PICKLES, bytes(row))) for row in rows
            ]
        except authentication.Forged as error:
            raise CollectiveError(
                f"A message in {label} was not sent by this run ({error}) See docs/security.md."
            ) from None

    def _from_first(self, buffer: Tensor, what: str, *, alone: bool) -> Handle:
        """Broadcast `buffer` from the first island."""
        flat = buffer.detach().cpu().contiguous().view(-1).view(torch.uint8)
        mine = _bytes(flat) if self.link.index == 0 else b""
        _, rows = self.link.exchange(what, mine, alone=alone)
        if len(rows[0]) != flat.numel():
            raise CollectiveError(f"The island that starts {what} has failed. Start the run again.")
        if self.link.index:
            buffer.copy_(_tensor(rows[0], buffer).view(buffer.shape))
        return Handle()

    def steadily(self, work: Callable[[], T]) -> T:
        if self.link.is_steady:
            return work()
        while True:
            try:
                with self.link.steady():
                    return work()
            except IslandsChanged:  # raised on all participating ranks, so all repeat the work
                continue

    def reduce_scatter(
        self, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN, *, into: Tensor | None = None
    ) -> Handle:
        self._refuse("a reduce-scatter")

    def second_group(self) -> Collectives:
        self._refuse("a second group for another thread")

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what.capitalize()} over all islands is not supported with --elastic-islands, "
            "because islands may fail meanwhile. Remove the flag."
        )


class ElasticPeers(_LinkCollectives):
    """The ranks with the same index in all participating islands."""

    name = "elastic islands"

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.link.index

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self.link.members)

    @property
    def places(self) -> Sequence[int]:
        return self.link.members

    def gather_at_once(self, step: int, mine: Tensor) -> list[Tensor]:
        """All-gather `mine` (flat uint8) after step `step`, in the order of the islands.

        All ranks of all participating islands must call it.
        """
        return self._swap(f"{BOUNDARY} after step {step}", mine)

    def gather_rows(self, row: Tensor) -> Tensor:
        return torch.stack(self._swap("an exchange of islands' rows", row)).to(row.device)

    def gather_objects(self, value: Any) -> list[Any]:
        return self._gather_sealed("an exchange of islands", value)

    def _gather_bytes(self, mine: bytes) -> list[bytes]:
        return [bytes(row) for row in self.link.exchange("an exchange of islands", mine)[1]]

    def all_gather(self, buffer: Tensor, cuts: Cuts) -> Handle:
        self._refuse("an all-gather")

    def all_reduce(self, buffer: Tensor, how: Sum = PLAIN) -> Handle:
        self._refuse("an all-reduce")

    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        assert source == 0, "only the first island broadcasts"
        return self._from_first(buffer, "a broadcast between islands", alone=True)

    def barrier(self) -> None:
        self.link.exchange("a barrier of islands", b"")

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        self._refuse("a group of some")

    def close(self) -> None:
        return


class ElasticRun(_LinkCollectives):
    """All ranks of all participating islands."""

    def __init__(self, island: Collectives, link: IslandLink) -> None:
        super().__init__(island, link)
        self.name = f"{island.name}, elastic between islands"
        self._has_returned_island = False
        """True once `split` has returned the island's own group.

        Later splits create new groups, because their collectives may run in a different order.
        """

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.link.index * self.island.size + self.island.rank

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self.link.members) * self.island.size

    @property
    def leads(self) -> bool:
        """True if this rank prints messages for the whole run."""
        return not self.is_outside and self.rank == 0

    def watch_members(self, changed: Callable[[], None]) -> None:
        self.link.changed = changed

    def begin(self) -> None:
        """Record that all islands start training with identical weights.

        Afterwards, the run survives the failure of an island.
        """
        self.link.exchange(f"{BEGINS} of training", b"")

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, forkable: bool = False
    ) -> Tensor:
        return self.island.allocate(numel, dtype, device, forkable=forkable)

    def gather_rows(self, row: Tensor) -> Tensor:
        inside = self.island.gather_rows(row)
        blocks = self._swap("an exchange of rows", inside)
        return torch.cat([block.view(inside.shape) for block in blocks]).to(inside.device)

    def gather_objects(self, value: Any) -> list[Any]:
        inside = self.island.gather_objects(value)
        rows = self._gather_sealed("an exchange of all ranks", inside)
        return [each for row in rows for each in row]

    def gather_plain(self, value: Any) -> list[Any]:
        # Use JSON, which cannot run code and therefore needs no seal.
        inside = json.dumps(self.island.gather_plain(value)).encode()
        rows = self.link.exchange("an exchange of all ranks", inside)[1]
        return [each for row in rows for each in json.loads(bytes(row))]

    def all_reduce(self, buffer: Tensor, how: Sum = PLAIN) -> Handle:
        if how is not PLAIN:
            self._refuse("a sum in one order")
        self.island.all_reduce(buffer).wait()
        # Each rank's buffer now holds its island's sum. Add the sums of the other islands.
        parts = self._swap("a sum over all ranks", buffer)
        # Not in place, because the first part may share memory with `buffer`. Add in the order of
        # the islands, so that the result is bit-identical everywhere.
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        buffer.copy_(total.view(buffer.shape))
        return Handle()

    def all_gather(self, buffer: Tensor, cuts: Cuts) -> Handle:
        self._refuse("an all-gather")

    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        if source:
            self._refuse(f"a broadcast from rank {source}")

        # If islands change in the meantime, another island may become the first, so all repeat
        # this.
        def broadcast_first() -> Handle:
            if self.link.index == 0:
                self.island.broadcast(buffer).wait()
            return self._from_first(buffer, "a broadcast", alone=False)

        return self.steadily(broadcast_first)

    def barrier(self) -> None:
        self.island.barrier()
        self.link.exchange("a barrier", b"")

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        """Split into groups within islands, or into one group of peers per index."""
        place = self.link.place
        check_groups(groups, place.count * place.size)
        mine = range(place.first, place.first + place.size)
        peers = [
            list(range(each, place.count * place.size, place.size)) for each in range(place.size)
        ]
        # A group that spans islands is supported only if it consists of all peers.
        if sorted(map(sorted, groups)) == peers:
            return ElasticPeers(self.island, self.link)
        inside = [
            [rank - place.first for rank in group] for group in groups if set(group) <= set(mine)
        ]
        if inside == [list(range(place.size))] and not self._has_returned_island:
            self._has_returned_island = True
            return self.island
        if any(set(group) & set(mine) and not set(group) <= set(mine) for group in groups):
            self._refuse("a group of some ranks")
        return self.island.split(inside)

    def close(self) -> None:
        self.island.close()
        self.link.close()


def _bytes(flat: Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _tensor(data: Bytes, like: Tensor) -> Tensor:
    """Return a flat tensor over `data` with the dtype of `like`."""
    if not len(data):
        return torch.empty(0, dtype=like.dtype)
    # torch.frombuffer warns about read-only memory.
    writable = data if isinstance(data, bytearray) else bytearray(data)
    return torch.frombuffer(writable, dtype=torch.uint8).view(like.dtype)


def join(
    identity: Identity,
    device: torch.device,
    settings: Settings,
    on_meeting: OnMeeting | None,
) -> Collectives:
    """Connect to this island's ranks, and through the launcher to all other islands.

    `shardwise.init` calls this function instead of `comm.connect` if workers.py has named it in the
    environment. Raises ConfigError if the script sets a different number of islands than the
    launcher.
    """
    place = membership.read(os.environ)
    assert place is not None, "the launcher sets the place together with the join function"
    if place.count != settings.islands:
        raise ConfigError(
            f"shardwise run --elastic-islands was started with {place.count} islands, but the "
            f"script sets {settings.islands}. Set --islands only on the command line."
        )
    island = range(place.first, place.first + place.size)
    here = ranks_here(island, identity.rank - identity.local_rank, identity.local_size)
    # Within its island, a rank is numbered as in a run that has only this island.
    island_identity = replace(
        identity,
        rank=island.index(identity.rank),
        size=place.size,
        local_rank=here.index(identity.rank),
        local_size=len(here),
    )
    group = connect(
        island_identity,
        device,
        settings.timeout,
        settings.transport,
        settings.rendezvous,
        on_meeting,
        of_run=GroupRanks(tuple(island), identity.size, tuple(island)),
    )
    link = IslandLink(place, identity.rank, settings.timeout, settings.warn_after)
    return ElasticRun(group, link)
