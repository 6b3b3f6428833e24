"""Collectives over the elastic islands that take part, whose number may change.

    ElasticRun     all ranks:  inside the island over its own transport, between over IslandLink
    ElasticPeers   the ranks of equal place in the islands, over IslandLink alone

Each call is one exchange (membership.py), so an island that ends is in the result of all the others
or of none. `rank` and `size` count the islands that take part now.
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
"""The purpose for which pickles are sealed. They can run code, and pass between hosts."""


class _OverLink(Collectives):
    """The common part of both: `island` is the group of this island, `link` connects the others."""

    comes_and_goes = True

    def __init__(self, island: Collectives, link: IslandLink) -> None:
        self.island = island
        self.link = link
        self.status_server = island.status_server

    @property
    def is_outside(self) -> bool:
        """Whether the others train without this island."""
        return self.link.outside

    @property
    def small_device(self) -> torch.device:
        return self.island.small_device

    def _swap(self, label: str, tensor: Tensor, *, alone: bool = False) -> list[Tensor]:
        """Return `tensor`, of one shape and dtype everywhere, of each island that takes part."""
        flat = tensor.detach().cpu().contiguous().view(-1)
        mine = _bytes(flat)
        _, rows = self.link.exchange(label, mine, alone=alone)
        # A transport inside an island fails for different shapes. The launcher only passes bytes.
        if any(len(row) != len(mine) for row in rows):
            raise UsageError(
                f"Islands brought {', '.join(str(len(row)) for row in rows)} bytes to {label}: all "
                "must bring as much. Let them call it with what is of one shape."
            )
        return [_tensor(row, tensor) for row in rows]

    def _gather_sealed(self, label: str, value: Any) -> list[Any]:
        """Return the picklable `value` of each island that takes part."""
        # Pickles run code when they are loaded, and these pass through other processes and hosts.
        secret = self.status_server.secret
        mine = authentication.sealed(secret, _PICKLES, pickle.dumps(value))
        _, rows = self.link.exchange(label, mine)
        try:
            return [
                pickle.loads(authentication.unsealed(secret, _PICKLES, bytes(row))) for row in rows
            ]
        except authentication.Forged as error:
            raise CollectiveError(
                f"What came to {label} is not of this run ({error}) See docs/security.md."
            ) from None

    def _from_first(self, buffer: Tensor, what: str, *, alone: bool) -> Handle:
        """Copy `buffer` of the first island to all ranks of equal place."""
        flat = buffer.detach().cpu().contiguous().view(-1).view(torch.uint8)
        mine = _bytes(flat) if self.link.index == 0 else b""
        _, rows = self.link.exchange(what, mine, alone=alone)
        if len(rows[0]) != flat.numel():
            raise CollectiveError(
                f"The island that {what} begins at has ended: start the run again."
            )
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
            except IslandsChanged:
                continue

    def reduce_scatter(
        self, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN, *, into: Tensor | None = None
    ) -> Handle:
        self._refuse("a reduce-scatter")

    def second_group(self) -> Collectives:
        self._refuse("a group of its own for another thread")

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what.capitalize()} over all islands cannot be had with --elastic-islands, which may "
            "end meanwhile. Leave the flag out."
        )


class ElasticPeers(_OverLink):
    """The ranks of equal place in all islands that take part."""

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
        """Return the flat bytes `mine` of each island that takes part in the boundary after `step`,
        in their order. Collective over all ranks of all islands."""
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
        assert source == 0, "islands begin at the first one's values"
        return self._from_first(buffer, "a broadcast between islands", alone=True)

    def barrier(self) -> None:
        self.link.exchange("a barrier of islands", b"")

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        self._refuse("a group of some")

    def close(self) -> None:
        return


class ElasticRun(_OverLink):
    """All ranks of all islands that take part."""

    def __init__(self, island: Collectives, link: IslandLink) -> None:
        super().__init__(island, link)
        self.name = f"{island.name}, elastic between islands"
        self._is_given = False
        """Whether a split has returned the island's own group. Further ones are new groups, since
        their collectives may have another order."""

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.link.index * self.island.size + self.island.rank

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self.link.members) * self.island.size

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for the run."""
        return not self.is_outside and self.rank == 0

    def watch_members(self, changed: Callable[[], None]) -> None:
        self.link.changed = changed

    def begin(self) -> None:
        """Note that all islands start to train, from equal weights: from now on one may end."""
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
        inside = json.dumps(self.island.gather_plain(value)).encode()
        rows = self.link.exchange("an exchange of all ranks", inside)[1]
        return [each for row in rows for each in json.loads(bytes(row))]

    def all_reduce(self, buffer: Tensor, how: Sum = PLAIN) -> Handle:
        if how is not PLAIN:
            self._refuse("a sum in one order")
        self.island.all_reduce(buffer).wait()
        parts = self._swap("a sum over all ranks", buffer)
        # Not in place: the first part may be the memory of `buffer`. In the order of the islands,
        # so that all have the same bits.
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

        def given() -> Handle:
            if self.link.index == 0:
                self.island.broadcast(buffer).wait()
            return self._from_first(buffer, "a broadcast", alone=False)

        return self.steadily(given)

    def barrier(self) -> None:
        self.island.barrier()
        self.link.exchange("a barrier", b"")

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        """Split into groups inside islands, or into the ranks of equal place in all islands."""
        place = self.link.place
        check_groups(groups, place.count * place.size)
        mine = range(place.first, place.first + place.size)
        peers = [
            list(range(each, place.count * place.size, place.size)) for each in range(place.size)
        ]
        if sorted(map(sorted, groups)) == peers:
            return ElasticPeers(self.island, self.link)
        inside = [
            [rank - place.first for rank in group] for group in groups if set(group) <= set(mine)
        ]
        if inside == [list(range(place.size))] and not self._is_given:
            self._is_given = True
            return self.island
        if any(set(group) & set(mine) and not set(group) <= set(mine) for group in groups):
            self._refuse("a group of some ranks")
        return self.island.split(inside)

    def close(self) -> None:
        self.island.close()
        self.link.close()


