"""Runs modules that compute attention themselves, named in `context_plan`, on full sequences.

Their `forward` takes queries, keys and values, and computes attention in any way, for example with
matrix products and a softmax. As in the method "ulysses", each rank runs the module
on full sequences for some heads:

    (rows, heads, own length, features)  ──▶  to_heads  ──▶  forward  ──▶  to_parts
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
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
        problem = self._problem([leaves[n] for n in places[:3]])
        run.note_call(f"{self._name} ({type(module).__name__})", problem)
        wholes = whole_heads([leaves[n] for n in places[:3]], run.lengths, run.group)
        for n, whole in zip(places, wholes, strict=False):
            leaves[n] = whole
        own = run.lengths[run.group.rank]
        for n in places[3:]:
            if leaves[n].ndim == 4 and own in leaves[n].shape[2:]:
                leaves[n] = mask_of_heads(leaves[n], run.lengths, run.group)
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
            has_tokens = leaf.ndim == 4 and leaf.size(2) == total
            return to_parts(leaf, run.lengths, run.group) if has_tokens else leaf

        return pytree.tree_map_only(Tensor, part, output)

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
