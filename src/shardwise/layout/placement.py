"""Placement is the table of what is replicated, what sharded, and on which tier each state rests.

Training has three states. Each is replicated over the data-parallel group or sharded over it,
and the row of these cells is all that data parallelism and ZeRO (Rajbhandari et al., 2020)
differ in:

    row      parameters   gradients    optimizer state
    ZERO_0   replicated   replicated   replicated
    ZERO_1   replicated   replicated   sharded
    ZERO_2   replicated   sharded      sharded
    ZERO_3   sharded      sharded      sharded

A sharded state needs the states to its right sharded too: a rank that holds an interval of the
parameters can only use that interval of their gradient, and so on.

Each cell also has a tier, where the state's bytes rest between uses: the device, the host's memory
(ZeRO-Offload, Ren et al., 2021) or a disk (ZeRO-Infinity, Rajbhandari et al., 2021). Parameters
and gradients can only rest elsewhere where they are sharded: replicated ones are in use, whole.

How often a state is made equal, and between which groups, is a cell of its own:
`outer_optimizer.py`.
"""

from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

from shardwise.errors import PlacementError


class Spread(Enum):
    """How a state lies over the data-parallel group."""

    REPLICATED = "replicated"
    SHARDED = "sharded"


@dataclass(frozen=True)
class Tier:
    """Where a state rests: "device", "cpu", or "nvme" with the `folder` for its files."""

    kind: str = "device"
    folder: str = ""

    @classmethod
    def parse(cls, text: str) -> "Tier":
        """A tier as it is written: "device", "cpu" or "nvme:FOLDER". Raises ValueError."""
        kind, colon, folder = text.partition(":")
        on_disk = kind == "nvme" and folder != ""
        if not on_disk and (colon or kind not in ("device", "cpu")):
            raise ValueError("device, cpu or nvme:FOLDER, the folder for its files")
        return cls(kind, folder)

    def __str__(self) -> str:
        return f"{self.kind}:{self.folder}" if self.folder else self.kind


DEVICE = Tier()

STATES = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One row of the table: a cell for each state. Raises PlacementError for an illegal row."""

    parameters: Spread = Spread.REPLICATED
    gradients: Spread = Spread.REPLICATED
    optimizer: Spread = Spread.REPLICATED
    tiers: tuple[Tier, Tier, Tier] = (DEVICE, DEVICE, DEVICE)
    """In the order of STATES."""

    def __post_init__(self) -> None:
        for holder, needed in pairwise(STATES):
            if self.is_sharded(holder) and not self.is_sharded(needed):
                nearest = _nearest_legal(self)
                raise PlacementError(
                    f"The row ({self.cells()}) is not legal: sharded {holder} need a sharded "
                    f"{needed} state, and that cell says replicated. The nearest legal row is "
                    f"{nearest.name} ({nearest.cells()}): write --zero {nearest.level}."
                )
        for state in STATES[:-1]:
            if self.tier(state) != DEVICE and not self.is_sharded(state):
                nearest = Placement.zero(len(STATES) - STATES.index(state))
                raise PlacementError(
                    f"The row ({self.cells()}) is not legal: {state} can rest on "
                    f"{self.tier(state).kind} only where they are sharded. The nearest legal row "
                    f"is {nearest.name}: write --zero {nearest.level}."
                )

    def tier(self, state: str) -> Tier:
        """Where `state` ("parameters", "gradients" or "optimizer") rests."""
        return self.tiers[STATES.index(state)]

    def is_sharded(self, state: str) -> bool:
        """Whether `state` ("parameters", "gradients" or "optimizer") is sharded."""
        return getattr(self, state) is Spread.SHARDED

    @property
    def level(self) -> int:
        """The ZeRO number of this row: how many of its cells are sharded."""
        return sum(self.is_sharded(state) for state in STATES)

    @property
    def name(self) -> str:
        """The row's name in the table, such as ZERO_2."""
        return f"ZERO_{self.level}"

    def cells(self) -> str:
        """The cells in words, such as "parameters replicated, gradients sharded, ..."."""
        return ", ".join(
            f"{state} {getattr(self, state).value}"
            + (f" on {tier.kind}" if (tier := self.tier(state)) != DEVICE else "")
            for state in STATES
        )

    def resting(
        self,
        *,
        parameters: Tier = DEVICE,
        gradients: Tier | None = None,
        optimizer: Tier = DEVICE,
    ) -> "Placement":
        """The same row with the states on these tiers; gradients, unless said, follow the
        optimizer state where they are sharded. Raises PlacementError."""
        follows = optimizer if self.is_sharded("gradients") else DEVICE
        tiers = (parameters, follows if gradients is None else gradients, optimizer)
        return replace(self, tiers=tiers)

    @classmethod
    def zero(cls, level: int) -> "Placement":
        """The row of a ZeRO number, 0 to 3."""
        if level not in range(len(STATES) + 1):
            raise PlacementError(
                f"There is no row ZERO_{level}: --zero takes 0, 1, 2 or 3 "
                "(0 replicates everything, 2 shards gradients and optimizer state)."
            )
        return cls.sharding(STATES[len(STATES) - level :])

    @classmethod
    def sharding(cls, states: tuple[str, ...]) -> "Placement":
        """The row in which exactly `states` are sharded."""
        sharded = dict.fromkeys(states, Spread.SHARDED)
        return cls(**sharded)  # type: ignore[arg-type]


def _nearest_legal(row: Placement) -> Placement:
    """The legal row that differs in the fewest cells; the one with more sharding wins."""
    legal = [Placement.zero(level) for level in reversed(range(len(STATES) + 1))]
    return min(
        legal,
        key=lambda other: sum(other.is_sharded(s) != row.is_sharded(s) for s in STATES),
    )
