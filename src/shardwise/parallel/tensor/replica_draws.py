"""What the ranks of a replica draw: alike where they have the same, else each for itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shardwise.model.recomputation import once
from shardwise.randomness import seed_from


class Draws:
    """Lets each rank draw for itself where an activation is split, and all alike elsewhere.

    A region of split activations begins with one draw that all ranks make alike; of it and its own
    number each makes the seed of what is drawn inside. Where the region ends, all go on from where
    they were. So dropout has one mask in all ranks on what all have, and another in each on its
    part of a whole.

    A recomputation is told where its forward's regions began and ended, and leaves none open: it
    stops at the last tensor that backward needs, which may be inside of one.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._outside: Tensor | None = None

    @property
    def is_open(self) -> bool:
        """Whether what is computed now is this rank's own."""
        return once(lambda: self._outside is not None)

    @property
    def _generator(self) -> torch.Generator:
        if self._device.type == "cuda":
            return torch.cuda.default_generators[self._device.index or 0]
        return torch.default_generator

    def enter(self) -> None:
        """What follows is this rank's own."""
        if not self.is_open:
            # Drawn again by a recomputation: what else draws on the host goes on from there.
            common = int(torch.randint(2**31, (), generator=torch.default_generator))
            once(self._begin)
            self._generator.manual_seed(seed_from("split", common, self._rank))

    def _begin(self) -> None:
        self._outside = self._generator.get_state()

    def leave(self) -> None:
        """What follows is alike on all ranks."""
        outside = once(self._end)
        if outside is not None:
            self._generator.set_state(outside)

    def _end(self) -> Tensor | None:
        """Where all were when the region began; None outside of one."""
        outside, self._outside = self._outside, None
        return outside

    def forget(self) -> None:
        """All generators are set anew: nothing is to go on from."""
        self._outside = None

    @contextmanager
    def own(self) -> Iterator[None]:
        """Inside the block a region is open: the one that is, or one of the block's own."""
        if self.is_open:
            yield
            return
        self.enter()
        try:
            yield
        finally:
            self.leave()
