"""Candidate configurations of a run on a cluster, and the estimated time of their steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.layout.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A candidate configuration: the placement of the states, and the mesh of devices.

    It uses `data` x `tensor` x `pipeline` devices. In each step, each of the `data` replicas runs
    `micro_batches` backward passes of `micro_batch` samples. If `context` is above 1, replicas
    share samples, and each has a part of every sequence.
    """

    row: Placement
    data: int
    micro_batch: int
    micro_batches: int = 1
    recomputed: bool = False
    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    expert: int = 1
    """Number of replicas over which each layer's experts are spread."""
    context: int = 1
    """Number of data-parallel ranks across which each sequence is split."""
    context_method: str = ""
    bucket_mb: float = 25.0
    in_rows: bool = False
    """Whether engine.forward_backward splits the rows it receives into micro-batches. If False,
    each batch of the Loader is one micro-batch."""

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def stages_per_rank(self) -> int:
        """The default number of pipeline stages per rank, which applies without `--stages`."""
        return 2 if self.schedule == "interleaved" else 1

    @property
    def samples(self) -> int:
        """The number of samples per step, across all replicas."""
        return self.data // self.context * self.micro_batch * self.micro_batches


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimated time of a step.

    `parts` breaks it down in seconds by kind ("matrix products", "waits for gradients", ...).
    `error` is the error band as a fraction (0.2 means ±20 %).
    """

    seconds: float
    error: float
    parts: dict[str, float] = field(default_factory=dict)
    per_rank: tuple[dict[str, float], ...] = ()
    """The same breakdown for each rank of the pipeline (one entry without a pipeline)."""
