"""Whether a module's forward takes to being split: it is tried, whole against parts.

All ranks' parts run here at once, a thread for each, on the CPU, in evaluation and in training,
where what is drawn is no chance. Their outputs, and the gradients of their inputs and of every
parameter, must be those of the whole: a parameter that is not split, in the midst of what is, would
have a part of its gradient only. Of layers that did not run nothing can be told.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Barrier, Thread
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.collectives import Handle, Solo
from shardwise.collectives.ordered_sums import PLAIN, Sum
from shardwise.errors import UsageError
from shardwise.parallel.tensor import module_cuts, split_modules
from shardwise.parallel.tensor.graph_paths import Recorded
from shardwise.parallel.tensor.module_cuts import Cut, Group
from shardwise.parallel.tensor.replica import Replica
from shardwise.parallel.tensor.replica_draws import Draws
from shardwise.parallel.tensor.user_hooks import silenced
from shardwise.parallel.tensor.without_dropout import Undrawn
from shardwise.randomness import preserved
from shardwise.shards import Shard

ROWS, LENGTH = 2, 5
LIMIT = 60.0
"""Seconds that a part may take."""


class _Threads(Solo):
    """A group of threads of this process; knows the one verb that regions need."""

    def __init__(self, rank: int, size: int, barrier: Barrier, board: list[Any]) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self._barrier = barrier
        self._board = board

    def all_reduce(self, buffer: Tensor, how: Sum = PLAIN) -> Handle:
        """Sum in rank order."""
        del how
        self._board[self.rank] = buffer.clone()
        self._barrier.wait(LIMIT)
        total = sum(self._board[1:], self._board[0])
        self._barrier.wait(LIMIT)
        buffer.copy_(total)
        return Handle()


class _Draws(Draws):
    """Those of a part here: nothing is drawn."""

    def enter(self) -> None:
        self._outside = self._outside if self._outside is not None else torch.empty(0)

    def leave(self) -> None:
        self._outside = None


@dataclass(frozen=True)
class Verdict:
    """Whether a module takes to being split, and what is to be said where it does not."""

    takes: bool
    why: str | None = None
    operations: frozenset[str] = frozenset()
    """What its forward computes between the layers."""

    def __bool__(self) -> bool:
        return self.takes


NOT_RUN = "some of its layers did not run when it was tried"
HOOKED = "a hook stands between its layers"


def takes_to(module: nn.Module, group: Group, parts: int) -> Verdict:
    """Whether `module` split as `group` says computes what it does whole.

    No also where it does not run on one input of shape (rows, length, features), or (rows,
    features), where its layers do not, or a hook of the user's would see a part: then nothing can
    be told.
    """
    first = next(cut.module for cut in group.cuts if module_cuts.is_linear(cut.module))
    with preserved(), torch.random.fork_rng(devices=[]):
        whole = _copy(module)
        if whole is None:
            return Verdict(takes=False)
        features = _width_of(module, module_cuts.widths(first)[0])
        for shape in ((ROWS, LENGTH, features), (ROWS, features)):
            draw = torch.Generator().manual_seed(0)
            x = torch.randn(shape, generator=draw, dtype=torch.float64)
            modes = [_Trial(whole, module, group, parts, x, train) for train in (False, True)]
            if all(mode.wanted is not None for mode in modes):
                return _judge(modes)
    return Verdict(takes=False)


class _Trial:
    """A `whole` copy of `module` run on `x` in one mode, to be compared with its parts."""

    def __init__(
        self,
        whole: nn.Module,
        module: nn.Module,
        group: Group,
        parts: int,
        x: Tensor,
        training: bool,
    ) -> None:
        self._whole, self._cuts, self._parts, self._x = whole, group.cuts, parts, x
        self._training = training
        self._paths = {id(each): path for path, each in module.named_modules()}
        undrawn = Undrawn()
        self.wanted = _run(copy.deepcopy(whole).train(training), x, undrawn)
        self._drawn = undrawn.shapes
        self.was_hooked = False
        self.path = Recorded()

    @property
    def reached(self) -> set[str]:
        """The parameters that have a gradient, by name."""
        assert self.wanted is not None
        return {name for name, grad in self.wanted.grads.items() if grad is not None}

    def is_passed(self) -> bool:
        """Whether the parts compute what the whole does."""
        assert self.wanted is not None
        self._whole.train(self._training)
        found = self._run_parts()
        return found is not None and all(
            _alike(each, _cut(self.wanted, self._cuts, self._paths, rank))
            for rank, each in enumerate(found)
        )

    def _run_parts(self) -> list[_Result] | None:
        barrier = Barrier(self._parts)
        board: list[Any] = [None] * self._parts
        found: list[_Result | None] = [None] * self._parts

        def run(rank: int) -> None:
            group = _Threads(rank, self._parts, barrier, board)
            draws = _Draws(rank, torch.device("cpu"))
            replica = Replica(group, draws)
            part = _part(self._whole, self._cuts, self._paths, replica, self.path)
            undrawn = Undrawn(self._drawn, lambda: draws.is_open)
            try:
                found[rank] = _run(part, self._x, undrawn, refused=self._refused)
            finally:
                replica.forget()  # a part that has failed left its region open
            if found[rank] is None:
                barrier.abort()

        threads = [Thread(target=run, args=(rank,), daemon=True) for rank in range(self._parts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        done = [each for each in found if each is not None]
        return done if len(done) == self._parts else None

    def _refused(self) -> None:
        self.was_hooked = True


def _judge(modes: Sequence[_Trial]) -> Verdict:
    assert modes[0].wanted is not None
    reached = set().union(*(mode.reached for mode in modes))
    if any("." in name and name not in reached for name in modes[0].wanted.grads):
        return Verdict(takes=False, why=NOT_RUN)
    if all(mode.is_passed() for mode in modes):
        seen = (mode.path.tried for mode in modes)
        return Verdict(takes=True, operations=frozenset().union(*seen))
    return Verdict(takes=False, why=HOOKED if any(mode.was_hooked for mode in modes) else None)


@dataclass(frozen=True)
class _Result:
    """Outputs and the gradient of the input; gradients of parameters by name, None for none."""

    seen: list[Tensor]
    grads: dict[str, Tensor | None]


def _cut(whole: _Result, several: Sequence[Cut], paths: dict[int, str], rank: int) -> _Result:
    """What a rank must find where `whole` is right."""
    grads = dict(whole.grads)
    for cut in several:
        for key, (dim, ranges) in cut.tensors.items():
            name = ".".join(part for part in (paths[id(cut.module)], key) if part)
            grad = grads.get(name)
            if grad is not None:
                grads[name] = Shard(tuple(grad.shape), dim, tuple(ranges), rank).of(grad)
    return _Result(whole.seen, grads)


def _width_of(module: nn.Module, narrow: int) -> int:
    """What the module takes: the input of its first layer, which need not be the one split."""
    for each in module.children():
        if module_cuts.is_linear(each):
            return module_cuts.widths(each)[0]
        if isinstance(each, nn.LayerNorm):
            return each.normalized_shape[-1]
    return narrow


def _copy(module: nn.Module) -> nn.Module | None:
    try:
        with silenced(module):
            made = copy.deepcopy(module).cpu().double()
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None
    for parameter in made.parameters():
        parameter.requires_grad_(True)
    with torch.no_grad():
        # Values as they are may hide what is not looked at: norms of one, biases of zero.
        draw = torch.Generator().manual_seed(1)
        for parameter in made.parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.add_(noise, alpha=0.1)
    return made


def _run(
    module: nn.Module, x: Tensor, undrawn: Undrawn, refused: Callable[[], None] = lambda: None
) -> _Result | None:
    """What comes of `x`; None where the forward does not take it, `refused` called where a hook
    is why."""
    x = x.clone().requires_grad_()
    named = dict(module.named_parameters())
    try:
        with undrawn:
            outputs = [t for t in pytree.tree_leaves(module(x)) if isinstance(t, Tensor)]
        total = sum(t.square().sum() for t in outputs if t.requires_grad)
        assert isinstance(total, Tensor)
        grad, *rest = torch.autograd.grad(total, [x, *named.values()], allow_unused=True)
        assert grad is not None
    except UsageError:
        refused()
        return None
    except Exception:  # the user's forward: whatever it raises, it does not run on this
        return None
    return _Result([*(t.detach() for t in outputs), grad], dict(zip(named, rest, strict=True)))


def _part(
    whole: nn.Module,
    several: Sequence[Cut],
    paths: dict[int, str],
    replica: Replica,
    path: Recorded,
) -> nn.Module:
    """A copy of `whole`, split as on one rank of `replica`."""
    made = copy.deepcopy(whole)
    rank = replica.group.rank
    for cut in several:
        mine = made.get_submodule(paths[id(cut.module)])
        for key, (dim, ranges) in cut.tensors.items():
            parameter = mine._parameters[key]
            assert parameter is not None
            shard = Shard(tuple(parameter.shape), dim, tuple(ranges), rank)
            parameter.data = shard.of(parameter.detach())
        local = cut.local[rank] if cut.local else {}
        split_modules.become(
            mine, cut.style, replica, local, cut.ranges, gathers=cut.gathers, path=path
        )
    return made


def _alike(found: _Result, wanted: _Result) -> bool:
    if len(found.seen) != len(wanted.seen) or found.grads.keys() != wanted.grads.keys():
        return False
    pairs: list[tuple[Tensor | None, Tensor | None]] = [
        *zip(found.seen, wanted.seen, strict=True),
        *((grad, wanted.grads[name]) for name, grad in found.grads.items()),
    ]
    return all(
        a is b if a is None or b is None else a.shape == b.shape and _close(a, b) for a, b in pairs
    )


def _close(one: Tensor, other: Tensor) -> bool:
    scale = other.abs().max().item() if other.numel() else 0.0
    return torch.allclose(one, other, rtol=1e-8, atol=1e-10 * (1.0 + scale))
