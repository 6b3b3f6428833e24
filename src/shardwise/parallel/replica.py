"""The ranks that hold one copy of the model between them, and what they draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.collectives import Collectives
from shardwise.model.replay import once
from shardwise.parallel.regions import apart, is_stand_in, together
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
    def _generator(self) -> torch.Generator:
        if self._device.type == "cuda":
            return torch.cuda.default_generators[self._device.index or 0]
        return torch.default_generator

    def enter(self) -> None:
        """What follows is this rank's own."""
        if once(lambda: self._outside is None):
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


@dataclass(eq=False)
class Replica:
    """The ranks of `group`, which split layers between them."""

    group: Collectives
    draws: Draws
    is_whole: bool = False
    """Whether every rank has whole parameters for now, so that forwards are the plain ones."""
    _taken: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def enter(self, value: Tensor) -> Tensor:
        """`value`, alike on all ranks, for a region in which each uses it in its own way.

        Layers of one region that take the same value (queries, keys, values) share it, so that
        its gradient is summed once. A forward that autograd does not record shares nothing with
        one that it does.
        """
        if is_stand_in(value):
            return value
        self.draws.enter()
        if not (torch.is_grad_enabled() and value.requires_grad):
            return value  # no gradient is to be summed
        known = self._taken.get(id(value))
        if known is None:
            known = self._taken[id(value)] = value, apart(value, self.group)
        return known[1]

    def leave(self, part: Callable[[], Tensor]) -> Tensor:
        """The sum of the ranks' `part()`s, with which the region ends.

        Also where that raises, as it does to end a checkpoint's recomputation early.
        """
        try:
            return together(part(), self.group)
        finally:
            self.close()

    def close(self) -> None:
        """A region ends here."""
        self._taken.clear()
        self.draws.leave()

    def forget(self) -> None:
        """A step has ended: no region is open."""
        self._taken.clear()
        self.draws.forget()
