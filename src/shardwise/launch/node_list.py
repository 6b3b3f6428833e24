"""How Slurm writes lists: hosts as `n[1-2,7],m03`, tasks of each host as `2(x3),1`. Pure."""

import re
from collections.abc import Iterator
from itertools import product

from shardwise.config.values import MOST_RANKS
from shardwise.errors import LaunchError

_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)
_NUMBER = re.compile(r"0*\d{1,18}", re.ASCII)
_HOST = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")


def hosts(text: str) -> list[str]:
    """The names in a node list, in its order: `n[1-2,7],m03` is n1, n2, n7, m03.

    Numbers keep their leading zeros, and a name may have several ranges. Raises LaunchError.
    """
    patterns = _HOST.findall(text)
    if not patterns or ",".join(patterns) != text:
        raise LaunchError(
            f"{text!r} is no list of nodes such as n[1-2,7],m03, which Slurm should have given."
        )
    return [name for pattern in patterns for name in _names(pattern, text)]


def _names(pattern: str, text: str) -> list[str]:
    parts = [
        [plain] if plain else list(_numbers(ranges, text))
        for ranges, plain in _PART.findall(pattern)
    ]
    return ["".join(name) for name in product(*parts)]


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for one in ranges.split(","):
        low, dash, high = one.partition("-")
        high = high if dash else low
        ends = [_NUMBER.fullmatch(each) for each in (low, high)]
        if not all(ends) or not 0 <= int(high) - int(low) < MOST_RANKS:
            raise LaunchError(f"{one!r} in the list of nodes {text!r} is no number nor a range.")
        for number in range(int(low), int(high) + 1):
            yield f"{number:0{len(low)}d}"


def counts(text: str) -> list[int]:
    """How many tasks each host has: `2(x3),1` is 2, 2, 2, 1. Raises LaunchError."""
    found: list[int] = []
    if sum(map(int, re.findall(r"\(x(\d{1,9})", text, re.ASCII))) > MOST_RANKS:
        raise LaunchError(f"{text!r} lists more hosts than any run has: check what sets it.")
    for one in text.split(","):
        match = _COUNT.fullmatch(one)
        if match is None:
            raise LaunchError(
                f"{text!r} is no list of tasks such as 2(x3),1, which Slurm should have given."
            )
        found += [int(match[1])] * int(match[2] or 1)
    return found
