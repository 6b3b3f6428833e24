"""Sequence parallelism: tensors of which each rank of a replica has some tokens.

The output of a split layer is a sum over the ranks. Where each keeps some tokens of it, norms,
dropout and residuals are computed once instead of on every rank, and so much less is saved for
backward (Korthikanti et al., 2022). The tokens are the last dimension but one, whatever it means to
the user: operations that go token by token do not depend on it.

    whole ─ split layer ═ reduce-scatter ═▷ tokens ─ + ─ dropout ─ norm ═ all-gather ═▷ split layer

`SequenceShard` stands for the whole. Token-wise operations run on the parts; anything else gets the
whole, so that a forward gives the same whatever it does. Writes into the whole, or a view of it,
reach the parts when they are next read.
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

from shardwise.comm import Collectives
from shardwise.errors import UsageError
from shardwise.layout.shards import even_ranges
from shardwise.model.recomputation import StandsForPart
from shardwise.parallel.tensor.region_collectives import (
    ShardedDim,
    copy_to_region,
    gather_from_region,
    is_fake,
    scatter_to_region,
)
from shardwise.parallel.tensor.replica_randomness import ReplicaRandomness
from shardwise.parallel.tensor.torch_functions import (
    CASTS_LIKE,
    ELEMENTWISE,
    ELEMENTWISE_IN_PLACE,
    FEATURE_REDUCTIONS,
    FORM,
    GRAPH,
    NORMS,
    UNTRACKED_WRITES,
)

TOKEN_DIM = -2
"""The dimension that is split."""


def token_sharding(value: Tensor, group: Collectives) -> ShardedDim | None:
    """How `value` (..., tokens, features) is split over the ranks; None where it has no tokens, or
    fewer than there are ranks, or no numbers."""
    if value.ndim < 2 or value.shape[TOKEN_DIM] < group.size or is_fake(value):
        return None
    ranges = [each for (each,) in even_ranges(value.shape[TOKEN_DIM], group.size)]
    return ShardedDim(TOKEN_DIM, tuple(ranges))


class SequenceShard(StandsForPart):
    """A tensor (..., tokens, features) of which this rank has a part, along dimension `sharded`."""

    sharded: ShardedDim
    group: Collectives
    randomness: ReplicaRandomness
    _local: Tensor
    _full: Tensor | None
    _versions: tuple[int, int]
    """Versions of the whole and of the part when they were last equal."""

    @staticmethod
    def __new__(
        cls, local: Tensor, group: Collectives, randomness: ReplicaRandomness, sharded: ShardedDim
    ) -> SequenceShard:
        made: SequenceShard = Tensor._make_wrapper_subclass(
            cls,
            sharded.whole_shape(local.shape),
            dtype=local.dtype,
            device=local.device,
            requires_grad=local.requires_grad,
        )
        made._local, made._full, made._versions = local, None, (0, 0)
        made.group, made.randomness, made.sharded = group, randomness, sharded
        if local.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        return made

    @property
    def local(self) -> Tensor:
        """This rank's part. Raises UsageError where autograd has recorded this tensor itself, so
        that the part lacks what was computed."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.grad_fn is not None:
                raise _untracked_error()
            full = self._full
            if full is not None and (full.is_inference() or full._version != self._versions[0]):
                with torch.set_grad_enabled(full.requires_grad):
                    self._local = scatter_to_region(full, self.group, self.sharded)
                self._versions = _version(full), _version(self._local)
            return self._local

    @property
    def has_full(self) -> bool:
        """Whether the whole exists, so that someone may read or write it."""
        return self._full is not None

    def full(self) -> Tensor:
        """The whole on all ranks: one tensor, however often it is asked for. Collective."""
        local = self.local
        with torch._C.DisableTorchFunctionSubclass():
            full = self._full
            if full is None or _version(local) != self._versions[1]:
                # Also where no gradients are recorded: what is written to keeps the graph it has.
                with torch.set_grad_enabled(local.requires_grad):
                    full = self._full = gather_from_region(local, self.group, self.sharded)
                self._versions = _version(full), _version(local)
            return full

    def like(self, local: Tensor) -> SequenceShard:
        """A tensor split as this one; this one itself if `local` is its own part."""
        return (
            self
            if local is self._local
            else SequenceShard(local, self.group, self.randomness, self.sharded)
        )

    def constructor(self) -> Callable[[Tensor], Tensor]:
        """A function from a part to a tensor split as this one."""
        return partial(
            SequenceShard, group=self.group, randomness=self.randomness, sharded=self.sharded
        )

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
            return args[0].constructor()(
                args[0].local
            )  # given back: the leaf that stands for the part
        raise _untracked_error()


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version


