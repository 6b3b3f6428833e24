"""Runs modules that compute attention themselves, named in `context_plan`, on full sequences.

Their `forward` takes queries, keys and values, and computes attention in any way, for example with
matrix products and a softmax. As in the method "ulysses", each rank runs the module
on full sequences for some heads:

    (rows, heads, own length, features)  ──▶  to_heads  ──▶  forward  ──▶  to_parts
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from math import lcm
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from shardwise.errors import ModelError
from shardwise.model import module_hooks
from shardwise.model.module_hooks import Hooked
from shardwise.model.unit_hooks import untraced
from shardwise.parallel.context.attention import ContextRun, active_run
from shardwise.parallel.context.methods import mask_of_heads, whole_heads
from shardwise.parallel.context.token_exchange import to_parts
from shardwise.parallel.expert.planned_blocks import is_named

ContextPlan = Sequence[str]
"""Patterns of the names of modules that compute attention themselves."""


def names_of(model: nn.Module, plan: ContextPlan) -> list[str]:
    """Return the names of the modules in `plan`. Raises ModelError if a pattern matches no name."""
    named = [name for name, _ in model.named_modules()]
    names: list[str] = []
    for pattern in [plan] if isinstance(plan, str) else plan:
        found = [name for name in named if is_named(name.replace("_orig_mod.", ""), pattern)]
        if not found:
            raise ModelError(f"context_plan: no module is called {pattern}.")
        names += [name for name in found if name not in names]
    return names


class PlannedAttention:
    """The hooks that exchange the inputs and outputs of one module.

    Args:
        name: The module's name, for messages.
        run: The engine's context run.
    """

    def __init__(self, name: str, run: ContextRun) -> None:
        self._name, self._run = name, run
        self._stack: list[ExitStack | None] = []
        """One entry for each running call of the module, or None if it runs on full sequences."""

    def attach(self, module: nn.Module) -> Iterator[Hooked]:
        """Yield the hooks on `module`, which copies of it don't have."""
        yield module_hooks.attach(module.register_forward_pre_hook, self._before, with_kwargs=True)
        yield module_hooks.attach(module.register_forward_hook, self._after, always_call=True)

    @untraced
    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        run = self._run
        if active_run() is not run or run.is_on_whole_sequences:
            self._stack.append(None)
            return None
        self._stack.append(stack := ExitStack())
        leaves, nest = pytree.tree_flatten((args, kwargs))
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[n] for n in places[:3]]
        if is_elsewhere := self._is_elsewhere(tensors):
            wholes = [self._fake_heads(each) for each in tensors]
        else:
            place = f"{self._name} ({type(module).__name__})"
            run.note_call(place, self._problem(tensors))
            wholes = whole_heads(tensors, run.lengths, run.group)
        for n, whole in zip(places, wholes, strict=False):
            leaves[n] = whole
        own = run.lengths[run.group.rank]
        for n in places[3:]:
            if leaves[n].ndim == 4 and own in leaves[n].shape[2:]:
                leaves[n] = (
                    self._fake_mask(leaves[n])
                    if is_elsewhere
                    else mask_of_heads(leaves[n], run.lengths, run.group)
                )
        # The module already has full sequences, so its calls of attention exchange nothing.
        stack.enter_context(run.inside_heads())
        return pytree.tree_unflatten(leaves, nest)

    @untraced
    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        del module, args
        stack = self._stack.pop() if self._stack else None
        if stack is None:
            return None
        stack.close()
        if output is None:  # after an error
            return None
        run = self._run
        total = sum(run.lengths)

        def part(leaf: Tensor) -> Tensor:
            if leaf.ndim != 4 or leaf.size(2) != total:
                return leaf
            if self._is_elsewhere([leaf]):
                own = run.lengths[run.group.rank]
                heads = leaf.size(1) * run.group.size
                return _resized(leaf, (leaf.size(0), heads, own, leaf.size(3)))
            return to_parts(leaf, run.lengths, run.group)

        return pytree.tree_map_only(Tensor, part, output)

    # The stage of a pipeline that has the module exchanges tokens. Other stages run it on fake
    # tensors, to learn the shape of its output.
    _before.runs_on_fakes = _after.runs_on_fakes = True

    def _is_elsewhere(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether another stage of a pipeline computes the module on `tensors`."""
        return self._run.in_stages and any(isinstance(each, FakeTensor) for each in tensors)

    def _fake_heads(self, part: Tensor) -> Tensor:
        """Return a fake tensor of the shape that `whole_heads` returns for `part`."""
        size, (rows, heads, _, features) = self._run.group.size, part.shape
        return _resized(part, (rows, lcm(heads, size) // size, sum(self._run.lengths), features))

    def _fake_mask(self, mask: Tensor) -> Tensor:
        """Return a fake tensor of the shape that `mask_of_heads` returns for `mask`."""
        lengths, group = self._run.lengths, self._run.group
        sizes = list(mask.shape)
        sizes[2 if sizes[2] == lengths[group.rank] else 3] = sum(lengths)
        sizes[1] = max(sizes[1] // group.size, 1)
        return _resized(mask, sizes)

    def _problem(self, tensors: Sequence[Tensor]) -> str | None:
        """Return a message saying why the module cannot run on full sequences, or None."""
        run = self._run
        own, total = run.lengths[run.group.rank], sum(run.lengths)
        shapes = [tuple(each.shape) for each in tensors]
        if len(shapes) < 3 or any(len(s) != 4 or s[2] != own for s in shapes):
            return (
                f"context_plan: {self._name} takes tensors of shapes {shapes}, but this worker has "
                f"{own} of {total} tokens. Name a module whose forward takes queries, keys and "
                "values of shape (rows, heads, length, features) first"
            )
        heads, groups = shapes[0][1], shapes[1][1]
        if heads % run.group.size or heads % groups or shapes[2][1] != groups:
            return (
                f"context_plan: {self._name} has {heads} heads of queries and {groups} of keys, "
                f"which cannot be spread over {run.group.size} workers. Write --context with a "
                "number that divides the heads of queries"
            )
        return None


def _resized(fake: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return a contiguous fake tensor of shape `sizes` that requires a gradient if `fake` does."""
    for dim, size in enumerate(sizes):
        if fake.size(dim) != size:
            fake = fake.narrow(dim, 0, 1)
    return fake.expand(*sizes).contiguous()
