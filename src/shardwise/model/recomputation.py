"""Runs a unit's forward pass again during the backward pass, instead of keeping its activations.

The method is from Chen et al., "Training deep nets with sublinear memory cost" (2016).
torch.utils.checkpoint reproduces dropout and autocast. This module adds the rest:

- The changes that a forward pass makes to buffers (BatchNorm's running statistics) and attributes
  (unit_attributes.py) take effect only once.
- A recomputation reads the same buffers and attributes as the original forward pass.
- Results of communication with other ranks are reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ModelError
from shardwise.model import unit_attributes
from shardwise.model.buffers import version_of
from shardwise.model.compilation import Compiler
from shardwise.model.module_hooks import ReplacedForward


class RecomputedForward(ReplacedForward):
    """Replacement for `unit.forward` that recomputes. The unit's hooks run only once.

    Args:
        unit: The unit.
        compiler: Returns the compiled forward pass of a unit. None means that it is not compiled.
    """

    def __init__(self, unit: nn.Module, compiler: Compiler | None) -> None:
        super().__init__(unit)
        if compiler is not None:
            self.plain = compiler(unit, self.plain)
        self.is_compiled = compiler is not None
        self.buffers = UnitBuffers(unit)
        self._is_active = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Without gradients, autograd saves nothing, so there is nothing to recompute.
        if not self._is_active or not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        # The user compiles the full model. torch can trace its own checkpoint function, but not our
        # state.
        if torch.compiler.is_compiling():
            return checkpoint(self.plain, *args, use_reentrant=False, **kwargs)
        # One object per call: a unit may run several times before its backward pass (weight
        # sharing).
        call = _RecomputedCall(self, args, kwargs)
        tensors = call.tensors()
        before = [version_of(tensor) for tensor in tensors]
        output = checkpoint(call, *tensors, use_reentrant=False)
        call.recompute_before_backward(output)
        if [version_of(tensor) for tensor in tensors] != before:
            raise ModelError(
                f"{type(self.unit).__name__} changes its input in place. Its forward runs again in "
                "backward (--activations recomputed), and would then read the changed input. "
                "Begin its forward with x = x.clone(), or use --activations kept."
            )
        return output

    def undo(self) -> None:
        self._is_active = False  # in case user code has wrapped this object
        super().undo()


class StandsForPart(Tensor):
    """A tensor that represents a full tensor, of which this rank holds only the part `local`.

    `local` carries this rank's autograd graph.
    """

    @property
    def local(self) -> Tensor:
        raise NotImplementedError

    def constructor(self) -> Callable[[Tensor], Tensor]:
        """Return a function that creates such a tensor from a different part.

        The function must not refer to this tensor's own part.
        """
        raise NotImplementedError


class _RecomputedCall:
    """A forward pass of a unit that can run again.

    Tensors among the arguments, including those inside containers, are passed to torch's
    checkpoint function, which saves them for the backward pass as an operation would. All other
    arguments are stored here.
    """

    def __init__(self, forward: RecomputedForward, args: Any, kwargs: Any) -> None:
        self._forward = forward
        self._leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._arguments: tuple[Any, Any] | None = (args, kwargs)
        self._tape = Tape()
        self._before: list[tuple[nn.Module, str, Tensor]] = []
        self._attributes: unit_attributes.Values = []
        self._ends: list[Any] = []
        """The autograd node of `_mark_end`, until the forward pass has ended."""

    def tensors(self) -> list[Tensor]:
        """Return the distinct tensors among the arguments, and drop the references to them.

        If a tensor is passed twice, the recomputation also passes a single object twice. Some
        forward passes branch on identity (attention: is the key also the value?).
        """
        found = {id(leaf): leaf for leaf in self._leaves if isinstance(leaf, Tensor)}
        places = {tensor_id: place for place, tensor_id in enumerate(found)}
        self._leaves = [
            _SavedForm(
                places[id(leaf)],
                leaf.constructor() if isinstance(leaf, StandsForPart) else lambda saved: saved,
            )
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in self._leaves
        ]
        return [leaf.local if isinstance(leaf, StandsForPart) else leaf for leaf in found.values()]

    def __call__(self, *tensors: Tensor) -> Any:
        if self._arguments is None:
            return self._recompute(tensors)
        # Pass the caller's own containers, because the forward pass may change them.
        (args, kwargs), self._arguments = self._arguments, None
        buffers = self._forward.buffers
        self._before = buffers.copies()
        attributes = unit_attributes.look(self._forward.unit)
        with self._tape.recording():
            output = self._forward.plain(*args, **kwargs)
        self._ends = self._mark_end()
        # Keep only copies of what the forward pass has changed, because most buffers never change.
        self._before = buffers.changed(self._before)
        self._attributes = unit_attributes.changed(attributes)
        return output

    def _recompute(self, tensors: tuple[Tensor, ...]) -> Any:
        tensors_by_place: dict[int, Tensor] = {}
        for leaf in self._leaves:
            if isinstance(leaf, _SavedForm) and leaf.place not in tensors_by_place:
                tensors_by_place[leaf.place] = leaf.make(tensors[leaf.place])
        leaves = [
            tensors_by_place[leaf.place] if isinstance(leaf, _SavedForm) else leaf
            for leaf in self._leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        # The recomputation reads the original buffers, and writes into stand-ins. Otherwise
        # BatchNorm's running statistics would count the batch twice.
        as_before = unit_attributes.stand_ins(self._attributes)
        with self._tape.replaying(), stand_ins(self._before), as_before:
            output = self._forward.plain(*args, **kwargs)
        self._mark_end()
        return output

    def _mark_end(self) -> list[Any]:
        """In a compiled unit, have autograd save a tensor after all others."""
        return (
            [torch.zeros((), requires_grad=True).exp().grad_fn] if self._forward.is_compiled else []
        )

    def recompute_before_backward(self, output: Any) -> None:
        """Have a compiled unit run to its end again before any of its nodes runs backward.

        A graph does so, because it saves all its tensors at its end. If torch compiles the unit on
        some ranks only, it must run its collectives in this order on the others too.
        """
        ends, self._ends = self._ends, []
        if not ends:
            return

        def recompute(grads: Any) -> None:
            del grads
            if ends:
                ends.pop()._saved_result  # noqa: B018  # unpacking recomputes

        for leaf in pytree.tree_leaves(output):
            # Unlike a hook on the tensor, it runs after those that gather the unit's parameters.
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(recompute)


@dataclass(frozen=True)
class _SavedForm:
    """Placeholder for a tensor argument. `make` rebuilds it from the tensor saved at `place`."""

    place: int
    make: Callable[[Tensor], Tensor]


class UnitBuffers:
    """Learns which of a unit's buffers are changed by its forward pass.

    It learns this per module and mode, because torch's batch_norm increments the version of its
    counter but not the versions of its running statistics.
    """

    def __init__(self, unit: nn.Module) -> None:
        self._unit = unit
        self._still: set[tuple[nn.Module, bool]] = set()
        self._marks: list[tuple[nn.Module, str, tuple[int, int]]] = []

    def copies(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Return copies of the buffers that the next forward pass may change."""
        held = [
            (module, key, buffer)
            for module in self._unit.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._marks = [(module, key, _mark(buffer)) for module, key, buffer in held]
        return [
            (module, key, buffer.detach().clone())
            for module, key, buffer in held
            if (module, module.training) not in self._still
        ]

    def changed(
        self, copies: list[tuple[nn.Module, str, Tensor]]
    ) -> list[tuple[nn.Module, str, Tensor]]:
        """Return those entries of `copies` that the forward pass has changed.

        If a module changes for the first time, there is no copy of its buffers, so their current
        values are returned.
        """
        # Decide per module: the version of one buffer stands for all of them (see the class
        # docstring).
        moved = {m for m, key, mark in self._marks if _mark(m._buffers.get(key)) != mark}
        copied = {module for module, _, _ in copies}
        # Modules that did not change need no copies next time in the same mode.
        self._still |= {(module, module.training) for module in copied - moved}
        self._still -= {(module, module.training) for module in moved}
        late = [
            (module, key, buffer.detach().clone())
            for module in moved - copied
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        return [copy for copy in copies if copy[0] in moved] + late


def _mark(buffer: Tensor | None) -> tuple[int, int]:
    return (0, 0) if buffer is None else (id(buffer), version_of(buffer))


@contextmanager
def stand_ins(values: list[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """Context manager that replaces buffers with copies of `values`, and restores them on exit."""
    held = [(module, key, module._buffers.get(key)) for module, key, _ in values]
    try:
        # Clone, because a graph may be recomputed several times (retain_graph).
        for module, key, value in values:
            module._buffers[key] = value.clone()
        yield
    finally:
        for module, key, buffer in held:
            module._buffers[key] = buffer


T = TypeVar("T")


class Tape:
    """Records results of a forward pass, in order, for its recomputation to reuse.

    Statistics from other ranks are such results, because the other ranks do not participate in a
    recomputation. A recomputation runs in the backward pass's thread.
    """

    def __init__(self) -> None:
        self._values: list[Any] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager that makes `once` record the values that it computes."""

        def put(make: Callable[[], T]) -> T:
            value = make()
            self._values.append(value)
            return value

        yield from _use_rule(put)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Context manager that makes `once` return the recorded values, in order."""
        values = iter(self._values)
        yield from _use_rule(lambda make: next(values))


_once: ContextVar[Callable[[Callable[[], Any]], Any] | None] = ContextVar("once", default=None)


def _use_rule(rule: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    token = _once.set(rule)
    try:
        yield
    finally:
        _once.reset(token)


def once(make: Callable[[], T]) -> T:
    """Return `make()`. In a recomputation, return the result of the original call."""
    rule = _once.get()
    return make() if rule is None else rule(make)
