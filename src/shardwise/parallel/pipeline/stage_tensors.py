"""The tensors of a forward whose layers are on several ranks.

A *piece* stands for a tensor that one stage has computed. Every rank runs the whole program: where
a piece is, operations on it are done; elsewhere only their shapes are worked out. An operation on
pieces of several stages is done where the last of them is, and the others are sent there, once.
Tensors that are no pieces (the batch, and what is made of it) are alike on all ranks.

    stage 0   x ─ embed ─▶ h0 ═ sent ═▷                        (h1, loss: stand-ins)
    stage 1   x   (h0: a stand-in)    ▷ h0 ─ blocks ─ head ─▶ loss
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from shardwise.collectives import Handle
from shardwise.errors import UsageError
from shardwise.parallel.pipeline import recomputed_layers
from shardwise.parallel.tensor.torch_functions import FORM


@cache
def fakes() -> FakeTensorMode:
    """Where stand-ins are made: tensors without memory, of which torch works out shapes and dtypes.

    Made when asked for: that takes seconds, which every rank would wait at its start.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def stand_in(value: Tensor) -> FakeTensor:
    """A tensor like `value`, without memory and without a graph."""
    if isinstance(value, FakeTensor):
        made: Tensor = value.detach()
    else:
        with fakes():
            made = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
    assert isinstance(made, FakeTensor)
    if _takes_gradients(value):
        made.requires_grad_(value.requires_grad)
    return made


def _takes_gradients(value: Tensor) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


@dataclass(eq=False)
class Run:
    """A micro-batch on the stages that this rank runs now: what has gone to others, and come."""

    stages: frozenset[int]
    planned: bool = False
    """Whether a schedule says when each stage runs it, so that nothing can be asked of others."""
    trying: bool = False
    """Whether nothing is computed: what would be sent is looked at."""
    sent: list[tuple[int, int, Tensor]] = field(default_factory=list)
    """From which stage to which, and what, of what carries gradients; in order."""
    received: list[tuple[int, int, Tensor]] = field(default_factory=list)
    """The same of what has come: the leaves of this rank's graph."""
    flying: list[Handle] = field(default_factory=list)
    """What was sent, on its way."""
    is_over: bool = False
    """Whether a backward has used it up."""
    number: int = field(default_factory=itertools.count().__next__)
    """Its place among the runs of this process."""


class Moves(Protocol):
    """What carries values between the stages."""

    @property
    def run(self) -> Run:
        """What runs now."""

    def send(self, run: Run, source: int, target: int, value: Tensor) -> None:
        """Let the rank of `target` have what `source`, here, has."""

    def receive(self, run: Run, source: int, target: int, like: Tensor) -> Tensor:
        """What `source` has sent to `target`, here."""

    def spread(self, source: int, value: Tensor | None, like: Tensor) -> Tensor:
        """What `source` has, on all ranks. Collective."""

    def open(self, source: int, target: int) -> None:
        """Make a way between two stages, where there is none. Collective then."""

    def owner(self, parameter: Tensor) -> int | None:
        """The stage that trains a parameter."""

    def borrow(self, parameter: torch.nn.Parameter, stage: int) -> None:
        """Let `stage` have a parameter that another one trains."""

    def whole(self, parameter: torch.nn.Parameter) -> Tensor:
        """All of a parameter that is here, also where layers are split further. Collective then."""

    def like(self, parameter: torch.nn.Parameter) -> FakeTensor:
        """A stand-in for all of a parameter."""

    @property
    def inside_of(self) -> int:
        """Of how many blocks `inside` this is."""

    def inside(self) -> AbstractContextManager[None]:
        """Inside the block operations are those of one stage."""


