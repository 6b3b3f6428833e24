"""The mesh of a run: how its ranks stand along the axes of parallelism. Pure arithmetic.

    rank = data * T + tensor

so that the T ranks which split every layer between them are neighbours, on one host where hosts
have a multiple of T ranks. All the ranks of one `data` coordinate together hold one copy of the
model: a replica.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import ConfigError


@dataclass(frozen=True)
class Mesh:
    """`size` ranks, of which `tensor` make a replica. Raises ConfigError where that cannot be."""

    size: int
    tensor: int = 1

    def __post_init__(self) -> None:
        if self.size % self.tensor:
            raise ConfigError(
                f"--tensor {self.tensor} does not divide {self.size} worker(s): a replica takes "
                f"{self.tensor} of them. {self._what_fits()}"
            )

    def _what_fits(self) -> str:
        divisors = [n for n in range(1, self.size + 1) if self.size % n == 0]
        below = self.size // self.tensor * self.tensor
        counts = [str(n) for n in (below, below + self.tensor) if n]
        sizes = ", ".join(map(str, divisors))
        return f"Start {' or '.join(counts)} workers, or write --tensor with one of {sizes}."

    @property
    def data(self) -> int:
        """How many replicas there are."""
        return self.size // self.tensor

    def data_of(self, rank: int) -> int:
        """Which replica `rank` is of."""
        return rank // self.tensor

    def tensor_of(self, rank: int) -> int:
        """Which part of every split layer `rank` has."""
        return rank % self.tensor

    @property
    def data_groups(self) -> list[list[int]]:
        """Ranks that have the same part of different replicas, one list for each part."""
        return [list(range(part, self.size, self.tensor)) for part in range(self.tensor)]

    @property
    def tensor_groups(self) -> list[list[int]]:
        """Ranks of one replica, one list for each."""
        return [
            list(range(first, first + self.tensor)) for first in range(0, self.size, self.tensor)
        ]

    @property
    def is_flat(self) -> bool:
        """Whether every rank has the whole model."""
        return self.tensor == 1

    def in_words(self) -> str:
        """The axes, such as "2 data x 2 tensor"."""
        return f"{self.data} data x {self.tensor} tensor"
