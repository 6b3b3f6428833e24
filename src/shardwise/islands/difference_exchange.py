"""Sends each bucket's difference to the other islands, and applies the mean to the anchor.

    send            | weight of the steps | packed difference |    all-gather over the peers
    receive_mean    unpack, weighted mean in the order of the islands (bit-identical on all)
    arrive          update anchor and weights, in the same way on every island

With `--late`, training continues between `send` and `arrive`.
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
"""Size in bytes of the weight (fp64) that precedes each packed difference."""

_AHEAD = 3
"""Maximum number of buckets in transit at the same time if `--late` is 0."""


@dataclass(frozen=True)
class Message:
    """A pending all-gather of one message per island."""

    handle: Handle
    rows: Tensor
    """The messages of all islands, shape (islands, bytes), uint8."""

    def wait(self) -> Tensor:
        """Wait for all islands' messages and return them."""
        self.handle.wait()
        self.handle.reusable()
        return self.rows


def send(peers: Collectives, mine: Tensor) -> Message:
    """Send `mine` to the other islands. Collective over `peers`.

    `mine` is a flat uint8 tensor, of the same length on all islands.
    """
    # Not an all-reduce, because that would round quantised values again at every hop. All islands
    # unpack the same bytes and add them in the same order, so their results are bit-identical.
    length = mine.numel()
    rows = mine.new_empty(peers.size * length)
    cuts = [length * place for place in range(peers.size + 1)]
    rows[cuts[peers.rank] : cuts[peers.rank + 1]] = mine
    launched = recorder.launched("all-gather", rows)
    handle = peers.all_gather(rows, cuts).noted(launched)
    return Message(handle, rows.view(peers.size, length))


class DifferenceExchange:
    """Exchanges differences from `anchor` between islands.

    `peers` are the ranks with the same index in all islands. `begun` is the initial value of
    `has_begun`.
    """

    def __init__(self, anchor: Anchor, peers: Collectives, *, begun: bool) -> None:
        self.anchor = anchor
        self._peers = peers
        self.weights = [0.0] * len(anchor.parts)
        """Per bucket, the weight of this island's steps since the bucket was last sent."""
        self._flying: dict[int, Message | Tensor] = {}
        self.due: dict[int, int] = {}
        """For each bucket in transit, the step after which its difference is applied."""
        self._sent: dict[int, tuple[float, Tensor]] = {}
        """For each bucket sent by this process, its weight and its packed difference."""
        self.report: Message | None = None
        """The islands' reports in transit (see parameter_averaging.py), or None."""
        self.has_begun = begun
        """True once the anchor exists, which is from the first step.

        Earlier, user code may still change weights.
        """

    @property
    def buckets(self) -> int:
        """The number of buckets."""
        return len(self.weights)

    @property
    def nbytes(self) -> int:
        """Number of bytes that this rank sends to each other island every H steps."""
        return sum(_HEADER + self.anchor.nbytes(index) for index in range(self.buckets))

    @property
    def in_transit(self) -> frozenset[int]:
        """The indices of the buckets in transit."""
        return frozenset(self._flying)

    def count(self, weight: float) -> None:
        """Add a step of weight `weight` to every bucket's total."""
        # Each bucket has its own total, because buckets are sent after different steps.
        self.weights = [before + weight for before in self.weights]

    def send(self, index: int, due: int) -> None:
        """Send bucket `index`'s difference, to be applied after step `due`.

        Collective over the peers.
        """
        self._flying[index] = send(self._peers, self._pack(index, due))

    def _pack(self, index: int, due: int) -> Tensor:
        """Pack bucket `index`'s weight and difference, and record them as sent."""
        packed = self.anchor.pack(index).to(self.anchor.device(index))
        weight = torch.tensor([self.weights[index]], dtype=torch.float64).view(torch.uint8)
        # Store it until the difference is applied, so that `forget` can take the difference back.
        self._sent[index] = self.weights[index], packed
        self.weights[index] = 0.0
        self.due[index] = due
        return torch.cat([weight.to(packed.device), packed])

    def receive_mean(self, index: int) -> Tensor:
        """Wait for all islands' differences for bucket `index` and return their mean.

        The mean is cached until `arrive`.
        """
        sent = self._flying[index]
        if isinstance(sent, Message):
            sent = self._flying[index] = self._mean_of(index, sent.wait())
        return sent

    def expect(self, index: int, due: int) -> None:
        """Add zeros as bucket `index`'s pending difference, to be applied after step `due`.

        Loading a checkpoint overwrites them with the difference.
        """
        # If the settings have changed since the save, no difference may be due after that step.
        # Drop it.
        if self.anchor.rule.late and self.anchor.rule.is_due(due, index, self.buckets):
            self._flying[index] = torch.zeros_like(self.anchor.loaded_value(index))
            self.due[index] = due

    def arrive(self, indices: Sequence[int]) -> None:
        """Apply the pending mean differences to the anchor and weights of the buckets `indices`.

        Collective over the peers and the island.
        """
        if not indices:
            return
        self.anchor.meet()
        for index in indices:
            self._apply(index)
        self.anchor.publish(indices)

    def exchange(self, indices: Sequence[int], due: int) -> None:
        """Send the differences of the buckets `indices`, and apply their means immediately.

        Collective over the peers and the island.
        """
        # Send a few at a time, because the messages of all islands for all buckets may not fit into
        # memory.
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
        """Send the buckets' differences and `report` (flat uint8) in a single message per rank.

        `indices` are the buckets. Returns the reports from all participating islands. Collective
        over all ranks. Call `arrive` afterwards to apply the differences.
        """
        # Use a single message, because an island may fail between two messages. On every rank, an
        # island thus contributes either to the mean of all buckets or of none.
        assert isinstance(self._peers, ElasticPeers)
        parts = [report, *(self._pack(index, due).cpu() for index in indices)]
        lengths = [each.numel() for each in parts]
        messages = self._peers.gather_at_once(due, torch.cat(parts))
        rows = [torch.split(message, lengths) for message in messages]
        for place, index in enumerate(indices, 1):
            self._flying[index] = self._mean_of(index, torch.stack([row[place] for row in rows]))
        return [row[0] for row in rows]

    def _apply(self, index: int) -> None:
        """Apply bucket `index`'s mean difference to its anchor and weights."""
        self.anchor.apply(index, self.receive_mean(index))
        self._sent.pop(index, None)
        del self._flying[index], self.due[index]

    def _mean_of(self, index: int, rows: Tensor) -> Tensor:
        """Return the weighted mean of the differences in `rows`, shape (islands, bytes), uint8."""
        # Copy all weights to the CPU at once, because each separate copy would synchronise the
        # device.
        heads = rows[:, :_HEADER].contiguous().cpu().view(torch.float64)
        return self.anchor.mean(index, list(rows[:, _HEADER:]), heads.flatten().tolist())

    def forget(self) -> None:
        """Drop all differences in transit. Must be called on all islands.

        No update is lost: neither anchor nor weights have changed, so the next difference includes
        the dropped one.
        """
        # Wait first, because a message that is never received would be mistaken for the next one.
        for sent in [*self._flying.values(), self.report]:
            if isinstance(sent, Message):
                sent.wait()
        for index, (weight, packed) in self._sent.items():
            self.weights[index] += weight
            self.anchor.take_back(index, packed)
        self._flying, self._sent, self.due, self.report = {}, {}, {}, None
