"""Tests whether a module gives the same result when it is split, before permanently splitting it.

The parts of all ranks run in this process on the CPU, in one thread each. They run in evaluation
and in training mode, with fixed numbers instead of random ones. Their outputs, and the gradients of
inputs and of all parameters, must match the unsplit module's. The gradients are compared because an
unsplit parameter between split layers would receive only part of its gradient. A split is rejected
if some of its layers did not run, because the test then proves nothing about them.
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
from shardwise.parallel.tensor.user_hooks import silence_hooks
from shardwise.parallel.tensor.without_dropout import WithoutRandomness
from shardwise.world.generator_states import preserved

ROWS, LENGTH = 2, 5
LIMIT = 60.0
"""Time limit for each part, in seconds."""


class _ThreadGroup(Solo):
    """A group of threads in this process that offers only the collective that regions need."""

    def __init__(self, rank: int, size: int, barrier: Barrier, board: list[Any]) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self._barrier = barrier
        self._board = board

    def all_reduce(self, buffer: Tensor, how: Sum = PLAIN) -> Handle:
        """Sum `buffer` over the threads, in rank order."""
        del how
        # Two waits are needed: no thread may read before all have written, or write before all have
        # read.
        self._board[self.rank] = buffer.clone()
        self._barrier.wait(LIMIT)
        total = sum(self._board[1:], self._board[0])
        self._barrier.wait(LIMIT)
        buffer.copy_(total)
        return Handle()


class _NoRandomness(ReplicaRandomness):
    """Tracks tensor-parallel regions without seeding, because a trial uses no random numbers."""

    def enter_region(self) -> None:
        self._common_state = (
            self._common_state if self._common_state is not None else torch.empty(0)
        )

    def leave_region(self) -> None:
        self._common_state = None


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial: whether a split module computes the same as the unsplit one.

    `why` is None if it does, or if the difference is not worth reporting.
    """

    accepted: bool
    why: str | None = None
    operations: frozenset[str] = frozenset()
    """The operations that the forward pass runs between the split layers."""

    def __bool__(self) -> bool:
        return self.accepted


NOT_RUN = "some of its layers did not run in the trial"
HOOKED = "a hook is registered between its layers"


def try_split(module: nn.Module, group: SplitGroup, parts: int) -> TrialResult:
    """Test whether `module` gives the same result when split as described by `group`.

    The split is also rejected in three other cases: the module does not run on inputs of shape
    (rows, length, features) or (rows, features), a split layer does not run, or a user's hook would
    see only a part.
    """
    first = next(cut.module for cut in group.splits if split_rules.is_linear(cut.module))
    # A trial must not advance the generators, because the script's own draws would then change.
    with preserved(), torch.random.fork_rng(devices=[]):
        whole = _copy(module)
        if whole is None:
            return TrialResult(accepted=False)
        features = _width_of(module, split_rules.widths(first)[0])
        # Try a shape with a token dimension first. If the module fails on it, try the other shape.
        for shape in ((ROWS, LENGTH, features), (ROWS, features)):
            draw = torch.Generator().manual_seed(0)
            x = torch.randn(shape, generator=draw, dtype=torch.float64)
            modes = [_TrialMode(whole, module, group, parts, x, train) for train in (False, True)]
            if all(mode.expected is not None for mode in modes):
                return _compare(modes)
    return TrialResult(accepted=False)


