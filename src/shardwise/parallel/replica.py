"""The ranks that hold one copy of the model between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.collectives import Collectives
from shardwise.parallel.draws import Draws
from shardwise.parallel.regions import apart, is_stand_in, scattered, spread, together
from shardwise.parallel.retold import Retold
from shardwise.parallel.tokens import Tokens, parts_of


@dataclass(frozen=True)
class Opened:
    """A value that each rank uses in its own way, and what keeps it for backward."""

    whole: Tensor
    retold: Retold | None = None

    def given_to(self, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """What `layer` makes of it."""
        if self.retold is None or not torch.is_grad_enabled():
            return layer(self.whole)
        return self.retold.given(layer, self.whole)


@dataclass(eq=False)
class Replica:
    """The ranks of `group`, which split layers between them."""

    group: Collectives
    draws: Draws
    by_tokens: bool = False
    """Whether what a split layer gives is spread over the ranks, some tokens on each."""
    is_whole: bool = False
    """Whether every rank has whole parameters for now, so that forwards are the plain ones."""
    _taken: dict[tuple[int, bool], tuple[Tensor, Opened]] = field(default_factory=dict)

    def enter(self, value: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """What `layer` makes of `value`, of which all have the same or each some tokens: it gets
        the whole, for a region in which each rank uses it in its own way.

        Layers of one region that take the same value (queries, keys, values) share it, so that
        it is told, and its gradient summed, once. A forward that autograd does not record shares
        nothing with one that it does.
        """
        if is_stand_in(value):
            return layer(value)
        self.draws.enter()
        recorded = torch.is_grad_enabled() and value.requires_grad
        if not recorded and not isinstance(value, Tokens):
            return layer(value)  # no gradient is to be summed
        known = self._taken.get((id(value), recorded))
        if known is None:
            known = self._taken[id(value), recorded] = value, self.opened(value)
        return known[1].given_to(layer)

    def opened(self, value: Tensor) -> Opened:
        """The same without a region, for whoever puts together at once what follows."""
        if not isinstance(value, Tokens):
            return Opened(apart(self.group, value)[0])
        part = value.checked()
        whole = spread(part, self.group, value.parts)
        return Opened(whole, Retold(part, self.group, value.parts))

    def leave(self, part: Callable[[], Tensor]) -> Tensor:
        """The sum of the ranks' `part()`s, with which the region ends.

        Also where that raises, as it does to end a checkpoint's recomputation early.
        """
        try:
            return self.closed(part())
        finally:
            self.close()

    def closed(self, value: Tensor) -> Tensor:
        """The sum of the ranks' `value`s: all of it, or this rank's tokens."""
        parts = parts_of(value, self.group) if self.by_tokens else None
        if parts is None:
            return together(value, self.group)
        return Tokens(scattered(value, self.group, parts), self.group, self.draws, parts)

    def close(self) -> None:
        """A region ends here."""
        self._taken.clear()
        self.draws.leave()

    def forget(self) -> None:
        """A step has ended: no region is open."""
        self._taken.clear()
        self.draws.forget()
