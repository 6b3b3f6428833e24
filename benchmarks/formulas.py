"""What a rank holds of each state, by formula: pure arithmetic.

Bytes per parameter with AdamW, from the ZeRO paper (Rajbhandari et al., 2020, section 3.1) for 16
bit; in fp32 the parameters are their own masters:

              parameter   gradient   masters and two moments
    fp32              4          4                         8
    bf16              2          2                        12

A sharded state is divided by the number of ranks. A disk keeps the sums of 16-bit gradients in
fp32, as the update wants them.
"""

from collections.abc import Mapping

STATES = ("parameters", "gradients", "optimizer")

BYTES: dict[str, dict[str, float]] = {
    "fp32": {"parameters": 4, "gradients": 4, "optimizer": 8},
    "bf16": {"parameters": 2, "gradients": 2, "optimizer": 12},
}
"""Per parameter, by precision."""

OFFLOADED: dict[str, tuple[str, ...]] = {
    "device": (),
    "nvme: optimizer": ("optimizer",),
    "nvme: optimizer, parameters": ("optimizer", "parameters"),
}
"""The states that a tier's settings move to a disk; sharded gradients follow the optimizer."""


def sharded(zero: int) -> tuple[str, ...]:
    """The states that the row ZERO_n shards."""
    return STATES[len(STATES) - zero :]


def on_disk(zero: int, tier: str) -> frozenset[str]:
    """The states that rest on a disk."""
    moved = set(OFFLOADED[tier])
    if "optimizer" in moved and "gradients" in sharded(zero):
        moved.add("gradients")
    return frozenset(moved)


def is_legal(zero: int, tier: str) -> bool:
    """Whether the row has that tier: parameters only rest elsewhere where they are sharded."""
    return "parameters" not in OFFLOADED[tier] or "parameters" in sharded(zero)


def held(zero: int, tier: str, precision: str, parameters: int, ranks: int) -> dict[str, float]:
    """Bytes of each state that one of `ranks` ranks holds, wherever they rest."""
    each = BYTES[precision]
    if "gradients" in on_disk(zero, tier):
        each = each | {"gradients": 4}
    split = {state: ranks if state in sharded(zero) else 1 for state in STATES}
    return {state: parameters * each[state] / split[state] for state in STATES}


def in_memory(zero: int, tier: str, of_states: Mapping[str, float]) -> float:
    """What of `of_states`, bytes by state, takes memory between two steps."""
    away = on_disk(zero, tier)
    return sum(of_states[state] for state in STATES if state not in away)