class _TrialMode:
    """Tests the split in one mode, training or evaluation.

    It runs `whole`, a copy of `module`, and the module's parts on the input `x`.
    """

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
    def reached_parameters(self) -> set[str]:
        """Names of the parameters that receive a gradient."""
        assert self.expected is not None
        return {name for name, grad in self.expected.grads.items() if grad is not None}

    def is_passed(self) -> bool:
        """Return whether the parts give the same result as the unsplit module."""
        assert self.expected is not None
        self._whole.train(self._training)
        outputs = self._run_parts()
        return outputs is not None and all(
            _matches(each, _expected_on_rank(self.expected, self._cuts, self._paths, rank))
            for rank, each in enumerate(outputs)
        )

    def _run_parts(self) -> list[_TrialOutputs] | None:
        barrier = Barrier(self._parts)
        board: list[Any] = [None] * self._parts
        outputs: list[_TrialOutputs | None] = [None] * self._parts

        def note_hook() -> None:
            self.was_hooked = True

        def run(rank: int) -> None:
            group = _ThreadGroup(rank, self._parts, barrier, board)
            randomness = _NoRandomness(rank, torch.device("cpu"))
            replica = Replica(group, randomness)
            part = _split_copy(self._whole, self._cuts, self._paths, replica, self.allowed)
            fixed = WithoutRandomness(self._random_shapes, lambda: randomness.in_region)
            try:
                outputs[rank] = _run(part, self._x, fixed, refused=note_hook)
            finally:
                replica.reset()  # a failed part leaves its region open
            if outputs[rank] is None:
                barrier.abort()  # otherwise the other threads wait for LIMIT seconds

        # Use threads instead of running the parts in turn, because all-reduces need all parts at
        # once.
        threads = [Thread(target=run, args=(rank,), daemon=True) for rank in range(self._parts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        finished = [each for each in outputs if each is not None]
        return finished if len(finished) == self._parts else None


def _compare(modes: Sequence[_TrialMode]) -> TrialResult:
    assert modes[0].expected is not None
    reached = set().union(*(mode.reached_parameters for mode in modes))
    # Parameters without a dot are the module's own, which may be unused.
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
    """A list of the outputs and the input's gradient, and a dict of parameter gradients by name."""

    outputs: list[Tensor]
    grads: dict[str, Tensor | None]


def _expected_on_rank(
    whole: _TrialOutputs, splits: Sequence[ModuleSplit], paths: dict[int, str], rank: int
) -> _TrialOutputs:
    """Return the outputs and gradients that rank `rank` must have if the split is correct."""
    grads = dict(whole.grads)
    for cut in splits:
        for key, (dim, ranges) in cut.tensors.items():
            name = ".".join(part for part in (paths[id(cut.module)], key) if part)
            grad = grads.get(name)
            if grad is not None:
                grads[name] = Shard(tuple(grad.shape), dim, tuple(ranges), rank).of(grad)
    return _TrialOutputs(whole.outputs, grads)


def _width_of(module: nn.Module, narrow: int) -> int:
    """Return the input width of the module's first layer, or `narrow` if it is unknown."""
    for each in module.children():
        if split_rules.is_linear(each):
            return split_rules.widths(each)[0]
        if isinstance(each, nn.LayerNorm):
            return each.normalized_shape[-1]
    return narrow


def _copy(module: nn.Module) -> nn.Module | None:
    try:
        with silence_hooks(module):
            clone = copy.deepcopy(module).cpu().double()
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None
    for parameter in clone.parameters():
        parameter.requires_grad_(True)
    with torch.no_grad():
        # Add noise, because initial values may hide errors: if norm weights are one and biases are
        # zero, gradients agree.
        draw = torch.Generator().manual_seed(1)
        for parameter in clone.parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.add_(noise, alpha=0.1)
    return clone


def _run(
    module: nn.Module,
    x: Tensor,
    fixed: WithoutRandomness,
    refused: Callable[[], None] = lambda: None,
) -> _TrialOutputs | None:
    """Run `module` on `x`. Return its outputs and gradients, or None if the forward pass fails.

    `refused` is called if the pass fails because of a user's hook.
    """
    x = x.clone().requires_grad_()
    named = dict(module.named_parameters())
    try:
        with fixed:
            outputs = [t for t in pytree.tree_leaves(module(x)) if isinstance(t, Tensor)]
        # Sum squares, so that the gradient depends on the values of the outputs.
        total = sum(t.square().sum() for t in outputs if t.requires_grad)
        assert isinstance(total, Tensor)
        grad, *rest = torch.autograd.grad(total, [x, *named.values()], allow_unused=True)
        assert grad is not None
    except UsageError:
        refused()
        return None
    except Exception:  # any error in the user's forward means that it does not run on this input
        return None
    return _TrialOutputs(
        [*(t.detach() for t in outputs), grad], dict(zip(named, rest, strict=True))
    )


def _split_copy(
    whole: nn.Module,
    splits: Sequence[ModuleSplit],
    paths: dict[int, str],
    replica: Replica,
    allowed: RecordedOperations,
) -> nn.Module:
    """Copy `whole`, and split the copy for this thread's rank in `replica`."""
    clone = copy.deepcopy(whole)
    rank = replica.group.rank
    for cut in splits:
        module = clone.get_submodule(paths[id(cut.module)])
        for key, (dim, ranges) in cut.tensors.items():
            parameter = module._parameters[key]
            assert parameter is not None
            shard = Shard(tuple(parameter.shape), dim, tuple(ranges), rank)
            parameter.data = shard.of(parameter.detach())
        local = cut.local_attributes[rank] if cut.local_attributes else {}
        parallel_layers.make_tensor_parallel(
            module,
            cut.style,
            replica,
            local,
            cut.ranges,
            gather_output=cut.gather_output,
            allowed=allowed,
        )
    return clone


def _matches(actual: _TrialOutputs, expected: _TrialOutputs) -> bool:
    if len(actual.outputs) != len(expected.outputs) or actual.grads.keys() != expected.grads.keys():
        return False
    pairs: list[tuple[Tensor | None, Tensor | None]] = [
        *zip(actual.outputs, expected.outputs, strict=True),
        *((grad, expected.grads[name]) for name, grad in actual.grads.items()),
    ]
    for value, reference in pairs:
        if value is None or reference is None:
            if value is not reference:
                return False
            continue
        # The trial uses fp64, so rounding cannot explain a difference. Sums may cancel, so the
        # tolerance scales with the largest value.
        scale = reference.abs().max().item() if reference.numel() else 0.0
        if value.shape != reference.shape:
            return False
        if not torch.allclose(value, reference, rtol=1e-8, atol=1e-10 * (1.0 + scale)):
            return False
    return True
