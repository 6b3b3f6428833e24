"""The ranks that hold one copy of the model between them, and what they draw."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.collectives import Collectives
from shardwise.randomness import seed_from


class Draws:
    """Lets each rank draw for itself where an activation is split, and all alike elsewhere.

    A region of split activations begins with one draw that all ranks make alike; of it and its own
    number each makes the seed of what is drawn inside. Where the region ends, all go on from where
    they were. So dropout has one mask in all ranks on what all have, and another in each on its
    part of a whole.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._outside: torch.Tensor | None = None
        self.active = False
        """Whether forwards draw anything at all."""

    @property
    def _generator(self) -> torch.Generator:
        if self._device.type == "cuda":
            return torch.cuda.default_generators[self._device.index or 0]
        return torch.default_generator

    def enter(self) -> None:
        """What follows is this rank's own."""
        if self.active and self._outside is None:
            common = int(torch.randint(2**31, (), generator=torch.default_generator))
            self._outside = self._generator.get_state()
            self._generator.manual_seed(seed_from("split", common, self._rank))

    def leave(self) -> None:
        """What follows is alike on all ranks."""
        if self._outside is not None:
            self._generator.set_state(self._outside)
            self._outside = None

    def forget(self) -> None:
        """All generators are set anew: nothing is to go on from."""
        self._outside = None


@dataclass(eq=False)
class Replica:
    """The ranks of `group`, which split layers between them."""

    group: Collectives
    draws: Draws
    is_whole: bool = False
    """Whether every rank has whole parameters for now, so that forwards are the plain ones."""
