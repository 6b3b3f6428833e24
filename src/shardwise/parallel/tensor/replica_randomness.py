"""Controls a replica's random numbers: equal on all ranks except in tensor-parallel regions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shardwise.model.recomputation import once
from shardwise.world.randomness import generator_of, seed_from


class ReplicaRandomness:
    """Seeds ranks differently inside tensor-parallel regions, and identically outside them.

    At the start of a region, all ranks draw the same random number. Each rank derives its seed from
    this number and its rank. At the end of the region, all ranks restore their common generator
    state. Dropout therefore uses the same mask on all ranks for a replicated tensor, and different
    masks for the parts of a split tensor.

    A recomputation enters and leaves the same regions as its forward pass. It stops at the last
    tensor that the backward pass needs, which may be inside a region. Even then, it leaves no
    region open.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._common_state: Tensor | None = None

    @property
    def in_region(self) -> bool:
        """True inside a region, where each rank computes something different."""
        # Use `once`, because a recomputation must return the same as its forward pass.
        return once(lambda: self._common_state is not None)

    @property
    def _generator(self) -> torch.Generator:
        return generator_of(self._device)

    def state(self) -> Tensor:
        """Return the state of the generator that forward passes draw from."""
        return self._generator.get_state()

    def enter_region(self) -> None:
        """Switch to this rank's own random numbers."""
        if not self.in_region:
            # A recomputation must repeat this draw, so that later draws on the host are the same.
            common = int(torch.randint(2**31, (), generator=torch.default_generator))
            once(self._save_state)
            self._generator.manual_seed(seed_from("split", common, self._rank))

    def _save_state(self) -> None:
        self._common_state = self._generator.get_state()

    def leave_region(self) -> None:
        """Switch back to the random numbers that all ranks share."""
        common = once(self._take_state)
        if common is not None:
            self._generator.set_state(common)

    def _take_state(self) -> Tensor | None:
        """Return and clear the common state saved by `enter_region`, or None outside regions."""
        common, self._common_state = self._common_state, None
        return common

    def reset(self) -> None:
        """Drop the common state, because all generators are about to be reseeded."""
        self._common_state = None

    @contextmanager
    def region(self) -> Iterator[None]:
        """Context manager that uses the open region, or opens one for its block if none is open."""
        if self.in_region:
            yield
            return
        self.enter_region()
        try:
            yield
        finally:
            self.leave_region()
