"""Draws the losses of a run from a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from tests.random_losses.reference import STEPS

MOMENTS = ("forward", "backward", "reduce", "exchange", "confirm", "halfway", "update")
PUBLISHES = ("publish", "published")
"""Moments in the update of sharded optimizer state."""
GATHERS = ("gather", "gathered")
"""Moments around the gather of a unit of sharded parameters."""

JOINS = ("invite", "invited", "admit", "admitted", "refilled")
"""Moments when a rank admits spares, and its first step with them."""
ENTERS = ("come_back", "loaded", "enter", "entered")
"""Moments when a spare joins."""

SAVES = ("saving", "save", "begun", "written")
SPLIT = ("split", "stages", "context", "experts")
"""Models for `--tensor`, `--pipeline`, `--context` and `--expert`."""

LATER = 0.05
"""Longest time in seconds from a moment to the signal, for losses at any moment."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The signal `name` reaches `rank` at `moment` of step `at`, or so many seconds later."""

    rank: int
    moment: str
    at: int
    name: str
    seconds: float

    @property
    def word(self) -> str:
        """The loss as an argument of the script."""
        return f"{self.rank}:{self.moment}:{self.at}:{self.name}:{self.seconds:.4f}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of `size` ranks with `losses`, at most `most` of them at once."""

    size: int
    most: int
    zero: int
    offload: tuple[str, ...]
    transport: str
    loop: str
    kind: str
    losses: tuple[Loss, ...]
    spares: int = 0
    axes: tuple[str, ...] = ()
    """The flags of the exact mode, or of a model that is split over two ranks."""

    @property
    def replica(self) -> int:
        """Number of ranks that hold one replica of the model."""
        return 2 if self.kind in SPLIT else 1

    @property
    def placement(self) -> list[str]:
        """The flags that say where each state is stored."""
        offload = [word for name in self.offload for word in (f"--offload-{name}", "cpu")]
        return ["--zero", str(self.zero), *offload, *self.axes]

    def __str__(self) -> str:
        losses = ", ".join(loss.word for loss in self.losses)
        return (
            f"-n {self.size} --survive {self.most} --spares {self.spares} "
            f"{' '.join(self.placement)} --transport "
            f"{self.transport}, {self.loop}, {self.kind}: {losses}"
        )


def draw(seed: int) -> Run:
    """Draw the run of `seed`."""
    rng = Random(seed)
    size = rng.choice([2, 3, 4, 4])
    zero = rng.choice([0, 1, 2, 2, 3, 3])
    ranks = rng.sample(range(size), rng.choice([1, 1, 2]) if size > 2 else 1)
    losses = []
    for rank in ranks:
        moment = rng.choice([*MOMENTS, *(GATHERS if zero == 3 else PUBLISHES), *SAVES])
        # The script saves after each fourth step, and after the last one.
        at = rng.choice([4, 8, 12]) if moment in SAVES else rng.randrange(STEPS)
        losses.append(
            Loss(
                rank=rank,
                moment=moment,
                at=at,
                name=rng.choices(["KILL", "STOP", "TERM"], [80, 5, 15])[0],
                seconds=rng.random() * LATER if rng.random() < 0.4 else 0.0,
            )
        )
    run = Run(
        size=size,
        most=rng.choice([1, max(1, size - 1)]),
        zero=zero,
        offload=rng.choice([(), (), ("optimizer",), ("params", "optimizer")][: 4 - (zero < 3)]),
        transport=rng.choice(["auto", "auto", "gloo"]),
        loop=rng.choice(["steps", "plain"]),
        kind=rng.choice(["sgd", "adamw"]),
        losses=tuple(losses),
    )
    spares = rng.choice([0, 0, 1, 2])
    if spares and rng.random() < 0.5:
        # One more while a spare joins: of a rank that admits it, or of the spare.
        # A rank that admits a spare alone holds the only states, so its loss would end the run.
        is_spare = rng.random() < 0.5 or size - len(ranks) == 1
        losses.append(
            Loss(
                rank=size if is_spare else rng.choice([r for r in range(size) if r not in ranks]),
                moment=rng.choice(ENTERS if is_spare else JOINS),
                at=-1,
                name="KILL",
                seconds=rng.random() * LATER if rng.random() < 0.4 else 0.0,
            )
        )
    run = replace(run, spares=spares, losses=tuple(losses))
    if (drawn := rng.random()) < 0.15 and size in (2, 4):
        return replace(run, axes=("--exact", "4"), loop="steps")
    if drawn < 0.6 and size == 4:
        kind = rng.choice(SPLIT)
        run = replace(run, spares=0, losses=tuple(losses[: len(ranks)]))
        pipeline = kind == "stages" or rng.random() < 0.3
        axes = ("--pipeline", "2", "--stages", "2") if pipeline else ("--tensor", "2")
        if kind in ("context", "experts"):
            axes = ("--expert" if kind == "experts" else "--context", "2")
        return replace(run, axes=axes, kind=kind)
    return run
