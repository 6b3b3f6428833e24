"""Finds why a placement trains differently, by trying: takes a suspect away, and names it if the
difference goes with it.

Which suspects are worth a trial is in suspects.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A possible cause: `alter` is what takes it away, in the reference too where `both`;
    `settings` are flags that do."""

    name: str
    words: str
    alter: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    both: bool = False
    beside: str = ""
    """What is said of it where it belongs to the mistake that another one names."""


@dataclass(frozen=True)
class Found:
    """The causes that were named, and what else was seen where none was."""

    causes: Sequence[Suspect]
    clue: str = ""


Agrees = Callable[[Sequence[Suspect]], bool]
"""Whether reference and placement train alike when all of these are taken away."""


def find(suspects: Sequence[Suspect], agrees: Agrees, clue: str) -> Found:
    """The first suspect without which the difference goes, or the fewest together."""
    for suspect in suspects:
        if agrees([suspect]):
            return Found([suspect])
    plain = [each for each in suspects if each.name != "rank"]
    if len(plain) < 2 or not agrees(plain):
        return Found([], clue)
    needed = list(plain)
    for suspect in reversed(plain):  # the particular ones are kept
        fewer = [each for each in needed if each is not suspect]
        if len(fewer) > 1 and agrees(fewer):
            needed = fewer
    # A batch of a worker's own has TOTAL // workers rows, and a sum that is made by hand is divided
    # by the workers: such a pair is one mistake.
    particular = [each for each in needed if each.name != "size"]
    if len(needed) == 2 and len(particular) == 1:
        (one,), (size,) = particular, (each for each in needed if each.name == "size")
        return Found([replace(one, words=f"{one.words} {size.beside}")])
    return Found(needed)


UNSHARED = Suspect(
    name="unshared",
    words="every worker trains on the whole batch: all that differs is how many items a step "
    "counts. The result is that of one worker, and so is the time it takes. Let sw.Loader or "
    "world.share give each worker its rows.",
)
NOT_REPEATABLE = Suspect(
    name="nondeterministic",
    words="two runs of the reference itself differ, so the script is not repeatable: a "
    "nondeterministic operation, or numbers that no seed decides (a generator seeded by the time, "
    "the order of a set of strings, threads that race).",
)
UNSEEDED = Suspect(
    name="seed",
    words="the script gives no seed, so that two runs of the reference itself differ; with --seed "
    "0 they agree. Write sw.init(seed=0), or give --seed.",
)
SETS = Suspect(
    name="hashes",
    words="two runs of the reference itself differ, and agree with PYTHONHASHSEED=0: something "
    "depends on the order of a set, or on hash() of a string. Sort it.",
)
