"""Sends the differences of buckets to the other islands, and moves the anchor by their mean.

    send            | weight of the steps | packed difference |    all-gather over the peers
    receive_mean    unpack, weighted mean in the order of the islands: the same bits on all
    arrive          move anchor and weights, in the same way on every island

With `--late`, steps continue between `send` and `arrive`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from shardwise.comm import Collectives, Handle
from shardwise.islands.anchor import Anchor
from shardwise.islands.elastic.collectives import ElasticPeers
from shardwise.timeline import recorder

_HEADER = 8
"""Bytes of the weight (fp64) before each packed difference."""

_AHEAD = 3
"""Number of buckets in transit at once, without `--late`."""


@dataclass(frozen=True)
class Message:
    """The messages of all islands, in transit."""

    handle: Handle
    rows: Tensor
    """(islands, bytes) uint8."""

    def wait(self) -> Tensor:
        """Wait for the messages of all islands, and return them."""
        self.handle.wait()
        self.handle.reusable()
        return self.rows


def send(peers: Collectives, mine: Tensor) -> Message:
    """Send `mine` (flat uint8, of the same length on all) to the other islands. Collective."""
    # Not an all-reduce, because it would round quantised values again at every hop. All islands
    # unpack the same bytes and add them in the same order, so they have the same bits.
    length = mine.numel()
    rows = mine.new_empty(peers.size * length)
    cuts = [length * place for place in range(peers.size + 1)]
    rows[cuts[peers.rank] : cuts[peers.rank + 1]] = mine
    launched = recorder.launched("all-gather", rows)
    handle = peers.all_gather(rows, cuts).noted(launched)
    return Message(handle, rows.view(peers.size, length))


class DifferenceExchange:
    """Exchanges differences to `anchor` over `peers`, the ranks with this position in all
    islands."""

    def __init__(self, anchor: Anchor, peers: Collectives, *, begun: bool) -> None:
        self.anchor = anchor
        self._peers = peers
        self.weights = [0.0] * len(anchor.parts)
        """By bucket, the weight of this island's steps since it was last sent."""
        self._flying: dict[int, Message | Tensor] = {}
        self.due: dict[int, int] = {}
        """By bucket in transit, the step after which it moves the anchor."""
        self._sent: dict[int, tuple[float, Tensor]] = {}
        """By bucket sent by this process, its weight and the packed difference."""
        self.report: Message | None = None
        """The islands' reports in transit, see parameter_averaging.py."""
        self.has_begun = begun
        """Whether the anchor exists, from the first step on. Before it, user code may change
        weights."""

    @property
    def buckets(self) -> int:
        """Number of buckets."""
        return len(self.weights)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank sends to each other island every H steps."""
        return sum(_HEADER + self.anchor.nbytes(index) for index in range(self.buckets))

    @property
    def in_transit(self) -> frozenset[int]:
        """Buckets in transit."""
        return frozenset(self._flying)

    def count(self, weight: float) -> None:
        """Add the weight of a step of this island."""
        # Of all buckets: each one counts the steps since it was sent itself.
        self.weights = [before + weight for before in self.weights]

    def send(self, index: int, due: int) -> None:
        """Send the difference of bucket `index`, to be used after step `due`. Collective over the
        peers."""
        self._flying[index] = send(self._peers, self._pack(index, due))

    def _pack(self, index: int, due: int) -> Tensor:
        """Return the weight and packed difference of bucket `index`, and record them as sent."""
        packed = self.anchor.pack(index).to(self.anchor.device(index))
        weight = torch.tensor([self.weights[index]], dtype=torch.float64).view(torch.uint8)
        # Keep it until the bucket moves, so that `forget` can take the difference back.
        self._sent[index] = self.weights[index], packed
        self.weights[index] = 0.0
        self.due[index] = due
        return torch.cat([weight.to(packed.device), packed])

    def receive_mean(self, index: int) -> Tensor:
        """Wait for the differences of bucket `index`, and return their mean. It is kept until it is
        used."""
        sent = self._flying[index]
        if isinstance(sent, Message):
            sent = self._flying[index] = self._mean_of(index, sent.wait())
        return sent

    def expect(self, index: int, due: int) -> None:
        """Add a difference of zeros for bucket `index`, to be used after step `due`. A load of a
        checkpoint fills it in."""
        # With other settings than at the save, nothing may be due after that step. Drop it then.
        if self.anchor.rule.late and self.anchor.rule.is_due(due, index, self.buckets):
            self._flying[index] = torch.zeros_like(self.anchor.loaded_value(index))
            self.due[index] = due

    def arrive(self, indices: Sequence[int]) -> None:
        """Move anchor and weights of these buckets by the differences in transit. Collective over
        the peers and the island."""
        if not indices:
            return
        self.anchor.meet()
        for index in indices:
            self._apply(index)
        self.anchor.publish(indices)

    def exchange(self, indices: Sequence[int], due: int) -> None:
        """Send these buckets, and move the anchor by them. Collective over the peers and the
        island."""
        # A few at a time, because messages of all islands for all buckets would fill the memory.
        self.anchor.meet()
        following = iter(indices)
        for index in islice(following, _AHEAD):
            self.send(index, due)
        for index in indices:
            self._apply(index)
            for another in islice(following, 1):
                self.send(another, due)
        self.anchor.publish(indices)

    def gather_at_once(self, indices: Sequence[int], due: int, report: Tensor) -> list[Tensor]:
        """Send these buckets and a report (flat uint8) in one message per elastic island.

        Returns the reports of all islands that take part. Collective over all ranks. The anchor
        moves later, in `arrive`.
        """
        # One message, because an island may end between two. So it is in the mean of all buckets or
        # of none, on every rank.
        assert isinstance(self._peers, ElasticPeers)
        parts = [report, *(self._pack(index, due).cpu() for index in indices)]
        lengths = [each.numel() for each in parts]
        messages = self._peers.gather_at_once(due, torch.cat(parts))
        rows = [torch.split(message, lengths) for message in messages]
        for place, index in enumerate(indices, 1):
            self._flying[index] = self._mean_of(index, torch.stack([row[place] for row in rows]))
        return [row[0] for row in rows]

    def _apply(self, index: int) -> None:
        """Move anchor and weights of bucket `index`."""
        self.anchor.apply(index, self.receive_mean(index))
        self._sent.pop(index, None)
        del self._flying[index], self.due[index]

    def _mean_of(self, index: int, rows: Tensor) -> Tensor:
        """Return the weighted mean of the islands' messages `rows`, (islands, bytes)."""
        # To the CPU in one copy, because each weight would wait for the device.
        heads = rows[:, :_HEADER].contiguous().cpu().view(torch.float64)
        return self.anchor.mean(index, list(rows[:, _HEADER:]), heads.flatten().tolist())

    def forget(self) -> None:
        """Drop everything in transit. All islands must call it.

        Nothing is lost: neither anchor nor weights have moved, so the next difference contains it.
        """
        # Wait first, because a message that was not received would be mistaken for the next one.
        for sent in [*self._flying.values(), self.report]:
            if isinstance(sent, Message):
                sent.wait()
        for index, (weight, packed) in self._sent.items():
            self.weights[index] += weight
            self.anchor.take_back(index, packed)
        self._flying, self._sent, self.due, self.report = {}, {}, {}, None
