"""Defines when and how islands synchronise, and implements the outer optimizer.

An island is a group of ranks that trains independently, under any placement. Every H steps, each
island sends the change in its parameters since the last synchronisation. All islands then apply the
mean of these differences to the last common value, the anchor:

    every 1, mean                parameter averaging, as in local SGD (Stich, 2019)
    every H, Nesterov            DiLoCo (Douillard et al., 2023, arXiv:2311.08105)
    every H, Nesterov, late T    streaming DiLoCo (Douillard et al., 2025, arXiv:2501.18512): the
                                 fragments (here buckets) are sent in turn, and applied T steps
                                 later while training continues

Alternatively, islands synchronise gradients at every step and apply them S steps later
(`StalenessRule`). This is bounded staleness as in a parameter server (Ho et al., 2013), except that
the delays are the same in every run.

This module only does arithmetic. It does not communicate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardwise.errors import ConfigError

if TYPE_CHECKING:  # the command line starts without importing torch
    from torch import Tensor

LOSSLESS = "fp32"

FORMATS = (LOSSLESS, "bf16", "int8", "int4")
"""Formats for values sent between islands. The lossless format sends fp64 values as fp64."""

BLOCK = 256
"""Number of values that share a scale in the int8 and int4 formats."""

ALIGNMENT = 8
"""Packed messages are padded to a multiple of this many bytes, to be viewable as any dtype."""


def packed_lengths(wire: str, numel: int, itemsize: int) -> tuple[int, int]:
    """Return the sizes in bytes of the packed scales and codes for `numel` values.

    `wire` is the format, and `itemsize` the size of an unpacked value in bytes.
    """
    if wire not in ("int8", "int4"):
        return 0, numel * (2 if wire == "bf16" else itemsize)
    # One fp32 scale per block, and one code per byte (int8) or two (int4).
    scales = -(-numel // BLOCK) * 4
    return scales, numel if wire == "int8" else -(-numel // 2)


def packed_bytes(wire: str, numel: int, itemsize: int) -> int:
    """Return the packed size in bytes of `numel` values, including padding.

    `wire` is the format, and `itemsize` the size of an unpacked value in bytes.
    """
    return -(-sum(packed_lengths(wire, numel, itemsize)) // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Outer:
    """The outer update, which applies the mean difference D to the anchor.

    The formula is the one in `torch.optim.SGD` with Nesterov momentum:

    velocity = momentum x velocity + D
    anchor  -= lr (D + momentum x velocity)
    """

    lr: float = 1.0
    momentum: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Outer:
        """Parse "mean" or "nesterov:LR,MOMENTUM". Raises ValueError for any other text."""
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
        """Apply the mean difference `mean` to `value`, and update `velocity`, both in place.

        All tensors are flat and have the same dtype and length. `velocity` is None if there is no
        momentum.
        """
        if velocity is None:
            value.sub_(mean, alpha=self.lr)
            return
        velocity.mul_(self.momentum).add_(mean)
        value.sub_(mean.add(velocity, alpha=self.momentum), alpha=self.lr)

    def __str__(self) -> str:
        return f"nesterov:{self.lr:g},{self.momentum:g}" if self.momentum else "mean"


@dataclass(frozen=True, kw_only=True)
class IslandRule:
    """The rule by which islands synchronise parameters.

    Args:
        every: The number of steps between two synchronisations of the same bucket.
        outer: The update that is applied to the anchor.
        wire: The format in which differences are sent (one of FORMATS).
        late: The number of steps between sending and applying a difference.

    Raises:
        ConfigError: `late` is not less than `every`.
    """

    every: int = 30
    outer: Outer = field(default_factory=Outer)
    wire: str = LOSSLESS
    late: int = 0

    def __post_init__(self) -> None:
        if self.late >= self.every:
            raise ConfigError(
                f"--late {self.late} with --equal-every {self.every}: a difference must be "
                f"applied before the next one is sent. Write --late {self.every - 1} or less, or "
                f"--equal-every {self.late + 1} or more."
            )

    def offset(self, bucket: int, buckets: int) -> int:
        """Return the number of steps between sending the first bucket and sending `bucket`."""
        # If `late` is positive, transfers run while training continues, and sending buckets in turn
        # keeps the link busy all the time. Otherwise a step waits for each transfer, so spreading
        # them out gains nothing.
        return bucket * self.every // max(buckets, 1) if self.late else 0

    def sends(self, step: int, bucket: int, buckets: int) -> bool:
        """Return whether the bucket with index `bucket` is sent after `step` completed steps."""
        return step > 0 and step % self.every == self.offset(bucket, buckets)

    def is_due(self, step: int, bucket: int, buckets: int) -> bool:
        """Return whether the last sent difference of `bucket` is applied after `step` steps."""
        return step > self.late and self.sends(step - self.late, bucket, buckets)

    def in_words(self) -> str:
        """Return a description such as "parameters synchronised every 30 steps (mean)"."""
        late = f", used {self.late} step{'s' * (self.late > 1)} later" if self.late else ""
        wire = "" if self.wire == LOSSLESS else f", sent as {self.wire}"
        return f"parameters synchronised every {self.every} steps ({self.outer}){wire}{late}"


@dataclass(frozen=True, kw_only=True)
class StalenessRule:
    """The rule by which islands synchronise gradients at every step.

    The update in step n uses the gradients from step n - `behind`. Gradients are sent in the format
    `wire`.
    """

    behind: int
    wire: str = LOSSLESS

    def in_words(self) -> str:
        """Return a description such as "gradients synchronised every step"."""
        late = f", used {self.behind} step{'s' * (self.behind > 1)} later" if self.behind else ""
        wire = "" if self.wire == LOSSLESS else f", sent as {self.wire}"
        return f"gradients synchronised every step{wire}{late}"
