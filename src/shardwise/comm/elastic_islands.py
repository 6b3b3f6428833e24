"""Collectives over elastic islands: over those that take part, whose number may change.

    ElasticRun     all ranks:  inside the island over its own transport, between over IslandLink
    ElasticPeers   the ranks of equal place in the islands, over IslandLink alone

Each call is one exchange (net/island_membership.py), so an island that ends is in the result for
all the others, or for none of them. `rank` and `size` are those of who takes part now.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from shardwise.comm.base import Collectives, Cuts, Handle, check_groups
from shardwise.comm.island_link import Bytes, IslandLink, IslandsChanged
from shardwise.comm.ordered_sums import PLAIN, Sum
from shardwise.errors import CollectiveError, ConfigError, UsageError
from shardwise.net import authentication
from shardwise.net.island_membership import BEGINS, BOUNDARY

T = TypeVar("T")

_PICKLES = "an object of elastic islands"
"""What pickles are sealed for: they can run code, and pass between hosts."""


class _OverLink(Collectives):
    """What both have in common: `island` is the group of this island, `link` leads to the rest."""

    comes_and_goes = True

    def __init__(self, island: Collectives, link: IslandLink) -> None:
        self.island = island
        self.link = link
        self.status_server = island.status_server

    @property
    def is_outside(self) -> bool:
        """Whether the others go on without this island."""
        return self.link.outside

    @property
    def small_device(self) -> torch.device:
        return self.island.small_device

    def _swap(self, label: str, tensor: Tensor, *, alone: bool = False) -> list[Tensor]:
        """`tensor`, of one shape and dtype on all, of each island that takes part."""
        flat = tensor.detach().cpu().contiguous().view(-1)
        mine = _bytes(flat)
        _, rows = self.link.exchange(label, mine, alone=alone)
        if any(len(row) != len(mine) for row in rows):
            raise UsageError(
                f"Islands brought {', '.join(str(len(row)) for row in rows)} bytes to {label}: all "
                "must bring as much. Let them call it with what is of one shape."
            )
        return [_tensor(row, tensor) for row in rows]

    def _gather_sealed(self, label: str, value: Any) -> list[Any]:
        """`value` (picklable) of each island that takes part."""
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
        """Let `buffer` be that of the first island, on all ranks of equal place."""
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
    """The ranks of this place in all islands that take part."""

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
        """`mine`, flat bytes, of each island that takes part in the boundary after `step`, in their
        order. Collective over all ranks of all islands."""
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
        """Whether the island's own group is in use for the island; others are channels apart."""

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

    def begin(self) -> None:
        """All have come to train, from equal weights: from now on an island may end."""
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
        """Groups inside islands, or the ranks of equal place in all of them."""
        place = self.link.place
        check_groups(groups, place.count * place.size)
        mine = range(place.first, place.first + place.size)
        peers = [
            list(range(each, place.count * place.size, place.size)) for each in range(place.size)
        ]
        if sorted(map(sorted, groups)) == peers:
            return ElasticPeers(self.island, self.link)
        inside = [[rank - place.first for rank in group] for group in _within(groups, mine)]
        if inside == [list(range(place.size))] and not self._is_given:
            self._is_given = True
            return self.island
        if any(set(group) & set(mine) and not set(group) <= set(mine) for group in groups):
            self._refuse("a group of some ranks")
        return self.island.split(inside)

    def close(self) -> None:
        self.island.close()
        self.link.close()


def _within(groups: Sequence[Sequence[int]], mine: range) -> Iterator[Sequence[int]]:
    return (group for group in groups if set(group) <= set(mine))


def _bytes(flat: Tensor) -> memoryview:
    """The memory of a flat tensor of the CPU."""
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _tensor(data: Bytes, like: Tensor) -> Tensor:
    """A tensor of the dtype of `like`, over what came."""
    if not len(data):
        return torch.empty(0, dtype=like.dtype)
    whole = data if isinstance(data, bytearray) else bytearray(data)
    return torch.frombuffer(whole, dtype=torch.uint8).view(like.dtype)


# -- what cannot be had -----------------------------------------------------------------------


def check_inside(group: Collectives, call: str) -> None:
    """Raise UsageError for a `call` over all ranks while the others go on without this island,
    which comes back in engine.resume."""
    if group.is_outside:
        raise UsageError(
            f"{call} before engine.resume(folder), in an island that comes back: the others go on "
            "without it until then, and would not come. Call it after."
        )


def check_all_here(group: Collectives, size: int) -> None:
    """Raise UsageError for a sum that is not of all `size` workers, by whom it may be divided."""
    if group.comes_and_goes and group.size < size:
        raise UsageError(
            f"world.sum over {group.size} of {size} workers, since an elastic island is away: "
            "divided by world.size it would be wrong. Use sw.Metrics, or world.gather, which gives "
            "as many values as there are workers."
        )


def given(gathered: Sequence[tuple[T] | None], source: int) -> T:
    """What rank `source` has given, of what all have. Raises UsageError where none has."""
    for held in gathered:
        if held is not None:
            return held[0]
    raise UsageError(
        f"world.broadcast_object(source={source}) has nothing to give: there is no such rank, or "
        "its elastic island has ended. Broadcast from rank 0, whose place the first of the others "
        "takes."
    )


def check_timeline(group: Collectives, path: Path) -> None:
    """Raise ConfigError for a timeline of elastic islands."""
    if group.comes_and_goes:
        raise ConfigError(
            f"--timeline {path} and --elastic-islands cannot be had together: an island that is "
            "back would begin the file anew. Leave one of them out."
        )
