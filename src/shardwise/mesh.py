"""Mesh places the ranks of a run along the axes of parallelism. Pure arithmetic.

    rank = (data * P + stage) * T + tensor

so that the T ranks which split every layer between them are neighbours, on one host where hosts
have a multiple of T ranks, and the P groups of them that each have other layers come next. All the
ranks of one `data` coordinate together hold one copy of the model: a replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from shardwise.errors import ConfigError


@dataclass(frozen=True)
class Mesh:
    """`size` ranks, of which `pipeline` x `tensor` make a replica.

    Raises ConfigError where that cannot be.
    """

    size: int
    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        if self.size % self.replica:
            axes = {"pipeline": self.pipeline, "tensor": self.tensor}
            flags = " ".join(f"--{name} {n}" for name, n in axes.items() if n > 1)
            raise ConfigError(
                f"{flags} does not divide {self.size} worker(s): a replica takes "
                f"{self.replica} of them. {self._what_fits(axes)}"
            )

    def _what_fits(self, axes: dict[str, int]) -> str:
        below = self.size // self.replica * self.replica
        counts = [str(n) for n in (below, below + self.replica) if n]
        advice = [f"Start {' or '.join(counts)} workers"]
        for name, n in axes.items():
            others = prod(axes.values()) // n
            if n > 1 and self.size % others == 0:
                fits = [k for k in range(1, self.size + 1) if self.size % (k * others) == 0]
                advice.append(f"write --{name} with one of {', '.join(map(str, fits))}")
        return ", or ".join(advice) + "."

    @property
    def replica(self) -> int:
        """How many ranks hold one copy of the model."""
        return self.pipeline * self.tensor

    @property
    def data(self) -> int:
        """How many replicas there are."""
        return self.size // self.replica

    def data_of(self, rank: int) -> int:
        """Which replica `rank` is of."""
        return rank // self.replica

    def stage_of(self, rank: int) -> int:
        """Its place in the pipeline of its replica."""
        return rank // self.tensor % self.pipeline

    def tensor_of(self, rank: int) -> int:
        """Which part of every split layer `rank` has."""
        return rank % self.tensor

    @property
    def data_groups(self) -> list[list[int]]:
        """Ranks that have the same part of different replicas, one list for each part."""
        each = self.replica
        return [list(range(part, self.size, each)) for part in range(each)]

    @property
    def tensor_groups(self) -> list[list[int]]:
        """Ranks that split the same layers of one replica, one list for each."""
        each = self.tensor
        return [list(range(first, first + each)) for first in range(0, self.size, each)]

    @property
    def pipeline_groups(self) -> list[list[int]]:
        """Ranks of one replica that have the same part of other layers, in order of the stages."""
        return [
            list(range(first + part, first + self.replica, self.tensor))
            for first in range(0, self.size, self.replica)
            for part in range(self.tensor)
        ]

    @property
    def stage_groups(self) -> list[list[int]]:
        """Ranks that have the same layers, or parts of them, one list for each stage."""
        return [
            [rank for rank in range(self.size) if self.stage_of(rank) == stage]
            for stage in range(self.pipeline)
        ]

    @property
    def is_flat(self) -> bool:
        """Whether every rank has the whole model."""
        return self.replica == 1

    def in_words(self) -> str:
        """The axes, such as "2 data x 2 tensor"."""
        axes = {"data": self.data, "pipeline": self.pipeline, "tensor": self.tensor}
        return " x ".join(f"{n} {name}" for name, n in axes.items() if n > 1 or name == "data")
