"""Draws a fault from a seed: its rank, its kind and its place."""

from dataclasses import dataclass
from random import Random

SIGNALS = {"kill": 9, "abort": 6, "segmentation fault": 11, "stop": 19}
OWN = ("exit(0)", "exit at once", "exit(3)", "exception", "memory")
MOMENTS = ("any moment of a step", "any moment of a save")
PLACES = ("before sw.init", "after sw.init", "forward", "backward", "before the step", *MOMENTS)
STEPS = 6


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of the rank `victim` of `size`: `kind` at `place` in `step`, counted from 1.

    At a place of MOMENTS it strikes `delay` seconds later. The other ranks wait `timeout` seconds.
    """

    size: int
    victim: int
    kind: str
    place: str
    step: int
    zero: int
    transport: str
    delay: float
    timeout: float = 20.0

    def __str__(self) -> str:
        after = f" + {self.delay * 1e3:.2f} ms" if self.place in MOMENTS else ""
        return (
            f"{self.kind} of rank {self.victim} of {self.size}, {self.place}{after} (step "
            f"{self.step}, --zero {self.zero}, --transport {self.transport})"
        )


def draw(seed: int) -> Fault:
    """Draw the fault of `seed`."""
    rng = Random(seed)
    size = rng.choice([2, 2, 3])
    place = rng.choice(PLACES)
    kinds = [*SIGNALS] if place in MOMENTS else [*SIGNALS, *OWN]
    return Fault(
        size=size,
        victim=rng.randrange(size),
        kind=rng.choice(kinds),
        place=place,
        step=rng.randrange(1, STEPS),
        zero=rng.choice([0, 1, 2, 3]),
        transport=rng.choice(["auto", "auto", "gloo"]),
        delay=rng.random() * 0.006,
    )
