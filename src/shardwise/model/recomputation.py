"""Recomputes a unit's forward in backward, instead of keeping activations (Chen et al., 2016).

torch.utils.checkpoint reproduces dropout and autocast. What it leaves to others is here: buffers
that forward changes (BatchNorm's running statistics) are changed once, and so are attributes
(unit_attributes.py); a recomputation reads what the forward read, and what forward has heard from
the other ranks is not asked again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ModelError
from shardwise.model import module_hooks, unit_attributes
from shardwise.model.buffers import version_of


class RecomputedForward:
    """Stands in for `unit.forward`, so that the hooks of the unit stay outside and fire once.

    Copies and pickles of the unit have their plain forward.
    """

    def __init__(self, unit: nn.Module, *, compiled: bool) -> None:
        """Take the place; with `compiled` the plain forward runs through torch.compile."""
        self.unit = unit
        self._before: Callable[..., Any] | None = vars(unit).get("forward")
        plain: Callable[..., Any] = unit.forward
        functools.update_wrapper(self, plain)
        self.plain = torch.compile(plain) if compiled else plain
        self.buffers = UnitBuffers(unit)
        self._on = True
        module_hooks.replace(unit, "forward", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._on or not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        # The user compiles the whole model: torch traces its own checkpoint, but not our state.
        if torch.compiler.is_compiling():
            return checkpoint(self.plain, *args, use_reentrant=False, **kwargs)
        call = _RecomputedCall(self, args, kwargs)
        tensors = call.tensors()
        before = [version_of(tensor) for tensor in tensors]
        made = checkpoint(call, *tensors, use_reentrant=False)
        if [version_of(tensor) for tensor in tensors] != before:
            raise ModelError(
                f"A {type(self.unit).__name__} writes to its input in place, and its forward runs "
                "again in backward (--activations recomputed), then with the changed input. Begin "
                "it with x = x.clone(), or leave recomputation out."
            )
        return made

    def undo(self) -> None:
        """Give the unit its forward back."""
        self._on = False  # should user code have wrapped this one in another
        module_hooks.give_back(self.unit, "forward", self)

    def __reduce__(self) -> tuple[Any, ...]:
        # For a wrapper of a user's around this one. The copied unit's own bound method: it has no
        # other forward yet when this is looked up.
        if self._before is None:
            return getattr, (self.unit, "forward")
        return getattr, (SimpleNamespace(forward=self._before), "forward")


class StandsForPart(Tensor):
    """A tensor that stands for a whole: this rank's part, with its graph, is its `local`."""

    @property
    def local(self) -> Tensor:
        """This rank's part."""
        raise NotImplementedError

    def constructor(self) -> Callable[[Tensor], Tensor]:
        """A function from another part to such a tensor; it holds no part."""
        raise NotImplementedError


class _RecomputedCall:
    """One forward of a unit, which can be run again.

    Tensors among the arguments, in containers too, are handed to torch's checkpoint, which saves
    them for backward as an operation would; the rest is held here.
    """

    def __init__(self, forward: RecomputedForward, args: Any, kwargs: Any) -> None:
        self._forward = forward
        self._leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._given: tuple[Any, Any] | None = (args, kwargs)
        self._tape = Tape()
        self._before: list[tuple[nn.Module, str, Tensor]] = []
        self._attributes: unit_attributes.Values = []

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, each once, which are held here no longer.

        One that is given twice is one object when forward runs again too: forwards ask for that
        (attention, whether its key is its value), and take other ways.
        """
        found = {id(leaf): leaf for leaf in self._leaves if isinstance(leaf, Tensor)}
        places = {each: place for place, each in enumerate(found)}
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
        if self._given is None:
            return self._again(tensors)
        # The caller's own containers, which forward may change.
        (args, kwargs), self._given = self._given, None
        buffers = self._forward.buffers
        self._before = buffers.copies()
        attributes = unit_attributes.look(self._forward.unit)
        with self._tape.recording():
            output = self._forward.plain(*args, **kwargs)
        # Keep copies of what forward has changed only: most buffers never change.
        self._before = buffers.changed(self._before)
        self._attributes = unit_attributes.changed(attributes)
        return output

    def _again(self, tensors: tuple[Tensor, ...]) -> Any:
        made: dict[int, Tensor] = {}
        for leaf in self._leaves:
            if isinstance(leaf, _SavedForm) and leaf.place not in made:
                made[leaf.place] = leaf.make(tensors[leaf.place])
        leaves = [
            made[leaf.place] if isinstance(leaf, _SavedForm) else leaf for leaf in self._leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        # The recomputation reads what the forward read, and its writes go into stand-ins: batch
        # norm's running statistics would count the batch twice.
        as_before = unit_attributes.stand_ins(self._attributes)
        with self._tape.replaying(), stand_ins(self._before), as_before:
            return self._forward.plain(*args, **kwargs)


@dataclass(frozen=True)
class _SavedForm:
    """Stands in for a tensor among the leaves; `make` makes it of what was saved at `place`."""

    place: int
    make: Callable[[Tensor], Tensor]


class UnitBuffers:
    """Learns which buffers of a unit its forward changes.

    Known by module and mode: torch's batch_norm writes running statistics without raising their
    version, as it does that of the count beside them.
    """

    def __init__(self, unit: nn.Module) -> None:
        self._unit = unit
        self._still: set[tuple[nn.Module, bool]] = set()
        self._marks: list[tuple[nn.Module, str, tuple[int, int]]] = []

    def copies(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Before a forward: copies of the buffers that it may change."""
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
        """After that forward: those of `copies` that it did change.

        Of a module that has changed for the first time there is none: its buffers as they are now.
        """
        # By module: the version of one buffer tells for all (see the class).
        moved = {m for m, key, mark in self._marks if _mark(m._buffers.get(key)) != mark}
        copied = {module for module, _, _ in copies}
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
    """Inside the block the buffers are copies of `values`; after it, what they were."""
    held = [(module, key, module._buffers.get(key)) for module, key, _ in values]
    try:
        # A clone: a graph may be recomputed several times (retain_graph).
        for module, key, value in values:
            module._buffers[key] = value.clone()
        yield
    finally:
        for module, key, buffer in held:
            module._buffers[key] = buffer


T = TypeVar("T")


class Tape:
    """Records results of one forward that its recomputation must not make again, in order.

    Statistics that came from other ranks are such: nobody answers a second time. Recomputation runs
    in the thread of backward.
    """

    def __init__(self) -> None:
        self._values: list[Any] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside the block `once` makes its value, which is put on this tape."""

        def put(make: Callable[[], T]) -> T:
            value = make()
            self._values.append(value)
            return value

        yield from _with(put)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Inside the block `once` gives the values of this tape, from the first one on."""
        values = iter(self._values)
        yield from _with(lambda make: next(values))


_once: ContextVar[Callable[[Callable[[], Any]], Any] | None] = ContextVar("once", default=None)


def _with(rule: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    token = _once.set(rule)
    try:
        yield
    finally:
        _once.reset(token)


def once(make: Callable[[], T]) -> T:
    """`make()`; in a recomputation, what it gave in the forward that is recomputed."""
    rule = _once.get()
    return make() if rule is None else rule(make)
