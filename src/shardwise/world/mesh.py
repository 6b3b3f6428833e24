"""Mesh places the ranks of a run along the axes of parallelism. Pure arithmetic.

    rank = (data * P + stage) * T + tensor

so that the T ranks which split every layer between them are neighbours, on one host where hosts
have a multiple of T ranks, and the P groups of them that each have other layers come next. All the
ranks of one `data` coordinate together hold one copy of the model: a replica. Neighbouring replicas
make an island; gradients are summed inside islands only, and the axis of islands is the outermost.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from shardwise.errors import ConfigError


@dataclass(frozen=True)
class Mesh:
    """`size` ranks, of which `pipeline` x `tensor` make a replica; `islands` of equal size.

    Raises ConfigError where that cannot be.
    """

    size: int
    tensor: int = 1
    pipeline: int = 1
    islands: int = 1

    def __post_init__(self) -> None:
        if self.size % self.replica == 0 and self.size // self.replica % self.islands:
            raise ConfigError(self._uneven_islands())
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

    def _uneven_islands(self) -> str:
        what = "worker" if self.replica == 1 else "replica"
        fits = [n for n in range(1, self.data + 1) if self.data % n == 0]
        return (
            f"--islands {self.islands} does not divide {self.data} {what}(s): islands are of one "
            f"size. Write --islands with one of {', '.join(map(str, fits))}."
        )

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
    def island(self) -> int:
        """How many ranks an island has."""
        return self.size // self.islands

    def island_of(self, rank: int) -> int:
        """Which island `rank` is of."""
        return rank // self.island

    @property
    def island_groups(self) -> list[list[int]]:
        """The ranks of each island."""
        return [
            list(range(first, first + self.island)) for first in range(0, self.size, self.island)
        ]

    @property
    def peer_groups(self) -> list[list[int]]:
        """Ranks of equal place in different islands, in the order of these."""
        return [list(ranks) for ranks in zip(*self.island_groups, strict=True)]

    @property
    def data_groups(self) -> list[list[int]]:
        """Ranks that have the same part of different replicas of an island, one list for each part
        and island."""
        each = self.replica
        return [ranks[part::each] for ranks in self.island_groups for part in range(each)]

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
        """Ranks of an island that have the same layers, or parts of them, one list for each stage
        and island."""
        return [
            [rank for rank in ranks if self.stage_of(rank) == stage]
            for ranks in self.island_groups
            for stage in range(self.pipeline)
        ]

    @property
    def is_flat(self) -> bool:
        """Whether every rank has the whole model, and all make one step together."""
        return self.replica == 1 and self.islands == 1

    def in_words(self) -> str:
        """The axes, such as "2 data x 2 tensor"."""
        axes = {"islands": self.islands, "data": self.data // self.islands}
        axes |= {"pipeline": self.pipeline, "tensor": self.tensor}
        return " x ".join(f"{n} {name}" for name, n in axes.items() if n > 1 or name == "data")