def gather_nested(values: Any) -> Any:
    """`values`, a nest, with whole tensors in it and in the objects that it holds. Collective if
    some are split."""
    return pytree.tree_map(_gather_leaf, values)


def _gather_leaf(leaf: Any) -> Any:
    if isinstance(leaf, SequenceShard):
        return leaf.full()
    if isinstance(leaf, Tensor | nn.Module):
        return leaf
    names = (
        [each.name for each in fields(leaf)]
        if is_dataclass(leaf)
        else getattr(leaf, "__dict__", ())
    )
    for name in list(names):
        held = getattr(leaf, name, None)
        if any(isinstance(each, SequenceShard) for each in pytree.tree_leaves(held)):
            object.__setattr__(leaf, name, gather_nested(held))
    return leaf


def _refuse_gradient(grad: Tensor) -> None:
    raise _untracked_error()


def _untracked_error() -> UsageError:
    return UsageError(
        "A tensor of which each rank has some tokens (--sequence-parallel) went into a "
        "torch.autograd.Function, which cannot be followed. Where that is checkpointing, write "
        "use_reentrant=False; where it is a layer that computes token by token, name its module in "
        'tensor_plan: {"blocks.*.norm": "sequence_parallel"}; where it is register_full_backward_'
        "hook, hook the tensor that forward returns; else start without --sequence-parallel."
    )


