"""A placement of a training on a cluster, and the estimated time of its step."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.layout.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A placement of the states, and a split of batch and model over devices.

    It uses `data` x `tensor` x `pipeline` devices. Each of `data` replicas runs `micro_batches`
    backwards of `micro_batch` samples per step.
    """

    row: Placement
    data: int
    micro_batch: int
    micro_batches: int = 1
    recomputed: bool = False
    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    bucket_mb: float = 25.0
    in_rows: bool = False
    """Whether micro-batches are parts of the rows given to engine.forward_backward, rather than
    batches of the Loader."""

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.data * self.tensor * self.pipeline

    @property
    def stages_per_rank(self) -> int:
        """The pipeline stages per rank if `--stages` is not given."""
        return 2 if self.schedule == "interleaved" else 1

    @property
    def samples(self) -> int:
        """The samples of a step, over all replicas."""
        return self.data * self.micro_batch * self.micro_batches


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimated time of a step.

    `parts` are its seconds by kind ("matrix products", "waits for gradients", ...). `error` is the
    error band as a fraction (0.2 is ±20 %).
    """

    seconds: float
    error: float
    parts: dict[str, float] = field(default_factory=dict)
    per_rank: tuple[dict[str, float], ...] = ()
    """The same parts for the ranks of each pipeline stage. Without a pipeline it has one entry."""
