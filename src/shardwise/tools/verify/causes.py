"""Finds why a placement trains differently, by trial: removes a suspect and compares again.

suspects.py lists the suspects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A possible cause.

    `alter` holds the alterations that remove it, made in the reference too if `in_reference`.
    `settings` are flags that remove it.
    """

    name: str
    words: str
    alter: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    in_reference: bool = False
    joint_words: str = ""
    """What to add to the words of another suspect if both are one error."""


@dataclass(frozen=True)
class FoundCauses:
    """The causes that were found, and a clue for the user if there is no cause."""

    causes: Sequence[Suspect]
    clue: str = ""


Agrees = Callable[[Sequence[Suspect]], bool]
"""Whether reference and placement train the same without all of these suspects."""


def find(suspects: Sequence[Suspect], agrees: Agrees, clue: str) -> FoundCauses:
    """Return the first suspect whose removal removes the difference, or the fewest together."""
    for suspect in suspects:
        if agrees([suspect]):
            return FoundCauses([suspect])

    # Without "rank": the alteration "size" makes every worker rank 0 already.
    plain = [each for each in suspects if each.name != "rank"]
    # All suspects together do not remove the difference, so no subset can be named.
    if len(plain) < 2 or not agrees(plain):
        return FoundCauses([], clue)
    needed = list(plain)
    for suspect in reversed(plain):  # drop general ones first, so that the particular ones stay
        fewer = [each for each in needed if each is not suspect]
        if len(fewer) > 1 and agrees(fewer):
            needed = fewer
    # One error may involve the number of workers in two ways: a batch per worker has
    # TOTAL // workers rows, and a sum made by hand is divided by them.
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
