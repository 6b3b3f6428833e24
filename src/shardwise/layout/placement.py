"""The placement table: whether each state is replicated or sharded, and the tier that stores it.

Training has three states. Each is either replicated or sharded across the data-parallel group. Data
parallelism and the ZeRO stages (Rajbhandari et al., 2020) differ only in these cells:

    row      parameters   gradients    optimizer state
    ZERO_0   replicated   replicated   replicated
    ZERO_1   replicated   replicated   sharded
    ZERO_2   replicated   sharded      sharded
    ZERO_3   sharded      sharded      sharded

If a state is sharded, the states to its right must be sharded, too. For example, a rank that stores
an interval of the parameters can only use the same interval of their gradient.

Each cell also has a tier, which stores the state between uses: the device, host memory
(ZeRO-Offload, Ren et al., 2021) or a disk (ZeRO-Infinity, Rajbhandari et al., 2021). Parameters and
gradients can be offloaded only if they are sharded, because replicated ones are always in use.

The table does not say how often groups of ranks exchange a state; see `islands/` for that.
"""

from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

from shardwise.errors import PlacementError


class Spread(Enum):
    """Whether each rank of the data-parallel group holds the full state or a shard of it."""

    REPLICATED = "replicated"
    SHARDED = "sharded"


@dataclass(frozen=True)
class Tier:
    """The memory that stores a state: "device", "cpu", or "nvme" with a `folder` for its files."""

    kind: str = "device"
    folder: str = ""

    @classmethod
    def parse(cls, text: str) -> "Tier":
        """Parse "device", "cpu" or "nvme:FOLDER". Raises ValueError for any other text."""
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
    """A row of the placement table: for each state, whether it is sharded, and its tier.

    Raises PlacementError if the combination is not allowed.
    """

    parameters: Spread = Spread.REPLICATED
    gradients: Spread = Spread.REPLICATED
    optimizer: Spread = Spread.REPLICATED
    tiers: tuple[Tier, Tier, Tier] = (DEVICE, DEVICE, DEVICE)
    """Tier of each state, in the order of STATES."""

    def __post_init__(self) -> None:
        # A sharded state requires that the next state in the table is sharded, too.
        for holder, needed in pairwise(STATES):
            if self.is_sharded(holder) and not self.is_sharded(needed):
                # Suggest the row that differs in the fewest cells. In a tie, prefer more sharding.
                nearest = min(
                    (Placement.zero(level) for level in reversed(range(len(STATES) + 1))),
                    key=lambda row: sum(row.is_sharded(s) != self.is_sharded(s) for s in STATES),
                )
                raise PlacementError(
                    f"The row ({self.cells()}) is not legal: sharded {holder} need a sharded "
                    f"{needed} state, and that cell says replicated. The nearest legal row is "
                    f"{nearest.name} ({nearest.cells()}): write --zero {nearest.level}."
                )
        for state in STATES[:-1]:
            if self.tier(state) != DEVICE and not self.is_sharded(state):
                nearest = Placement.zero(len(STATES) - STATES.index(state))
                raise PlacementError(
                    f"The row ({self.cells()}) is not legal: {state} can be on the tier "
                    f"{self.tier(state).kind} only if they are sharded. The nearest legal row "
                    f"is {nearest.name}: write --zero {nearest.level}."
                )

    def tier(self, state: str) -> Tier:
        """Return the tier of `state` ("parameters", "gradients" or "optimizer")."""
        return self.tiers[STATES.index(state)]

    def is_sharded(self, state: str) -> bool:
        """Return whether `state` ("parameters", "gradients" or "optimizer") is sharded."""
        return getattr(self, state) is Spread.SHARDED

    @property
    def level(self) -> int:
        """ZeRO stage of this row, which equals its number of sharded cells."""
        return sum(self.is_sharded(state) for state in STATES)

    @property
    def name(self) -> str:
        """Name of the row, such as ZERO_2."""
        return f"ZERO_{self.level}"

    def cells(self) -> str:
        """Describe the placement of each state: "parameters replicated, gradients sharded, ..."."""
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
        """Return the same row with the given tiers.

        If `gradients` is None, sharded gradients use the optimizer state's tier and replicated ones
        use the device. Raises PlacementError if a tier requires a sharded state.
        """
        follows = optimizer if self.is_sharded("gradients") else DEVICE
        tiers = (parameters, follows if gradients is None else gradients, optimizer)
        return replace(self, tiers=tiers)

    @classmethod
    def zero(cls, level: int) -> "Placement":
        """Return the row of ZeRO stage `level`, 0 to 3. Raises PlacementError for other numbers."""
        if level not in range(len(STATES) + 1):
            raise PlacementError(
                f"There is no row ZERO_{level}: --zero takes 0, 1, 2 or 3 "
                "(0 replicates everything, 2 shards gradients and optimizer state)."
            )
        return cls.sharding(STATES[len(STATES) - level :])

    @classmethod
    def sharding(cls, states: tuple[str, ...]) -> "Placement":
        """Return the row that shards `states` and replicates the others."""
        sharded = dict.fromkeys(states, Spread.SHARDED)
        return cls(**sharded)  # type: ignore[arg-type]
