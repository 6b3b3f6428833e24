"""Stores frozen weights in 4 bits alongside replicated parameters (QLoRA with ZERO_0 to ZERO_2).

Every rank stores all of these weights. They are expanded unit by unit, with the same code that
gathers sharded parameters, but without any communication. With ZERO_3, the buckets of
`sharded_parameters.py` store them instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from shardwise.comm import Solo
from shardwise.layout.bucket_layout import Bucket, Slot, Span
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.parameters.parameters import ReplicatedParameters
from shardwise.states.parameters.sharded_bucket import ShardedBucket
from shardwise.states.parameters.sharded_parameters import ShardedParameters
from shardwise.states.shard_groups import ShardGroups
from shardwise.states.storage.storage import Storage
from shardwise.states.storage.storage_factory import StorageFactory


class QuantisedParameters(ShardedParameters):
    """Frozen weights that each rank stores in full, in 4 bits.

    The arguments are those of `ShardedParameters`. `buckets` are laid out for a single rank.
    """

    at_rest_because = "stored in 4 bits"
    is_collective = False

    def __init__(
        self,
        frozen: Sequence[NamedParameter],
        buckets: Sequence[Bucket],
        factory: StorageFactory,
        value_of: Callable[[NamedParameter], Tensor],
    ) -> None:
        quantised = {each.parameter for each in frozen}
        groups = ShardGroups(Solo())
        super().__init__([], [], frozen, buckets, groups, factory, value_of, quantised)


class ReplicatedWithQuantised(ReplicatedParameters):
    """Replicated parameters that are trained, combined with frozen weights in 4 bits."""

    def __init__(
        self,
        named: Sequence[NamedParameter],
        buckets: Sequence[Bucket],
        groups: ShardGroups,
        quantised: QuantisedParameters,
        *,
        published: bool,
    ) -> None:
        super().__init__(named, buckets, groups, published=published)
        self.quantised = quantised

    @property
    def frozen(self) -> Sequence[ShardedBucket]:
        return self.quantised.frozen

    def kept(self) -> list[tuple[list[NamedParameter], Sequence[Slot], Span, Storage]]:
        return super().kept() + self.quantised.kept()

    def forget_writes(self) -> None:
        super().forget_writes()
        self.quantised.forget_writes()

    def settle(self) -> None:
        super().settle()
        self.quantised.settle()

    def check(self) -> None:
        super().check()
        self.quantised.check()

    def check_places(self) -> None:
        super().check_places()
        self.quantised.check_places()

    def release(self, values: Mapping[nn.Parameter, Tensor] | None = None) -> None:
        super().release(values)
        self.quantised.release(values)

    def frozen_bytes(self) -> list[tuple[Sequence[NamedParameter], int]]:
        return self.quantised.frozen_bytes()
