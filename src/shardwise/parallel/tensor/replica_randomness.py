"""Random numbers of a replica's ranks: equal outside tensor-parallel regions, different inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shardwise.model.recomputation import once
from shardwise.world.randomness import generator_of, seed_from


class ReplicaRandomness:
    """Seeds each rank by itself inside a region, and returns to the common state after it.

    A region begins with one draw that all ranks make alike; each makes its seed of that and of its
    own number. Where the region ends, all go on from their common state. So dropout has one mask on
    all ranks for what all have, and another on each for its part of a whole.

    A recomputation replays where its forward's regions began and ended, and leaves none open: it
    stops at the last tensor that backward needs, which may be inside of one.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._common_state: Tensor | None = None

    @property
    def in_region(self) -> bool:
        """Whether a region is open, where each rank computes its own."""
        return once(lambda: self._common_state is not None)

    @property
    def _generator(self) -> torch.Generator:
        return generator_of(self._device)

    def enter_region(self) -> None:
        """Switch to this rank's own random numbers."""
        if not self.in_region:
            # Drawn again by a recomputation: what else draws on the host goes on from there.
            common = int(torch.randint(2**31, (), generator=torch.default_generator))
            once(self._save_state)
            self._generator.manual_seed(seed_from("split", common, self._rank))

    def _save_state(self) -> None:
        self._common_state = self._generator.get_state()

    def leave_region(self) -> None:
        """Switch back to the numbers that are equal on all ranks."""
        common = once(self._take_state)
        if common is not None:
            self._generator.set_state(common)

    def _take_state(self) -> Tensor | None:
        """The common state at the region's beginning; None outside of a region."""
        common, self._common_state = self._common_state, None
        return common

    def reset(self) -> None:
        """Forget the common state, since all generators are seeded anew."""
        self._common_state = None

    @contextmanager
    def region(self) -> Iterator[None]:
        """Run the block inside a region: the open one, or one of its own."""
        if self.in_region:
            yield
            return
        self.enter_region()
        try:
            yield
        finally:
            self.leave_region()
