"""Tensors of which each rank of a replica has some tokens (sequence parallelism).

What a split layer gives is a sum over the ranks. Where each keeps some tokens of it, norms, dropout
and residuals are computed once instead of on every rank, and so much less is kept for backward
(Korthikanti et al., 2022). The tokens are the last dimension but one, whatever the user takes it
for: what is computed token by token does not mind.

    whole    split layer ═ summed, in parts ═▷ tokens ─ + ─ dropout ─ norm ═ joined ═▷ split layer

`Tokens` stands for the whole. What is computed token by token goes on in parts; anything else is
given the whole, so that a forward gives the same whatever it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.collectives import Collectives
from shardwise.errors import UsageError
from shardwise.model.recomputation import StandsForPart
from shardwise.parallel.draws import Draws
from shardwise.parallel.regions import Parts, apart, gathered, is_stand_in, taken
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
    """A tensor (..., tokens, features) of which this rank has `part`, along `parts`."""

    parts: Parts
    group: Collectives
    draws: Draws

    @staticmethod
    def __new__(cls, part: Tensor, group: Collectives, draws: Draws, parts: Parts) -> Tokens:
        made: Tokens = Tensor._make_wrapper_subclass(
            cls,
            parts.whole_shape(part.shape),
            dtype=part.dtype,
            device=part.device,
            requires_grad=part.requires_grad,
        )
        made.part, made.group, made.draws, made.parts = part, group, draws, parts
        if part.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(_lost)  # type: ignore[no-untyped-call]
        return made

    def checked(self) -> Tensor:
        """The part. Raises UsageError where autograd has this tensor itself in a graph, so that
        what it computed is not in the part's."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.grad_fn is not None:
                raise _strayed()
        return self.part

    def like(self, part: Tensor) -> Tokens:
        """A tensor in the same parts."""
        return Tokens(part, self.group, self.draws, self.parts)

    def form(self) -> Callable[[Tensor], Tensor]:
        """What makes a tensor in the same parts of another part."""
        return partial(Tokens, group=self.group, draws=self.draws, parts=self.parts)

    def whole(self) -> Tensor:
        """All of it, on all ranks. Collective."""
        return gathered(self.checked(), self.group, self.parts)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _apply(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # what autograd has saved (for a checkpoint) is
            return args[0].like(args[0].part)  # given back: the leaf that stands for the part
        raise _strayed()


def whole_of(values: Any) -> Any:
    """`values`, a nest, with whole tensors in it. Collective where there are others."""
    return pytree.tree_map_only(Tokens, lambda value: value.whole(), values)


def _lost(grad: Tensor) -> None:
    raise _strayed()


def _strayed() -> UsageError:
    return UsageError(
        "A tensor of which each rank has some tokens (--sequence-parallel) went into a "
        "torch.autograd.Function, which cannot be followed. Where that is checkpointing, write "
        "use_reentrant=False; where it is a layer that computes token by token, name its module in "
        'tensor_plan: {"blocks.*.norm": "sequence_parallel"}; else start without it.'
    )


_FORM = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta",
                 "is_sparse", "is_quantized", "itemsize", "nbytes")
} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex,
    Tensor.element_size, Tensor.get_device, Tensor.__len__, Tensor.nelement, Tensor.ndimension,
    torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip
"""What asks for the form of the whole."""

_GRAPH = {
    *(getattr(Tensor, name).__get__ for name in ("grad_fn", "is_leaf", "requires_grad")),
    Tensor.register_hook,
}
"""What asks for the place in the graph, which is the part's."""

_DROPOUT = {F.dropout, torch.dropout}

_ELEMENTWISE = {
    getattr(place, name)
    for place in (torch, Tensor, F)
    for name in ("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "neg",
                 "pow", "square", "sqrt", "rsqrt", "reciprocal", "exp", "log", "abs", "tanh",
                 "sigmoid", "relu", "gelu", "silu", "clamp", "where", "clone", "detach",
                 "contiguous", "to", "type_as", "float", "double", "half", "bfloat16",
                 "__radd__", "__rsub__", "__rmul__", "__rdiv__", "__rtruediv__", "__pow__",
                 "__rpow__")
    if hasattr(place, name)
}  # fmt: skip

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
    if func in _FORM:
        return func(*args, **kwargs)
    if func in _GRAPH:
        return func(args[0].checked(), *args[1:], **kwargs)
    if _goes_by_token(func, args, kwargs):
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tokens = next(leaf for leaf in leaves if isinstance(leaf, Tokens))
        found = _parts_of_all(tokens, leaves)
        if found is not None:
            given, named = pytree.tree_unflatten(found, spec)
            if func in _IN_PLACE:
                func(*given, **named)
                return args[0]
            with tokens.draws.own() if func in _DROPOUT else nullcontext():
                return tokens.like(func(*given, **named))
    args, kwargs = whole_of((args, kwargs))
    return func(*args, **kwargs)


def _goes_by_token(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether `func` computes each token from its own values alone."""
    if kwargs.get("out") is not None or not (args and isinstance(args[0], Tensor)):
        return False
    if func in _ELEMENTWISE or func in _DROPOUT:
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
    return func in _IN_PLACE


def _parts_of_all(tokens: Tokens, leaves: Sequence[Any]) -> list[Any] | None:
    """What of `leaves` belongs to the part of `tokens`: of what has tokens too a part, and the
    rest as it is, its gradient to be summed. None where they cannot be brought together."""
    found: list[Any] = []
    alike: list[int] = []
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Tokens):
            if leaf.group is not tokens.group or leaf.parts != tokens.parts:
                return None
            found.append(leaf.checked())
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
