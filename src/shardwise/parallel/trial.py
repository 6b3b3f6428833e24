"""Whether a module's forward takes to being split: it is tried, whole against parts.

All ranks' parts run here at once, a thread for each, on the CPU. Their outputs, and the gradients
of their inputs and of every parameter, must be those of the whole: a parameter that is not split,
in the midst of what is, would have a part of its gradient only.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Barrier, Thread
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.collectives import Handle, Solo
from shardwise.collectives.sums import PLAIN, Sum
from shardwise.parallel import cuts, modules
from shardwise.parallel.cuts import Cut, Group
from shardwise.parallel.draws import Draws
from shardwise.parallel.replica import Replica
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


def takes_to(module: nn.Module, group: Group, parts: int) -> bool:
    """Whether `module` split as `group` says computes what it does whole.

    False also where it does not run on one input of shape (rows, length, features), or (rows,
    features): then nothing can be told.
    """
    paths = {id(each): path for path, each in module.named_modules()}
    first = next(cut.module for cut in group.cuts if cuts.is_linear(cut.module))
    with preserved(), torch.random.fork_rng(devices=[]):
        whole = _copy(module)
        if whole is None:
            return False
        features = _width_of(module, cuts.widths(first)[0])
        for shape in ((ROWS, LENGTH, features), (ROWS, features)):
            draw = torch.Generator().manual_seed(0)
            x = torch.randn(shape, generator=draw, dtype=torch.float64)
            wanted = _run(whole, x)
            if wanted is not None:
                found = _run_parts(whole, group.cuts, paths, parts, x)
                return found is not None and all(
                    _alike(each, _cut(wanted, group.cuts, paths, rank))
                    for rank, each in enumerate(found)
                )
    return False


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
        if cuts.is_linear(each):
            return cuts.widths(each)[0]
        if isinstance(each, nn.LayerNorm):
            return each.normalized_shape[-1]
    return narrow


def _copy(module: nn.Module) -> nn.Module | None:
    try:
        made = copy.deepcopy(module).cpu().double()
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None
    made.eval()
    for parameter in made.parameters():
        parameter.requires_grad_(True)
    with torch.no_grad():
        # Values as they are may hide what is not looked at: norms of one, biases of zero.
        draw = torch.Generator().manual_seed(1)
        for parameter in made.parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.add_(noise, alpha=0.1)
    return made


def _run(module: nn.Module, x: Tensor) -> _Result | None:
    """What comes of `x`; None where the forward does not take it."""
    x = x.clone().requires_grad_()
    named = dict(module.named_parameters())
    try:
        outputs = [t for t in pytree.tree_leaves(module(x)) if isinstance(t, Tensor)]
        total = sum(t.square().sum() for t in outputs if t.requires_grad)
        assert isinstance(total, Tensor)
        grad, *rest = torch.autograd.grad(total, [x, *named.values()], allow_unused=True)
        assert grad is not None
    except Exception:  # the user's forward: whatever it raises, it does not run on this
        return None
    return _Result([*(t.detach() for t in outputs), grad], dict(zip(named, rest, strict=True)))


def _run_parts(
    whole: nn.Module, several: Sequence[Cut], paths: dict[int, str], parts: int, x: Tensor
) -> list[_Result] | None:
    barrier = Barrier(parts)
    board: list[Any] = [None] * parts
    found: list[_Result | None] = [None] * parts

    def run(rank: int) -> None:
        group = _Threads(rank, parts, barrier, board)
        part = _part(whole, several, paths, Replica(group, Draws(rank, torch.device("cpu"))))
        found[rank] = _run(part, x)
        if found[rank] is None:
            barrier.abort()

    threads = [Thread(target=run, args=(rank,), daemon=True) for rank in range(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    done = [each for each in found if each is not None]
    return done if len(done) == parts else None


def _part(
    whole: nn.Module, several: Sequence[Cut], paths: dict[int, str], replica: Replica
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
        modules.become(mine, cut.style, replica, local, cut.ranges, gathers=cut.gathers)
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
