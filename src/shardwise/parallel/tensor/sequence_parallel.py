"""Tensors of which each rank of a replica has some tokens (sequence parallelism).

What a split layer gives is a sum over the ranks. Where each keeps some tokens of it, norms, dropout
and residuals are computed once instead of on every rank, and so much less is kept for backward
(Korthikanti et al., 2022). The tokens are the last dimension but one, whatever the user takes it
for: what is computed token by token does not mind.

    whole    split layer ═ summed, in parts ═▷ tokens ─ + ─ dropout ─ norm ═ joined ═▷ split layer

`Tokens` stands for the whole. What is computed token by token goes on in parts; anything else is
given the whole, so that a forward gives the same whatever it does. What is written into the whole,
or a view of it, reaches the parts when they are looked at next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.collectives import Collectives
from shardwise.errors import UsageError
from shardwise.model.recomputation import StandsForPart
from shardwise.parallel.tensor.metadata_calls import FORM
from shardwise.parallel.tensor.regions import Parts, apart, gathered, is_stand_in, taken
from shardwise.parallel.tensor.replica_draws import Draws
from shardwise.shards import even_ranges

TOKENS = -2
"""The dimension that is in parts."""


def parts_of(value: Tensor, group: Collectives) -> Parts | None:
    """How `value` (..., tokens, features) is spread over the ranks; None where it has no tokens,
    or fewer than there are ranks, or no numbers."""
    if value.ndim < 2 or value.shape[TOKENS] < group.size or is_stand_in(value):
        return None
    ranges = [each for (each,) in even_ranges(value.shape[TOKENS], group.size)]
    return Parts(TOKENS, tuple(ranges))


class Tokens(StandsForPart):
    """A tensor (..., tokens, features) of which this rank has a part, along `parts`."""

    parts: Parts
    group: Collectives
    draws: Draws
    _part: Tensor
    _whole: Tensor | None
    _versions: tuple[int, int]
    """Of the whole and the part, when they were last the same."""

    @staticmethod
    def __new__(cls, part: Tensor, group: Collectives, draws: Draws, parts: Parts) -> Tokens:
        made: Tokens = Tensor._make_wrapper_subclass(
            cls,
            parts.whole_shape(part.shape),
            dtype=part.dtype,
            device=part.device,
            requires_grad=part.requires_grad,
        )
        made._part, made._whole, made._versions = part, None, (0, 0)
        made.group, made.draws, made.parts = group, draws, parts
        if part.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(_lost)  # type: ignore[no-untyped-call]
        return made

    @property
    def part(self) -> Tensor:
        """This rank's. Raises UsageError where autograd has this tensor itself in a graph, so that
        what it computed is not in the part's."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.grad_fn is not None:
                raise _strayed()
            whole = self._whole
            if whole is not None and (whole.is_inference() or whole._version != self._versions[0]):
                with torch.set_grad_enabled(whole.requires_grad):
                    self._part = taken(whole, self.group, self.parts)
                self._versions = _version(whole), _version(self._part)
            return self._part

    @property
    def has_whole(self) -> bool:
        """Whether somebody may look at, or write to, the whole."""
        return self._whole is not None

    def whole(self) -> Tensor:
        """All of it, on all ranks: one tensor, however often it is asked for. Collective."""
        part = self.part
        with torch._C.DisableTorchFunctionSubclass():
            whole = self._whole
            if whole is None or _version(part) != self._versions[1]:
                # Also where no gradients are recorded: what is written to keeps the graph it has.
                with torch.set_grad_enabled(part.requires_grad):
                    whole = self._whole = gathered(part, self.group, self.parts)
                self._versions = _version(whole), _version(part)
            return whole

    def like(self, part: Tensor) -> Tokens:
        """A tensor in the same parts; this one, where the part is its own."""
        return self if part is self._part else Tokens(part, self.group, self.draws, self.parts)

    def form(self) -> Callable[[Tensor], Tensor]:
        """What makes a tensor in the same parts of another part."""
        return partial(Tokens, group=self.group, draws=self.draws, parts=self.parts)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(getattr(kind, "is_split", False) for kind in types):
            return NotImplemented  # a parameter of which each rank has a part: whole first
        with torch._C.DisableTorchFunctionSubclass():
            return _apply(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # what autograd has saved (for a checkpoint) is
            return args[0].form()(args[0].part)  # given back: the leaf that stands for the part
        raise _strayed()


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version


def whole_of(values: Any) -> Any:
    """`values`, a nest, with whole tensors in it and in the objects that it holds. Collective
    where there are others."""
    return pytree.tree_map(_whole_leaf, values)


def _whole_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tokens):
        return leaf.whole()
    if isinstance(leaf, Tensor | nn.Module):
        return leaf
    names = (
        [each.name for each in fields(leaf)]
        if is_dataclass(leaf)
        else getattr(leaf, "__dict__", ())
    )
    for name in list(names):
        held = getattr(leaf, name, None)
        if any(isinstance(each, Tokens) for each in pytree.tree_leaves(held)):
            object.__setattr__(leaf, name, whole_of(held))
    return leaf