class Piece(Tensor):
    """A tensor that the stage `home` has: `value` where it is known, `like` to tell its shape."""

    home: int
    value: Tensor | None
    known: set[int]
    """The stages that have it."""
    runs: tuple[Run, ...]
    """Those in which it was made, in their order."""
    _moves: Moves
    _like: FakeTensor | None

    @staticmethod
    def __new__(
        cls, moves: Moves, home: int, value: Tensor | None, like: Tensor, runs: tuple[Run, ...]
    ) -> Piece:
        made: Piece = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.home, made.value, made.known, made._moves = home, value, {home}, moves
        made._like = like if isinstance(like, FakeTensor) else None
        made.runs = runs
        return made

    @property
    def like(self) -> FakeTensor:
        """The stand-in."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._like is None:
                assert self.value is not None
                self._like = stand_in(self.value)
            return self._like

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return apply(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise UsageError(
            f"{func} was called on a tensor of a split model in a way that cannot be followed to "
            "the rank that has it. Take what it needs out of the model's forward, or start "
            "without --pipeline."
        )


_ABOUT = FORM | {getattr(Tensor, name).__get__ for name in ("is_leaf", "requires_grad")}
"""What asks for the form of a tensor only, which all ranks know."""

_READS = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__, Tensor.__float__,
    Tensor.__int__, Tensor.__index__, Tensor.__contains__, Tensor.__repr__, Tensor.__format__,
    Tensor.cpu, Tensor.equal, torch.equal, torch.allclose, Tensor.allclose, torch.is_nonzero,
    Tensor.is_nonzero, Tensor.__reduce_ex__, Tensor.__deepcopy__,
}  # fmt: skip
"""What takes values out of a tensor: all ranks get them."""

_BACKWARDS = {torch.autograd.grad, Tensor.backward}
"""What goes through the graph, of which each rank has the part of its own stages."""

_SHAPED_BY_VALUES = {
    Tensor.__getitem__, Tensor.nonzero, torch.nonzero, Tensor.masked_select, torch.masked_select,
    Tensor.unique, torch.unique, torch.argwhere, Tensor.argwhere, torch.where,
}  # fmt: skip
"""What may give a shape that depends on values."""


def apply(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func`, of whose arguments some are pieces, on the rank that is to do it."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    pieces = [leaf for leaf in leaves if isinstance(leaf, Piece)]
    moves = pieces[0]._moves
    if any(piece._moves is not moves for piece in pieces):
        raise UsageError(
            "Tensors of two models meet, of which each has its layers on several workers "
            "(--pipeline), and the stages of one are not those of the other. Put them into one "
            "module, with one engine."
        )
    if func in _ABOUT:
        return _call(func, [_told(leaf) for leaf in leaves], spec)
    if func in _READS:
        found = [everywhere(leaf) if isinstance(leaf, Piece) else leaf for leaf in leaves]
        return _call(func, found, spec)
    if func in _BACKWARDS:
        raise _backward_refused(func)
    return operate(moves, func, leaves, spec)


def _backward_refused(func: Callable[..., Any]) -> UsageError:
    if func is Tensor.backward:
        return UsageError(
            "loss.backward() of a model whose layers are on several workers (--pipeline): write "
            "engine.backward(loss), or loss = engine.forward_backward(loss_of, *batch)."
        )
    return UsageError(
        "torch.autograd.grad of what layers on several workers (--pipeline) have made: each worker "
        "has a part of the graph only, so gradients inside of a loss (a gradient penalty) cannot "
        "be had with --pipeline. Start without it: --zero 3 or --tensor make room as well."
    )


def _told(leaf: Any) -> Any:
    """What has the form of `leaf`."""
    if not isinstance(leaf, Piece):
        return leaf
    return leaf.like if leaf.value is None else leaf.value


def operate(
    moves: Moves, func: Callable[..., Any], leaves: list[Any], spec: pytree.TreeSpec
) -> Any:
    """`func` of pieces, parameters and tensors that all have, where the last of them is."""
    runs = runs_of(moves, leaves)
    homes = [home for leaf in leaves if (home := _home(moves, leaf)) is not None]
    home = max(homes)
    _check_in_place(moves, func, leaves, spec)
    if home in moves.run.stages:
        if func in _SHAPED_BY_VALUES:
            _shapes(moves, func, leaves, spec)  # the error that the others have
        given = [at(moves, leaf, home) for leaf in leaves]
        with recomputed_layers.kept():
            found = _call(func, given, spec)
        return pytree.tree_map_only(Tensor, lambda v: Piece(moves, home, v, v, runs), found)
    for leaf in leaves:
        at(moves, leaf, home)
    found = _shapes(moves, func, leaves, spec)
    return pytree.tree_map_only(Tensor, lambda v: Piece(moves, home, None, v, runs), found)


def runs_of(moves: Moves, leaves: Iterable[Any]) -> tuple[Run, ...]:
    """The runs of what is made of `leaves`: theirs, or the present one. Raises UsageError for a
    piece of another micro-batch."""
    pieces = [leaf for leaf in leaves if isinstance(leaf, Piece)]
    if recomputed_layers.is_in_function() and any(_told(piece).requires_grad for piece in pieces):
        raise recomputed_layers.function_refused()
    found = {run for piece in pieces for run in piece.runs}
    if any(run.planned and run is not moves.run for run in found):
        raise UsageError(
            "A tensor of the model was kept from inside engine.forward_backward, where each stage "
            "has a part of each micro-batch: it cannot be used outside. Let loss_of return the "
            "loss alone, and compute what else is wanted in a forward of its own."
        )
    return tuple(sorted(found or {moves.run}, key=lambda run: run.number))


def _check_in_place(
    moves: Moves, func: Callable[..., Any], leaves: list[Any], spec: pytree.TreeSpec
) -> None:
    """Raise UsageError where a tensor that all ranks have is written to with one stage's."""
    name = getattr(func, "__name__", "")
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    writes = func is Tensor.__setitem__ or (name.endswith("_") and not name.endswith("__"))
    targets = [kwargs["out"]] if kwargs.get("out") is not None else list(args[:1]) if writes else []
    if any(isinstance(t, Tensor) and _home(moves, t) is None for t in targets):
        raise UsageError(
            f"{name}: a tensor that all ranks have is written to with what one stage has made, "
            "which the others would not see. Make a new tensor of it: total = total + hits, "
            "torch.where, torch.cat."
        )


