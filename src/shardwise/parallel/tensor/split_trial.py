"""Tries whether a module computes the same when it is split, before it is split for good.

All ranks' parts run here at once, a thread for each, on the CPU, in evaluation and in training,
with fixed numbers in place of random ones. Their outputs, and the gradients of their inputs and of
every parameter, must equal those of the whole: a parameter that is not split, between layers that
are, would have a part of its gradient only. Layers that did not run prove nothing.
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

from shardwise.comm import Handle, Solo
from shardwise.comm.ordered_sums import PLAIN, Sum
from shardwise.errors import UsageError
from shardwise.layout.shards import Shard
from shardwise.parallel.tensor import parallel_layers, split_rules
from shardwise.parallel.tensor.graph_paths import RecordedOperations
from shardwise.parallel.tensor.replica import Replica
from shardwise.parallel.tensor.replica_randomness import ReplicaRandomness
from shardwise.parallel.tensor.split_rules import ModuleSplit, SplitGroup
from shardwise.parallel.tensor.user_hooks import silenced
from shardwise.parallel.tensor.without_dropout import WithoutRandomness
from shardwise.world.randomness import preserved

ROWS, LENGTH = 2, 5
LIMIT = 60.0
"""Seconds that a part may take."""


class _ThreadGroup(Solo):
    """A group of threads of this process, with the one collective that regions need."""

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


class _NoRandomness(ReplicaRandomness):
    """Region bookkeeping without seeds: nothing is random in a trial."""

    def enter_region(self) -> None:
        self._common_state = (
            self._common_state if self._common_state is not None else torch.empty(0)
        )

    def leave_region(self) -> None:
        self._common_state = None


@dataclass(frozen=True)
class TrialResult:
    """Whether a module computes the same when split, and why not, where that is worth a line."""

    accepted: bool
    why: str | None = None
    operations: frozenset[str] = frozenset()
    """The operations of its forward between the split layers."""

    def __bool__(self) -> bool:
        return self.accepted


NOT_RUN = "some of its layers did not run when it was tried"
HOOKED = "a hook stands between its layers"


def try_split(module: nn.Module, group: SplitGroup, parts: int) -> TrialResult:
    """Try whether `module`, split as `group` says, computes the same.

    Not accepted also where it does not run on one input of shape (rows, length, features), or
    (rows, features), where its split layers do not run, or a hook of the user's would see a part.
    """
    first = next(cut.module for cut in group.splits if split_rules.is_linear(cut.module))
    with preserved(), torch.random.fork_rng(devices=[]):
        whole = _copy(module)
        if whole is None:
            return TrialResult(accepted=False)
        features = _width_of(module, split_rules.widths(first)[0])
        for shape in ((ROWS, LENGTH, features), (ROWS, features)):
            draw = torch.Generator().manual_seed(0)
            x = torch.randn(shape, generator=draw, dtype=torch.float64)
            modes = [_TrialMode(whole, module, group, parts, x, train) for train in (False, True)]
            if all(mode.expected is not None for mode in modes):
                return _compare(modes)
    return TrialResult(accepted=False)


class _TrialMode:
    """A `whole` copy of `module` run on `x` in one mode, and the parts that are compared with
    it."""

    def __init__(
        self,
        whole: nn.Module,
        module: nn.Module,
        group: SplitGroup,
        parts: int,
        x: Tensor,
        training: bool,
    ) -> None:
        self._whole, self._cuts, self._parts, self._x = whole, group.splits, parts, x
        self._training = training
        self._paths = {id(each): path for path, each in module.named_modules()}
        fixed = WithoutRandomness()
        self.expected = _run(copy.deepcopy(whole).train(training), x, fixed)
        self._random_shapes = fixed.shapes
        self.was_hooked = False
        self.allowed = RecordedOperations()

    @property
    def reached(self) -> set[str]:
        """Names of the parameters that have a gradient."""
        assert self.expected is not None
        return {name for name, grad in self.expected.grads.items() if grad is not None}

    def is_passed(self) -> bool:
        """Whether the parts compute what the whole does."""
        assert self.expected is not None
        self._whole.train(self._training)
        found = self._run_parts()
        return found is not None and all(
            _matches(each, _expected_on_rank(self.expected, self._cuts, self._paths, rank))
            for rank, each in enumerate(found)
        )

    def _run_parts(self) -> list[_TrialOutputs] | None:
        barrier = Barrier(self._parts)
        board: list[Any] = [None] * self._parts
        found: list[_TrialOutputs | None] = [None] * self._parts

        def run(rank: int) -> None:
            group = _ThreadGroup(rank, self._parts, barrier, board)
            randomness = _NoRandomness(rank, torch.device("cpu"))
            replica = Replica(group, randomness)
            part = _split_copy(self._whole, self._cuts, self._paths, replica, self.allowed)
            fixed = WithoutRandomness(self._random_shapes, lambda: randomness.in_region)
            try:
                found[rank] = _run(part, self._x, fixed, refused=self._refused)
            finally:
                replica.reset()  # a part that has failed left its region open
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


def _compare(modes: Sequence[_TrialMode]) -> TrialResult:
    assert modes[0].expected is not None
    reached = set().union(*(mode.reached for mode in modes))
    if any("." in name and name not in reached for name in modes[0].expected.grads):
        return TrialResult(accepted=False, why=NOT_RUN)
    if all(mode.is_passed() for mode in modes):
        seen = (mode.allowed.tried for mode in modes)
        return TrialResult(accepted=True, operations=frozenset().union(*seen))
    return TrialResult(
        accepted=False, why=HOOKED if any(mode.was_hooked for mode in modes) else None
    )


@dataclass(frozen=True)
class _TrialOutputs:
    """Outputs and the gradient of the input; gradients of parameters by name, None for none."""

    seen: list[Tensor]
    grads: dict[str, Tensor | None]


def _expected_on_rank(
    whole: _TrialOutputs, several: Sequence[ModuleSplit], paths: dict[int, str], rank: int
) -> _TrialOutputs:
    """The outputs that a rank must have if the split is right."""
    grads = dict(whole.grads)
    for cut in several:
        for key, (dim, ranges) in cut.tensors.items():
            name = ".".join(part for part in (paths[id(cut.module)], key) if part)
            grad = grads.get(name)
            if grad is not None:
                grads[name] = Shard(tuple(grad.shape), dim, tuple(ranges), rank).of(grad)
    return _TrialOutputs(whole.seen, grads)


def _width_of(module: nn.Module, narrow: int) -> int:
    """The input width of the module: that of its first layer, which need not be the one split."""
    for each in module.children():
        if split_rules.is_linear(each):
            return split_rules.widths(each)[0]
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
    module: nn.Module,
    x: Tensor,
    fixed: WithoutRandomness,
    refused: Callable[[], None] = lambda: None,
) -> _TrialOutputs | None:
    """Outputs and gradients on `x`; None if the forward fails. `refused` is called if a hook is
    why."""
    x = x.clone().requires_grad_()
    named = dict(module.named_parameters())
    try:
        with fixed:
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
    return _TrialOutputs(
        [*(t.detach() for t in outputs), grad], dict(zip(named, rest, strict=True))
    )


def _split_copy(
    whole: nn.Module,
    several: Sequence[ModuleSplit],
    paths: dict[int, str],
    replica: Replica,
    allowed: RecordedOperations,
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
        local = cut.local_attributes[rank] if cut.local_attributes else {}
        parallel_layers.make_tensor_parallel(
            mine,
            cut.style,
            replica,
            local,
            cut.ranges,
            gather_output=cut.gather_output,
            allowed=allowed,
        )
    return made


def _matches(found: _TrialOutputs, expected: _TrialOutputs) -> bool:
    if len(found.seen) != len(expected.seen) or found.grads.keys() != expected.grads.keys():
        return False
    pairs: list[tuple[Tensor | None, Tensor | None]] = [
        *zip(found.seen, expected.seen, strict=True),
        *((grad, expected.grads[name]) for name, grad in found.grads.items()),
    ]
    return all(
        a is b if a is None or b is None else a.shape == b.shape and _close(a, b) for a, b in pairs
    )


def _close(one: Tensor, other: Tensor) -> bool:
    scale = other.abs().max().item() if other.numel() else 0.0
    return torch.allclose(one, other, rtol=1e-8, atol=1e-10 * (1.0 + scale))