def _lost(grad: Tensor) -> None:
    raise _strayed()


def _strayed() -> UsageError:
    return UsageError(
        "A tensor of which each rank has some tokens (--sequence-parallel) went into a "
        "torch.autograd.Function, which cannot be followed. Where that is checkpointing, write "
        "use_reentrant=False; where it is a layer that computes token by token, name its module in "
        'tensor_plan: {"blocks.*.norm": "sequence_parallel"}; where it is register_full_backward_'
        "hook, hook the tensor that forward returns; else start without --sequence-parallel."
    )


_GRAPH = {getattr(Tensor, name).__get__ for name in ("grad_fn", "is_leaf", "requires_grad")}
"""What asks for the place in the graph, which is the part's."""

_REFUSED = {Tensor.retain_grad} | {
    getattr(Tensor, name).__set__ for name in ("data", "grad", "requires_grad")
}
"""What changes a tensor in a way that nobody can follow."""

_CASTS = {Tensor.to, Tensor.type_as}
"""What takes from its other arguments no more than their dtype and device."""

_ELEMENTWISE = {
    getattr(place, name)
    for place in (torch, Tensor, F)
    for name in ("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "neg",
                 "pow", "square", "sqrt", "rsqrt", "reciprocal", "exp", "log", "abs", "tanh",
                 "sigmoid", "relu", "gelu", "silu", "clamp", "where", "clone", "detach",
                 "contiguous", "float", "double", "half", "bfloat16", "dropout",
                 "__radd__", "__rsub__", "__rmul__", "__rdiv__", "__rtruediv__", "__pow__",
                 "__rpow__")
    if hasattr(place, name)
} - {torch.dropout}  # fmt: skip

_IN_PLACE = {
    getattr(Tensor, name)
    for name in ("add_", "sub_", "mul_", "div_", "__iadd__", "__isub__", "__imul__", "__itruediv__")
}

_NORMS = {F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm}
"""What takes the features together, where its second argument names them alone."""

_OVER_FEATURES = {torch.mean, Tensor.mean, torch.sum, Tensor.sum}
"""What takes the features together, where that is asked for and their dimension kept."""


