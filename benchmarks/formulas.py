"""The bytes of the states that a rank holds, by formula.

Per parameter with AdamW in fp32, after the ZeRO paper (Rajbhandari et al., 2020, section 3.1): 4 of
the parameter, 4 of its gradient, 8 of two moments. A sharded state is divided by the number of
ranks.
"""

STATES = {"parameters": 4, "gradients": 4, "optimizer": 8}
"""Bytes per parameter; the row ZERO_n shards the last n states."""


def held(zero: int, parameters: int, ranks: int) -> float:
    """Return the bytes that one of `ranks` ranks holds in the row ZERO_n."""
    sharded = list(STATES)[len(STATES) - zero :]
    return sum(
        parameters * each / (ranks if state in sharded else 1) for state, each in STATES.items()
    )
