"""Computes the coordinates of ranks along the axes of parallelism. Does not communicate.

    rank = (data * P + stage) * T + tensor

The T ranks that split each layer communicate the most, so they are adjacent: they are on one host
if its number of ranks is a multiple of T. The P pipeline stages are the next axis. The P * T ranks
with the same `data` coordinate hold one copy of the model, a replica. Adjacent replicas form an
island, the outermost axis: gradients are summed only within islands.

With `--expert E`, groups of E adjacent ranks of a stage together hold every expert of the stage.

With `--context C`, groups of C adjacent replicas have the same samples, and each replica has a part
of every sequence. Gradients are summed and states sharded across these replicas as across any
others.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from shardwise.config import Settings
from shardwise.errors import ConfigError
from shardwise.layout import sum_tree
from shardwise.messages.printable import many


@dataclass(frozen=True)
class Mesh:
    """Division of `size` ranks into `islands`, and into replicas of `pipeline` x `tensor` ranks.

    Raises ConfigError if `size` is not divisible as required.
    """

    size: int
    tensor: int = 1
    pipeline: int = 1
    islands: int = 1
    expert: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        # If the replicas do not divide either, report only that (below).
        if self.size % self.replica == 0 and self.size // self.replica % self.islands:
            fits = [n for n in range(1, self.data + 1) if self.data % n == 0]
            raise ConfigError(
                f"--islands {self.islands} does not divide {many(self.data, self._noun)}: all "
                f"islands have the same size. Write --islands with one of "
                f"{', '.join(map(str, fits))}."
            )
        if self.size % self.replica:
            axes = {"pipeline": self.pipeline, "tensor": self.tensor}
            flags = " ".join(f"--{name} {n}" for name, n in axes.items() if n > 1)
            raise ConfigError(
                f"{flags} does not divide {many(self.size, 'worker')}: each replica needs "
                f"{self.replica}. {self._advice(axes)}"
            )
        in_stage = self.size // self.pipeline
        if in_stage % self.expert:
            fits = [n for n in range(1, in_stage + 1) if in_stage % n == 0]
            where = f" of each stage (--pipeline {self.pipeline})" if self.pipeline > 1 else ""
            raise ConfigError(
                f"--expert {self.expert} does not divide {many(in_stage, 'worker')}{where}: each "
                "expert is on the same number of them. Write --expert with one of "
                f"{', '.join(map(str, fits))}."
            )
        each = self.data // self.islands  # a context group is within an island
        if each % self.context:
            fits = [n for n in range(1, each + 1) if each % n == 0]
            where = " of each island" if self.islands > 1 else ""
            raise ConfigError(
                f"--context {self.context} does not divide {many(each, self._noun)}{where}: each "
                "sequence is cut over the same number of them. Write --context with one of "
                f"{', '.join(map(str, fits))}."
            )

    def _advice(self, axes: dict[str, int]) -> str:
        # Suggest the nearest possible numbers of workers, below and above.
        below = self.size // self.replica * self.replica
        counts = [str(n) for n in (below, below + self.replica) if n]
        advice = [f"Start {' or '.join(counts)} workers"]
        for name, n in axes.items():
            # Vary one axis and keep the others, because a user changes one flag at a time.
            others = prod(axes.values()) // n
            if n > 1 and self.size % others == 0:
                fits = [k for k in range(1, self.size + 1) if self.size % (k * others) == 0]
                advice.append(f"write --{name} with one of {', '.join(map(str, fits))}")
        return ", or ".join(advice) + "."

    @property
    def _noun(self) -> str:
        """The word for the ranks that together hold the full model."""
        return "worker" if self.replica == 1 else "replica"

    @property
    def replica(self) -> int:
        """Number of ranks per replica, which together hold one copy of the model."""
        return self.pipeline * self.tensor

    @property
    def data(self) -> int:
        """Number of replicas."""
        return self.size // self.replica

    def data_of(self, rank: int) -> int:
        """Return the index of the replica that `rank` belongs to."""
        return rank // self.replica

    def stage_of(self, rank: int) -> int:
        """Return the pipeline stage of `rank`."""
        return rank // self.tensor % self.pipeline

    def tensor_of(self, rank: int) -> int:
        """Return which part of each split layer `rank` holds."""
        return rank % self.tensor

    @property
    def island(self) -> int:
        """Number of ranks per island."""
        return self.size // self.islands

    def island_of(self, rank: int) -> int:
        """Return the index of the island that `rank` belongs to."""
        return rank // self.island

    @property
    def island_groups(self) -> list[list[int]]:
        """The ranks of each island."""
        return [
            list(range(first, first + self.island)) for first in range(0, self.size, self.island)
        ]

    @property
    def peer_groups(self) -> list[list[int]]:
        """Ranks with the same index within different islands, in island order."""
        return [list(ranks) for ranks in zip(*self.island_groups, strict=True)]

    @property
    def data_groups(self) -> list[list[int]]:
        """Ranks of an island that hold the same part of the model, one list per island and part."""
        # Every `replica`-th rank of an island has the same part.
        each = self.replica
        return [ranks[part::each] for ranks in self.island_groups for part in range(each)]

    @property
    def tensor_groups(self) -> list[list[int]]:
        """Ranks that split the same layers of a replica, one list per replica and stage."""
        each = self.tensor
        return [list(range(first, first + each)) for first in range(0, self.size, each)]

    @property
    def pipeline_groups(self) -> list[list[int]]:
        """Ranks of a replica with the same tensor coordinate, in stage order.

        One list per replica and tensor coordinate.
        """
        return [
            list(range(first + part, first + self.replica, self.tensor))
            for first in range(0, self.size, self.replica)
            for part in range(self.tensor)
        ]

    @property
    def stage_groups(self) -> list[list[int]]:
        """Ranks of an island in the same pipeline stage, one list per island and stage."""
        return [
            [rank for rank in ranks if self.stage_of(rank) == stage]
            for ranks in self.island_groups
            for stage in range(self.pipeline)
        ]

    @property
    def expert_groups(self) -> list[list[int]]:
        """Groups of consecutive ranks of a stage that together hold every expert of it once."""
        each = self.expert
        return [
            ranks[first : first + each]
            for ranks in self.stage_groups
            for first in range(0, len(ranks), each)
        ]

    @property
    def expert_copy_groups(self) -> list[list[int]]:
        """Groups of ranks that hold the same experts, in ascending order."""
        each = self.expert
        return [ranks[part::each] for ranks in self.stage_groups for part in range(each)]

    @property
    def context_groups(self) -> list[list[int]]:
        """Groups of ranks that hold the same part of the model and process the same samples.

        There is one list for each context group and part of the model. Ranks are in the order of
        their parts of the sequences.
        """
        each = self.replica
        return [
            list(range(first + part, first + each * self.context, each))
            for first in range(0, self.size, each * self.context)
            for part in range(each)
        ]

    def context_of(self, rank: int) -> int:
        """Return which part of each sequence `rank` computes."""
        return self.data_of(rank) % self.context

    @property
    def is_flat(self) -> bool:
        """True if every rank holds the full model and all ranks step together."""
        return self.replica == 1 and self.islands == 1 and self.expert == self.context == 1

    def changed(self, settings: Settings) -> Mesh:
        """Return a mesh with the axes from `settings` and the same islands.

        Raises ConfigError if the number of ranks is not divisible by the axes.
        """
        return mesh_of(settings, self.size, self.islands)

    def in_words(self) -> str:
        """Describe the axes in words, such as "2 data x 2 tensor"."""
        axes = {"islands": self.islands, "data": self.data // self.islands // self.context}
        axes |= {"context": self.context, "pipeline": self.pipeline, "tensor": self.tensor}
        words = " x ".join(f"{n} {name}" for name, n in axes.items() if n > 1 or name == "data")
        return words if self.expert == 1 else f"{words} (experts over {self.expert})"


def mesh_of(settings: Settings, size: int, islands: int) -> Mesh:
    """Return the mesh of a run with `size` ranks. Raises ConfigError if the settings do not fit."""
    if settings.exact is not None and islands > 1:
        raise ConfigError(
            f"--exact {settings.exact} cannot be combined with --islands {settings.islands}: with "
            "islands, results depend on their number. Remove one of the two."
        )
    if settings.exact is not None and settings.tensor > 1:
        raise ConfigError(
            f"--exact {settings.exact} cannot be combined with --tensor {settings.tensor}: the "
            "sums in a split layer depend on the number of workers that split it. Remove one of "
            "the two."
        )
    if not settings.reseed and (settings.tensor > 1 or settings.pipeline > 1):
        split = "tensor" if settings.tensor > 1 else "pipeline"
        raise ConfigError(
            f"--no-reseed cannot be combined with --{split} {getattr(settings, split)}: the "
            "workers of a split model need the same random numbers, and get them from the seed of "
            "each step. Remove one of the two."
        )
    if settings.exact is not None and settings.pipeline > 1:
        raise ConfigError(
            f"--exact {settings.exact} cannot be combined with --pipeline {settings.pipeline}: "
            "both cut the batch, in different ways. Remove one of the two."
        )
    if settings.expert > 1:
        _check_expert(settings, islands)
    if settings.exact is not None and settings.context > 1:
        raise ConfigError(
            f"--exact {settings.exact} cannot be combined with --context {settings.context}: the "
            "gradient of a weight is a sum over tokens, whose rounding depends on the number of "
            "workers that share a sequence. Remove one of the two."
        )
    return Mesh(
        size, settings.tensor, settings.pipeline, islands, settings.expert, settings.context
    )


def _check_expert(settings: Settings, islands: int) -> None:
    """Raise ConfigError if other axes of `settings` cannot be combined with `--expert`."""
    if islands > 1:
        raise ConfigError(
            f"--expert {settings.expert} cannot be combined with --islands {islands} yet: the "
            "workers that hold the experts may be in different islands, which do not exchange "
            "tokens in each layer. Remove one of the two."
        )
    if settings.expert % settings.tensor:
        raise ConfigError(
            f"--expert {settings.expert} is not a multiple of --tensor {settings.tensor}: the "
            "workers of a replica share its tokens out, so they hold different experts. Write "
            f"--expert {settings.tensor}, or a multiple of it."
        )
    if settings.exact is not None and settings.expert not in (
        sizes := sum_tree.node_sizes(settings.exact)
    ):
        raise ConfigError(
            f"--expert {settings.expert} does not fit --exact {settings.exact}: the workers that "
            "exchange tokens must add up a node of its tree of sums. Write --expert with one of "
            f"{', '.join(map(str, sizes))}, or remove one of the two."
        )
