"""The ranks that hold one copy of the model between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.collectives import Collectives
from shardwise.model.recomputation import once
from shardwise.parallel.tensor.regions import apart, is_stand_in, scattered, spread, together
from shardwise.parallel.tensor.replica_draws import Draws
from shardwise.parallel.tensor.sequence_parallel import Tokens, parts_of, whole_of
from shardwise.parallel.tensor.sequence_regather import Retold
from shardwise.parallel.tensor.user_hooks import HookGuard


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


class Forwards:
    """Hooks on the forwards of models that `replica` has. Those of a copy do nothing."""

    def __init__(self, replica: Replica | None = None) -> None:
        self._replica = replica

    def begin(self, model: nn.Module, args: Any) -> None:
        """Before forward."""
        del model, args
        if self._replica is not None:
            self._replica.running += 1

    def end(self, model: nn.Module, args: Any, output: Any) -> Any:
        """After forward, also after one that failed: what a model gives is whole."""
        del model, args
        if self._replica is None:
            return None
        self._replica.running = max(0, self._replica.running - 1)  # a hook before may have failed
        self._replica.ended(failed=output is None)
        return whole_of(output) if self._replica.by_tokens else None

    def __reduce__(self) -> tuple[Any, ...]:
        return Forwards, ()


@dataclass(eq=False)
class Replica:
    """The ranks of `group`, which split layers between them."""

    group: Collectives
    draws: Draws
    by_tokens: bool = False
    """Whether what a split layer gives is spread over the ranks, some tokens on each."""
    is_whole: bool = False
    """Whether every rank has whole parameters for now, so that forwards are the plain ones."""
    hooks: HookGuard = field(default_factory=HookGuard)
    _taken: dict[tuple[int, int, bool], tuple[Tensor, Opened]] = field(default_factory=dict)
    begun: list[Any] = field(default_factory=list)
    """The nodes of autograd's with which the open region begins."""
    running: int = 0
    """How many forwards of models are under way, one inside the other."""

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
        self.hooks.open()
        recorded = torch.is_grad_enabled() and value.requires_grad
        if not recorded and not isinstance(value, Tokens):
            return self._begin(layer(value))  # no gradient is to be summed
        here = value.part if isinstance(value, Tokens) else value
        key = id(here), 0 if here.is_inference() else here._version, recorded
        if key not in self._taken:
            self._taken[key] = here, self.opened(value)
        return self._begin(self._taken[key][1].given_to(layer))

    def _begin(self, part: Tensor) -> Tensor:
        """`part`, with which this region begins."""
        if part.grad_fn is not None:
            self.begun.append(part.grad_fn)
        return part

    def opened(self, value: Tensor) -> Opened:
        """The same without a region, for whoever puts together at once what follows."""
        if not isinstance(value, Tokens):
            return Opened(apart(self.group, value)[0])
        part = value.part
        if part.dtype == torch.float32 and torch.is_autocast_enabled(part.device.type):
            part = part.to(torch.get_autocast_dtype(part.device.type))  # as the layer would
        whole = spread(part, self.group, value.parts)
        return Opened(whole, Retold(part, self.group, value.parts))

    def leave(self, part: Callable[[], Tensor]) -> Tensor:
        """The sum of the ranks' `part()`s, with which the region ends.

        Also where that raises, as it does to end a checkpoint's recomputation early.
        """
        by_tokens = self._leaves_tokens()
        try:
            return self._sum(part(), by_tokens)
        finally:
            self.close()

    def closed(self, value: Tensor) -> Tensor:
        """The same without a region."""
        return self._sum(value, self._leaves_tokens())

    def _leaves_tokens(self) -> bool:
        """Whether there is somebody who makes whole what is left in parts in the end."""
        return self.by_tokens and once(
            lambda: self.running > 0 or torch._C._current_graph_task_id() != -1
        )

    def _sum(self, value: Tensor, by_tokens: bool) -> Tensor:
        """The sum of the ranks' `value`s: all of it, or this rank's tokens."""
        parts = parts_of(value, self.group) if by_tokens else None
        if parts is None:
            return together(value, self.group)
        return Tokens(scattered(value, self.group, parts), self.group, self.draws, parts)

    def ended(self, *, failed: bool) -> None:
        """A model's forward has ended: what it took is its own. Where it failed, so has its
        region."""
        self._taken.clear()
        self._leave_region()
        if failed:
            self.draws.leave()

    def _leave_region(self) -> None:
        self.hooks.close()
        self.begun.clear()

    def close(self) -> None:
        """A region ends here."""
        self._taken.clear()
        self._leave_region()
        self.draws.leave()

    def forget(self) -> None:
        """A step has ended: no region is open."""
        self._taken.clear()
        self._leave_region()
        self.draws.forget()
