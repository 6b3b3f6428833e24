"""Names the ranks that share each bucket. Most buckets belong to all data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.comm import Collectives
from shardwise.layout.bucket_layout import DATA, EXPERT_COPIES, Bucket


@dataclass(frozen=True)
class ShardGroups:
    """The groups across which buckets are reduced, sharded and gathered.

    Args:
        data: All ranks that shard the states.
        expert_copies: With `--expert`, the ranks that hold the same experts as this rank. None if
            no bucket holds experts.
    """

    data: Collectives
    expert_copies: Collectives | None = None

    @property
    def by_axis(self) -> dict[str, Collectives]:
        """The ranks that share the buckets of each axis."""
        groups = {DATA: self.data}
        return (
            groups if self.expert_copies is None else groups | {EXPERT_COPIES: self.expert_copies}
        )

    def of(self, bucket: Bucket) -> Collectives:
        """Return the ranks that share `bucket`."""
        return self.by_axis[bucket.axis]
