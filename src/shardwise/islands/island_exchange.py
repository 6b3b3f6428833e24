"""Sends the differences of buckets to the other islands, and moves the anchor by what comes.

    send      | weight of the steps | packed difference |    all-gather over peers of equal place
    receive   unpack, mean by weight: in the order of the islands, so that all have the same bits
    arrive    anchor and weights move, island by island alike

Between `send` and `arrive` steps go on where differences are late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from shardwise.comm import Collectives, ElasticPeers, Handle
from shardwise.islands.anchor import Anchor
from shardwise.timeline import recorder

_HEADER = 8
"""Bytes of the weight, fp64."""

_AHEAD = 3
"""Buckets that are on their way at once where none waits for its turn."""


@dataclass(frozen=True)
class Message:
    """One small or large message of each island, on its way to all of them."""

    handle: Handle
    rows: Tensor
    """(islands, bytes) uint8."""

    def wait(self) -> Tensor:
        """The rows, once all are there and nobody reads them any more."""
        self.handle.wait()
        self.handle.reusable()
        return self.rows


def send(peers: Collectives, mine: Tensor) -> Message:
    """Send `mine`, flat uint8 of one length on all, to the other islands. Collective."""
    length = mine.numel()
    rows = mine.new_empty(peers.size * length)
    cuts = [length * place for place in range(peers.size + 1)]
    rows[cuts[peers.rank] : cuts[peers.rank + 1]] = mine
    launched = recorder.launched("all-gather", rows)
    handle = peers.all_gather(rows, cuts).noted(launched)
    return Message(handle, rows.view(peers.size, length))


class IslandExchange:
    """What of `anchor` is on its way over `peers`, the ranks of equal place in all islands."""

    def __init__(self, anchor: Anchor, peers: Collectives, *, begun: bool) -> None:
        self.anchor = anchor
        self._peers = peers
        self.weights = [0.0] * len(anchor.parts)
        """By bucket, what this island's steps have weighed since it was sent last."""
        self._flying: dict[int, Message | Tensor] = {}
        self.due: dict[int, int] = {}
        """By bucket that was sent and has moved nothing yet: when it does, in steps."""
        self._sent: dict[int, tuple[float, Tensor]] = {}
        """By bucket that was sent from here: what it weighed, and the packed difference."""
        self.report: Message | None = None
        """What islands tell each other beside, on its way."""
        self.begun = begun
        """Whether the anchor is behind the weights; until the first step it is what they are."""

    @property
    def buckets(self) -> int:
        """How many fragments there are."""
        return len(self.weights)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank sends to each other island from one time to the next."""
        return sum(_HEADER + self.anchor.nbytes(index) for index in range(self.buckets))

    @property
    def state_bytes(self) -> int:
        """Bytes of the anchor that this rank keeps, wherever they rest."""
        return self.anchor.state_bytes

    @property
    def flying(self) -> frozenset[int]:
        """The buckets that were sent, and have moved nothing yet."""
        return frozenset(self._flying)

    def count(self, weight: float) -> None:
        """A step of this island was made that weighed so much."""
        self.weights = [before + weight for before in self.weights]

    def send(self, index: int, due: int) -> None:
        """Let the difference of bucket `index`, which is `due` after so many steps, go on its way.
        Collective over the peers."""
        self._flying[index] = send(self._peers, self._packed(index, due))

    def _packed(self, index: int, due: int) -> Tensor:
        """The difference of bucket `index` with its weight before it, which counts as sent now."""
        packed = self.anchor.pack(index).to(self.anchor.device(index))
        weight = torch.tensor([self.weights[index]], dtype=torch.float64).view(torch.uint8)
        self._sent[index] = self.weights[index], packed
        self.weights[index] = 0.0
        self.due[index] = due
        return torch.cat([weight.to(packed.device), packed])

    def landed(self, index: int) -> Tensor:
        """The mean difference of bucket `index`, which was sent, before it is used: it waits in
        memory from now on."""
        sent = self._flying[index]
        if isinstance(sent, Message):
            sent = self._flying[index] = self._mean(index, sent)
        return sent

    def expect(self, index: int, due: int) -> None:
        """Go on where bucket `index` was sent before, and is `due` after so many steps, if that is
        a step at which it is used here; `landed` is to be filled with its mean."""
        if self.anchor.rule.late and self.anchor.rule.is_due(due, index, self.buckets):
            self._flying[index] = torch.zeros_like(self.anchor.loaded_value(index))
            self.due[index] = due

    def arrive(self, indices: Sequence[int]) -> None:
        """Move the anchor and the weights of these buckets by what has come. Collective over the
        peers, and over the island."""
        if not indices:
            return
        self.anchor.meet()
        for index in indices:
            self._apply(index)
        self.anchor.publish(indices)

    def exchange(self, indices: Sequence[int], due: int) -> None:
        """Send these buckets and move them by what comes, a few at a time, so that the messages of
        few are in memory at once. Collective over the peers, and over the island."""
        self.anchor.meet()
        following = iter(indices)
        for index in islice(following, _AHEAD):
            self.send(index, due)
        for index in indices:
            self._apply(index)
            for another in islice(following, 1):
                self.send(another, due)
        self.anchor.publish(indices)

    def gather_at_once(self, indices: Sequence[int], due: int, beside: Tensor) -> list[Tensor]:
        """Send these buckets in one message of each elastic island, with bytes that go `beside`,
        and return what lies beside of all that take part: so an island is in all of it, or in
        nothing. Nothing has moved yet: `arrive` moves. Collective over all ranks."""
        assert isinstance(self._peers, ElasticPeers)
        mine = [beside, *(self._packed(index, due).cpu() for index in indices)]
        lengths = [each.numel() for each in mine]
        messages = self._peers.gather_at_once(due, torch.cat(mine))
        rows = [torch.split(message, lengths) for message in messages]
        for place, index in enumerate(indices, 1):
            self._flying[index] = self._mean_of(index, torch.stack([row[place] for row in rows]))
        return [row[0] for row in rows]

    def _apply(self, index: int) -> None:
        """Move the anchor and the weights of bucket `index` by what has come."""
        self.anchor.apply(index, self.landed(index))
        self._sent.pop(index, None)
        del self._flying[index], self.due[index]

    def _mean(self, index: int, message: Message) -> Tensor:
        return self._mean_of(index, message.wait())

    def _mean_of(self, index: int, rows: Tensor) -> Tensor:
        """The mean of what lies in `rows`, the messages of all islands."""
        heads = rows[:, :_HEADER].contiguous().cpu().view(torch.float64)
        return self.anchor.mean(index, list(rows[:, _HEADER:]), heads.flatten().tolist())

    def forget(self) -> None:
        """Let what is on its way move nothing: it is part of the next difference, since the weights
        have not been moved either. Called by all islands alike."""
        for sent in [*self._flying.values(), self.report]:
            if isinstance(sent, Message):
                sent.wait()
        for index, (weight, packed) in self._sent.items():
            self.weights[index] += weight
            self.anchor.take_back(index, packed)
        self._flying, self._sent, self.due, self.report = {}, {}, {}, None