def _apply(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` with arguments of which some are SequenceShards."""
    if func in FORM:
        return func(*args, **kwargs)
    if func in GRAPH:
        return func(args[0].local, *args[1:], **kwargs)
    if func is Tensor.register_hook:
        return args[0].local.register_hook(_GradientHook(args[1], args[0].constructor()))
    if func is Tensor.requires_grad_:
        return args[0].like(func(args[0].local, *args[1:], **kwargs))
    if func in UNTRACKED_WRITES:
        raise UsageError(
            f"{getattr(func, '__qualname__', func)} of a tensor of which each rank has some tokens "
            "(--sequence-parallel) cannot be followed: make a new tensor, or start without it."
        )
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tokens = next(leaf for leaf in leaves if isinstance(leaf, SequenceShard))
    if func in CASTS_LIKE and not isinstance(args[0], SequenceShard):
        return func(
            args[0], *(leaf.local if isinstance(leaf, SequenceShard) else leaf for leaf in args[1:])
        )
    if not tokens.randomness.in_region and _is_token_wise(func, args, kwargs):
        found = _local_arguments(tokens, leaves, casts=func in CASTS_LIKE)
        if found is not None:
            given, named = pytree.tree_unflatten(found, spec)
            with tokens.randomness.region() if _is_random(func, kwargs) else nullcontext():
                made = func(*given, **named)
            if func in ELEMENTWISE_IN_PLACE:
                return args[0]
            if _has_same_tokens(made, tokens.local):
                return tokens.like(made)
    return _call_on_full(func, leaves, spec)


def _call_on_full(func: Callable[..., Any], leaves: Sequence[Any], spec: pytree.TreeSpec) -> Any:
    """Call `func` with whole tensors. A tensor that it returns, perhaps written to, becomes its
    shard."""
    given = {}
    for leaf in leaves:
        if isinstance(leaf, SequenceShard):
            given[id(leaf.full())] = leaf
    args, kwargs = pytree.tree_unflatten(
        [leaf.full() if isinstance(leaf, SequenceShard) else leaf for leaf in leaves], spec
    )
    return pytree.tree_map(lambda made: given.get(id(made), made), func(*args, **kwargs))


class _GradientHook:
    """A user's hook on the gradient of a part; it gets a tensor that stands for the whole."""

    def __init__(
        self, hook: Callable[[Tensor], Any], constructor: Callable[[Tensor], Tensor]
    ) -> None:
        self._hook = hook
        self._constructor = constructor

    def __call__(self, grad: Tensor) -> Tensor | None:
        given = self._constructor(grad)
        assert isinstance(given, SequenceShard)
        found = self._hook(given)
        if found is None:
            return None
        return (
            found.local
            if isinstance(found, SequenceShard)
            else scatter_to_region(found, given.group, given.sharded)
        )


def _is_random(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    return func is F.dropout and kwargs.get("training", True) and kwargs.get("p", 0.5) > 0


def _has_same_tokens(made: Any, local: Tensor) -> bool:
    return (
        isinstance(made, Tensor)
        and made.ndim >= 2
        and made.shape[TOKEN_DIM] == local.shape[TOKEN_DIM]
        and made.device == local.device
    )


def _is_token_wise(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether `func` computes each token from its own values alone."""
    if kwargs.get("out") is not None or not (args and isinstance(args[0], Tensor)):
        return False
    if func in ELEMENTWISE_IN_PLACE or kwargs.get("inplace"):
        return isinstance(args[0], SequenceShard) and not args[0].has_full
    if func in ELEMENTWISE:
        return True
    if not isinstance(args[0], SequenceShard):
        return False
    second = args[1] if len(args) > 1 else None
    if func in NORMS:
        shape = kwargs.get("normalized_shape", second)
        return isinstance(shape, Sequence) and len(shape) == 1
    if func in FEATURE_REDUCTIONS:
        dim = kwargs.get("dim", second)
        kept = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
        return kept is True and dim in (-1, (-1,), [-1])
    return func in CASTS_LIKE


def shard_arguments(tokens: SequenceShard, several: Any) -> Any:
    """`several`, a nest, split as `tokens` is. Raises UsageError where that cannot be."""
    leaves, spec = pytree.tree_flatten(several)
    found = _local_arguments(tokens, leaves)
    if found is None:
        raise UsageError(
            "A module that tensor_plan calls sequence_parallel has two tensors that are not in the "
            "same parts among its arguments: give it tensors of equally many tokens."
        )
    return pytree.tree_unflatten(found, spec)


def _local_arguments(
    tokens: SequenceShard, leaves: Sequence[Any], *, casts: bool = False
) -> list[Any] | None:
    """The arguments for the part of `tokens`: parts of tensors that have tokens too, the rest as it
    is, with gradients to be summed unless it only gives the dtype that one `casts` to. None where
    they cannot be split alike."""
    found: list[Any] = []
    replicated: list[int] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, SequenceShard):
            if leaf.group is not tokens.group or leaf.sharded != tokens.sharded:
                return None
            found.append(leaf.local)
        elif not isinstance(leaf, Tensor) or casts:
            found.append(leaf)
        elif leaf.ndim < 2 or leaf.shape[TOKEN_DIM] == 1:
            if leaf.requires_grad and torch.is_grad_enabled():
                replicated.append(place)
            found.append(leaf)
        elif leaf.shape[TOKEN_DIM] == tokens.sharded.size:
            found.append(scatter_to_region(leaf, tokens.group, tokens.sharded))
        else:
            return None
    if replicated:
        several = copy_to_region(tokens.group, *(found[place] for place in replicated))
        for place, value in zip(replicated, several, strict=True):
            found[place] = value
    return found