def _apply(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func`, of whose arguments some are Tokens."""
    if func in FORM:
        return func(*args, **kwargs)
    if func in _GRAPH:
        return func(args[0].part, *args[1:], **kwargs)
    if func is Tensor.register_hook:
        return args[0].part.register_hook(_Hook(args[1], args[0].form()))
    if func is Tensor.requires_grad_:
        return args[0].like(func(args[0].part, *args[1:], **kwargs))
    if func in _REFUSED:
        raise UsageError(
            f"{getattr(func, '__qualname__', func)} of a tensor of which each rank has some tokens "
            "(--sequence-parallel) cannot be followed: make a new tensor, or start without it."
        )
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tokens = next(leaf for leaf in leaves if isinstance(leaf, Tokens))
    if func in _CASTS and not isinstance(args[0], Tokens):
        return func(
            args[0], *(leaf.part if isinstance(leaf, Tokens) else leaf for leaf in args[1:])
        )
    if not tokens.draws.is_open and _goes_by_token(func, args, kwargs):
        found = _parts_of_all(tokens, leaves, casts=func in _CASTS)
        if found is not None:
            given, named = pytree.tree_unflatten(found, spec)
            with tokens.draws.own() if _draws(func, kwargs) else nullcontext():
                made = func(*given, **named)
            if func in _IN_PLACE:
                return args[0]
            if _has_tokens_of(made, tokens.part):
                return tokens.like(made)
    return _of_wholes(func, leaves, spec)


def _of_wholes(func: Callable[..., Any], leaves: Sequence[Any], spec: pytree.TreeSpec) -> Any:
    """`func` of whole tensors; a tensor that it gives back, perhaps written to, as it was given."""
    given = {}
    for leaf in leaves:
        if isinstance(leaf, Tokens):
            given[id(leaf.whole())] = leaf
    args, kwargs = pytree.tree_unflatten(
        [leaf.whole() if isinstance(leaf, Tokens) else leaf for leaf in leaves], spec
    )
    return pytree.tree_map(lambda made: given.get(id(made), made), func(*args, **kwargs))


class _Hook:
    """A user's hook on the gradient of what is in parts; it gets one that stands for the whole."""

    def __init__(self, hook: Callable[[Tensor], Any], form: Callable[[Tensor], Tensor]) -> None:
        self._hook = hook
        self._form = form

    def __call__(self, grad: Tensor) -> Tensor | None:
        given = self._form(grad)
        assert isinstance(given, Tokens)
        found = self._hook(given)
        if found is None:
            return None
        return found.part if isinstance(found, Tokens) else taken(found, given.group, given.parts)


def _draws(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    return func is F.dropout and kwargs.get("training", True) and kwargs.get("p", 0.5) > 0


def _has_tokens_of(made: Any, part: Tensor) -> bool:
    return (
        isinstance(made, Tensor)
        and made.ndim >= 2
        and made.shape[TOKENS] == part.shape[TOKENS]
        and made.device == part.device
    )


def _goes_by_token(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether `func` computes each token from its own values alone."""
    if kwargs.get("out") is not None or not (args and isinstance(args[0], Tensor)):
        return False
    if func in _IN_PLACE or kwargs.get("inplace"):
        return isinstance(args[0], Tokens) and not args[0].has_whole
    if func in _ELEMENTWISE:
        return True
    if not isinstance(args[0], Tokens):
        return False
    second = args[1] if len(args) > 1 else None
    if func in _NORMS:
        shape = kwargs.get("normalized_shape", second)
        return isinstance(shape, Sequence) and len(shape) == 1
    if func in _OVER_FEATURES:
        dim = kwargs.get("dim", second)
        kept = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
        return kept is True and dim in (-1, (-1,), [-1])
    return func in _CASTS


def bring_to_parts(tokens: Tokens, several: Any) -> Any:
    """`several`, a nest, as `tokens` is in parts. Raises UsageError where that cannot be."""
    leaves, spec = pytree.tree_flatten(several)
    found = _parts_of_all(tokens, leaves)
    if found is None:
        raise UsageError(
            "A module that tensor_plan calls sequence_parallel has two tensors that are not in the "
            "same parts among its arguments: give it tensors of equally many tokens."
        )
    return pytree.tree_unflatten(found, spec)


def _parts_of_all(
    tokens: Tokens, leaves: Sequence[Any], *, casts: bool = False
) -> list[Any] | None:
    """What of `leaves` belongs to the part of `tokens`: of what has tokens too a part, and the
    rest as it is, its gradient to be summed, unless it is only to tell what one `casts` to. None
    where they cannot be brought together."""
    found: list[Any] = []
    alike: list[int] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tokens):
            if leaf.group is not tokens.group or leaf.parts != tokens.parts:
                return None
            found.append(leaf.part)
        elif not isinstance(leaf, Tensor) or casts:
            found.append(leaf)
        elif leaf.ndim < 2 or leaf.shape[TOKENS] == 1:
            if leaf.requires_grad and torch.is_grad_enabled():
                alike.append(place)
            found.append(leaf)
        elif leaf.shape[TOKENS] == tokens.parts.size:
            found.append(taken(leaf, tokens.group, tokens.parts))
        else:
            return None
    if alike:
        several = apart(tokens.group, *(found[place] for place in alike))
        for place, value in zip(alike, several, strict=True):
            found[place] = value
    return found
