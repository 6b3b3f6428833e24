"""The outer optimizer of islands: how often parameters are made equal, by which update, how late.

An island is a group of ranks that makes its own steps, in any row of the table. Every H steps each
sends how far its parameters have come since they were last equal, and all move that last common
value, the anchor, by the mean of what came:

    every 1, mean                parameter averaging, as local SGD (Stich, 2019)
    every H, Nesterov            DiLoCo (Douillard et al., 2023, arXiv:2311.08105)
    every H, Nesterov, late T    streaming DiLoCo (Douillard et al., 2025, arXiv:2501.18512): a
                                 fragment, here a bucket, is sent in its turn, and is used T steps
                                 later, so that steps go on while it travels

Or gradients are made equal, at every step, and used S steps later: bounded staleness, as of a
parameter server (Ho et al., 2013), with delays that are the same in every run (`StalenessRule`).

Pure arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardwise.errors import ConfigError

if TYPE_CHECKING:  # the command starts without torch
    from torch import Tensor

LOSSLESS = "fp32"

FORMATS = (LOSSLESS, "bf16", "int8", "int4")
"""How differences may be sent. Lossless: fp64 values are sent in fp64."""

BLOCK = 256
"""Values that share a scale, in the formats int8 and int4."""

ALIGNMENT = 8
"""Bytes to which a packed message is rounded up, so that any format can be viewed in place."""


def packed_lengths(wire: str, numel: int, itemsize: int) -> tuple[int, int]:
    """Return the bytes of the scales and of the codes of `numel` values of `itemsize` bytes."""
    if wire not in ("int8", "int4"):
        return 0, numel * (2 if wire == "bf16" else itemsize)
    scales = -(-numel // BLOCK) * 4
    return scales, numel if wire == "int8" else -(-numel // 2)


def packed_bytes(wire: str, numel: int, itemsize: int) -> int:
    """Return the bytes of `numel` values of `itemsize` bytes, packed in the format `wire`."""
    return -(-sum(packed_lengths(wire, numel, itemsize)) // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Outer:
    """The update of the anchor by the mean difference D: anchor -= lr (D + momentum x velocity),
    where velocity = momentum x velocity + D, as torch's SGD with Nesterov momentum has it."""

    lr: float = 1.0
    momentum: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Outer:
        """ "mean", or "nesterov:LR,MOMENTUM". Raises ValueError."""
        kind, colon, numbers = text.partition(":")
        if kind == "mean" and not colon:
            return cls()
        try:
            lr, momentum = (float(number) for number in numbers.split(","))
        except ValueError:
            lr, momentum = math.nan, math.nan
        if kind != "nesterov" or not (0 < lr < math.inf and 0 < momentum < 1):
            raise ValueError(
                "mean, or nesterov:LR,MOMENTUM with a rate above 0 and a momentum between 0 and 1, "
                "such as nesterov:0.7,0.9"
            )
        return cls(lr, momentum)

    def move(self, value: Tensor, mean: Tensor, velocity: Tensor | None) -> None:
        """Move `value` by the `mean` difference, in place, and so `velocity`, which is None without
        momentum; all are flat, of one dtype and length."""
        if velocity is None:
            value.sub_(mean, alpha=self.lr)
            return
        velocity.mul_(self.momentum).add_(mean)
        value.sub_(mean.add(velocity, alpha=self.momentum), alpha=self.lr)

    def __str__(self) -> str:
        return f"nesterov:{self.lr:g},{self.momentum:g}" if self.momentum else "mean"


@dataclass(frozen=True, kw_only=True)
class IslandRule:
    """How parameters are made equal: `every` so many steps, by `outer`; differences are sent as
    `wire`, one of FORMATS, and used `late` steps after. Raises ConfigError where that cannot be."""

    every: int = 30
    outer: Outer = field(default_factory=Outer)
    wire: str = LOSSLESS
    late: int = 0

    def __post_init__(self) -> None:
        if self.late >= self.every:
            raise ConfigError(
                f"--late {self.late} with --equal-every {self.every}: a difference must be there "
                f"before the next one is sent. Write --late {self.every - 1} or less, or "
                f"--equal-every {self.late + 1} or more."
            )

    def offset(self, bucket: int, buckets: int) -> int:
        """By how many steps the turn of `bucket` comes after that of the first: where differences
        travel beside steps they take turns, so that the link is always in use; else none waits."""
        return bucket * self.every // max(buckets, 1) if self.late else 0

    def sends(self, step: int, bucket: int, buckets: int) -> bool:
        """Whether `bucket` of so many is sent when `step` steps were made."""
        return step > 0 and step % self.every == self.offset(bucket, buckets)

    def is_due(self, step: int, bucket: int, buckets: int) -> bool:
        """Whether what was sent of `bucket` is used when `step` steps were made."""
        return step > self.late and self.sends(step - self.late, bucket, buckets)

    def in_words(self) -> str:
        """What is made equal when, such as "parameters equal every 30 steps (mean), as int8"."""
        late = f", used {self.late} step{'s' * (self.late > 1)} after" if self.late else ""
        wire = "" if self.wire == LOSSLESS else f", sent as {self.wire}"
        return f"parameters equal every {self.every} steps ({self.outer}){wire}{late}"


@dataclass(frozen=True, kw_only=True)
class StalenessRule:
    """How gradients are made equal: at every step, sent as `wire`, one of FORMATS; the update of
    step n is by the gradients of step n - `behind`."""

    behind: int
    wire: str = LOSSLESS

    def in_words(self) -> str:
        """What is made equal when, such as "gradients equal every step, used 3 steps behind"."""
        late = f", used {self.behind} step{'s' * (self.behind > 1)} behind" if self.behind else ""
        wire = "" if self.wire == LOSSLESS else f", sent as {self.wire}"
        return f"gradients equal every step{wire}{late}"
