"""Finds the cause of a difference by experiment: removes a suspect and compares the runs again.

The suspects are listed in suspects.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A possible cause of a difference.

    Attributes:
        name: Short name.
        words: Sentence to print if this is the cause.
        alter: Alterations of the script that eliminate this cause (see alterations.py).
        settings: Settings of the run that eliminate it.
        in_reference: Whether the alterations must also be applied to the reference.
    """

    name: str
    words: str
    alter: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    in_reference: bool = False
    joint_words: str = ""
    """Text to append to another suspect's `words` if both are part of the same error."""


@dataclass(frozen=True)
class FoundCauses:
    """The causes that were found, or a clue for the user if there are none."""

    causes: Sequence[Suspect]
    clue: str = ""


Agrees = Callable[[Sequence[Suspect]], bool]
"""Returns whether the reference and the placement agree once the given suspects are removed."""


def find(suspects: Sequence[Suspect], agrees: Agrees, clue: str) -> FoundCauses:
    """Return the first suspect whose removal alone eliminates the difference.

    If there is none, return a minimal set of suspects whose combined removal eliminates it. If
    there is no such set either, return `clue`.
    """
    for suspect in suspects:
        if agrees([suspect]):
            return FoundCauses([suspect])

    # Leave out "rank", because the alteration "size" also makes every worker see rank 0.
    plain = [each for each in suspects if each.name != "rank"]
    # If removing all suspects together does not eliminate the difference, no subset is the cause.
    if len(plain) < 2 or not agrees(plain):
        return FoundCauses([], clue)
    needed = list(plain)
    for suspect in reversed(plain):  # drop general suspects first, to keep the specific ones
        fewer = [each for each in needed if each is not suspect]
        if len(fewer) > 1 and agrees(fewer):
            needed = fewer
    # A single error may use the number of workers in two places. For example, the script uses
    # TOTAL // workers rows per worker, and divides its own sum by the number of workers.
    particular = [each for each in needed if each.name != "size"]
    if len(needed) == 2 and len(particular) == 1:
        [size] = (each for each in needed if each.name == "size")
        return FoundCauses(
            [replace(particular[0], words=f"{particular[0].words} {size.joint_words}")]
        )
    return FoundCauses(needed)


UNSHARED = Suspect(
    name="unshared",
    words="every worker trains on the whole batch, so only the number of items that a step counts "
    "differs. It gives the result of one worker, and takes as long. Give each worker its rows with "
    "sw.Loader or world.share.",
)
NOT_REPEATABLE = Suspect(
    name="nondeterministic",
    words="two runs of the reference itself differ, so the script is not repeatable. It uses a "
    "nondeterministic operation, or numbers that depend on no seed (a generator seeded by the "
    "time, the order of a set of strings, threads that race).",
)
UNSEEDED = Suspect(
    name="seed",
    words="the script sets no seed, so two runs of the reference itself differ. With --seed 0 they "
    "agree. Write sw.init(seed=0), or give --seed.",
)
SETS = Suspect(
    name="hashes",
    words="two runs of the reference itself differ, but agree with PYTHONHASHSEED=0: something "
    "depends on the order of a set, or on hash() of a string. Sort the set.",
)