def _shapes(
    moves: Moves, func: Callable[..., Any], leaves: list[Any], spec: pytree.TreeSpec
) -> Any:
    """What `func` gives, as stand-ins. Raises UsageError where that depends on values."""
    try:
        with fakes(), unsaved():
            return _call(func, [_shape_of(moves, leaf) for leaf in leaves], spec)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UsageError(
            f"{getattr(func, '__name__', func)} of a tensor of the model gives a shape, or a "
            "number, that depends on its values, which the ranks of other stages do not have. "
            "Write it without: torch.where or ignore_index in place of a mask; or read the values "
            "first: .tolist() outside of engine.forward_backward."
        ) from error


def unsaved() -> saved_tensors_hooks:
    """Inside the block what autograd saves is nobody's business: stand-ins have nothing to keep."""
    return saved_tensors_hooks(lambda saved: saved, lambda saved: saved)


def _call(func: Callable[..., Any], leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return func(*args, **kwargs)


def _home(moves: Moves, leaf: Any) -> int | None:
    if isinstance(leaf, Piece):
        return leaf.home
    return moves.owner(leaf) if isinstance(leaf, torch.nn.Parameter) else None


def _shape_of(moves: Moves, leaf: Any) -> Any:
    if isinstance(leaf, Piece):
        return leaf.like
    if _home(moves, leaf) is not None:
        return moves.like(leaf)
    return stand_in(leaf) if isinstance(leaf, Tensor) else leaf


def at(moves: Moves, leaf: Any, stage: int) -> Any:
    """What stands for `leaf` on `stage`: moved there if it is a piece that it does not have.

    The value where this rank runs `stage`; else nothing that could be used.
    """
    if isinstance(leaf, torch.nn.Parameter) and (owner := moves.owner(leaf)) is not None:
        if owner != stage:
            moves.borrow(leaf, stage)
        return moves.whole(leaf) if stage in moves.run.stages else leaf
    if not isinstance(leaf, Piece):
        return leaf
    if stage not in leaf.known:
        leaf.known.add(stage)
        moves.open(leaf.home, stage)
        run = leaf.runs[-1]
        here, there = leaf.home in moves.run.stages, stage in moves.run.stages
        if here and not there:
            assert leaf.value is not None
            moves.send(run, leaf.home, stage, leaf.value)
        elif there and not here:
            leaf.value = moves.receive(run, leaf.home, stage, leaf.like)
    return leaf.value


def everywhere(piece: Piece) -> Tensor:
    """The value of a piece, without its graph, on all ranks. Collective."""
    moves = piece._moves
    if moves.run.planned:
        raise UsageError(
            "Inside engine.forward_backward a tensor of the model is on one stage, and the others "
            "are in other micro-batches: its values cannot be read (.item(), if, print). Return "
            "the loss, and read what comes back from engine.forward_backward."
        )
    runs_of(moves, [piece])
    here = piece.home in moves.run.stages
    return moves.spread(piece.home, piece.value if here else None, piece.like)


def use(moves: Moves, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation of the user's on parameters, outside of all layers: where the last of them is.

    All ranks are told what it reads."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if func in _BACKWARDS:
        raise _backward_refused(func)
    with torch._C.DisableTorchFunctionSubclass(), moves.inside():
        if func in _READS:
            return _call(func, [_read(moves, leaf) for leaf in leaves], spec)
        return operate(moves, func, leaves, spec)


def _read(moves: Moves, leaf: Any) -> Any:
    home = _home(moves, leaf)
    if home is None:
        return leaf
    if not isinstance(leaf, Piece):
        value = moves.whole(leaf).detach() if home in moves.run.stages else None
        leaf = Piece(moves, home, value, moves.like(leaf), (moves.run,))
    return everywhere(leaf)