def _bytes(flat: Tensor) -> memoryview:
    """Return the memory of a flat tensor on the CPU."""
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _tensor(data: Bytes, like: Tensor) -> Tensor:
    """Return a tensor of the dtype of `like` over `data`."""
    if not len(data):
        return torch.empty(0, dtype=like.dtype)
    whole = data if isinstance(data, bytearray) else bytearray(data)
    return torch.frombuffer(whole, dtype=torch.uint8).view(like.dtype)


def join(
    identity: Identity,
    device: torch.device,
    settings: Settings,
    on_meeting: OnMeeting | None,
) -> Collectives:
    """Join the other ranks of this rank's island, and over the launcher all islands.

    `shardwise.init` calls it in the place of `comm.connect`, since workers.py names it in the
    environment. Raises ConfigError if the script has another number of islands than the launcher.
    """
    place = membership.read(os.environ)
    assert place is not None, "the launcher gives the place with the name of this function"
    if place.count != settings.islands:
        raise ConfigError(
            f"shardwise run --elastic-islands was told of {place.count} islands, and here they are "
            f"{settings.islands}: give --islands there, and nothing else that overrides it."
        )
    island = range(place.first, place.first + place.size)
    here = ranks_here(island, identity.rank - identity.local_rank, identity.local_size)
    alone = replace(
        identity,
        rank=island.index(identity.rank),
        size=place.size,
        local_rank=here.index(identity.rank),
        local_size=len(here),
    )
    group = connect(
        alone,
        device,
        settings.timeout,
        settings.transport,
        settings.rendezvous,
        on_meeting,
        of_run=GroupRanks(tuple(island), identity.size, place.first),
    )
    link = IslandLink(place, identity.rank, settings.timeout, settings.warn_after)
    return ElasticRun(group, link)
