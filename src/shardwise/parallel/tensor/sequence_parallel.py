"""Implements sequence parallelism: tensors that are split by tokens over a replica's ranks.

The output of a split layer is a sum over the ranks. If each rank keeps only some of its tokens,
norms, dropout and residuals are computed once instead of on every rank, and much less is saved for
the backward pass (Korthikanti et al., 2022). Tokens are assumed to be the second-to-last dimension.
If that dimension means something else, results are still correct, because token-wise operations
treat each index separately.

    full ─ split layer ═ reduce-scatter ═▷ tokens ─ + ─ dropout ─ norm ═ all-gather ═▷ split layer

A `SequenceShard` represents the full tensor. Token-wise operations run on the parts. All other
operations receive the gathered tensor, so every forward pass computes the same result as without
the split. Writes to the gathered tensor, or to a view of it, are transferred to the parts when the
parts are next read.
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
    GRAPH,
    METADATA,
    NORMS,
    UNTRACKED_WRITES,
)

TOKEN_DIM = -2
"""The dimension that is split, counted from the last dimension."""


def token_sharding(value: Tensor, group: Collectives) -> ShardedDim | None:
    """Return how `value`, (..., tokens, features), is split by tokens over the ranks.

    Returns None if `value` has no token dimension, fewer tokens than ranks, or no data (fake
    tensors).
    """
    if is_fake(value) or not can_be_split(value, group.size):
        return None
    return split_tokens(value.shape[TOKEN_DIM], group.size)


def can_be_split(value: Tensor, parts: int) -> bool:
    """Return whether `value` has a token dimension with at least `parts` tokens."""
    return value.ndim >= 2 and value.shape[TOKEN_DIM] >= parts


def split_tokens(count: int, parts: int) -> ShardedDim:
    """Return the ranges of `count` tokens on each of `parts` ranks."""
    return ShardedDim(TOKEN_DIM, tuple(each for (each,) in even_ranges(count, parts)))


def dtype_for_layer(value: Tensor) -> torch.dtype:
    """Return the dtype in which a layer gathers its input `value`."""
    device = value.device.type
    if value.dtype == torch.float32 and torch.is_autocast_enabled(device):
        # Autocast in the layer would cast it anyway. Casting before the gather halves the traffic.
        return torch.get_autocast_dtype(device)
    return value.dtype


class SequenceShard(StandsForPart):
    """A tensor (..., tokens, features) split by tokens. This rank holds one part."""

    sharded: ShardedDim
    group: Collectives
    randomness: ReplicaRandomness
    _local: Tensor
    _full: Tensor | None
    _versions: tuple[int, int]
    """Versions of the full tensor and of the part when they were last synchronised."""

    @staticmethod
    def __new__(
        cls, local: Tensor, group: Collectives, randomness: ReplicaRandomness, sharded: ShardedDim
    ) -> SequenceShard:
        shard: SequenceShard = Tensor._make_wrapper_subclass(
            cls,
            sharded.whole_shape(local.shape),
            dtype=local.dtype,
            device=local.device,
            requires_grad=local.requires_grad,
        )
        shard._local, shard._full, shard._versions = local, None, (0, 0)
        shard.group, shard.randomness, shard.sharded = group, randomness, sharded
        # A gradient arrives here only if an operation used the wrapper instead of the part, which
        # would then never receive it.
        if local.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                shard.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        return shard

    @property
    def local(self) -> Tensor:
        """This rank's part.

        Raises UsageError if autograd has recorded an operation on the SequenceShard itself, because
        the part does not contain the operation's result.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if self.grad_fn is not None:
                raise _untracked_error()
            full = self._full
            # The user may have written to the full tensor or a view of it, so split it again.
            if full is not None and (full.is_inference() or full._version != self._versions[0]):
                with torch.set_grad_enabled(full.requires_grad):
                    self._local = scatter_to_region(full, self.group, self.sharded)
                self._versions = _version(full), _version(self._local)
            return self._local

    @property
    def has_full(self) -> bool:
        """True if the full tensor exists, so that the user may read or write it."""
        return self._full is not None

    def full(self) -> Tensor:
        """Return the full tensor on all ranks. Collective.

        The tensor is gathered again only if the part has changed.
        """
        local = self.local
        with torch._C.DisableTorchFunctionSubclass():
            full = self._full
            # Gather again if an in-place operation on the wrapper has changed the part since.
            if full is None or _version(local) != self._versions[1]:
                # Enable gradients even under no_grad, because writes to the full tensor must keep
                # their graph.
                with torch.set_grad_enabled(local.requires_grad):
                    full = self._full = gather_from_region(local, self.group, self.sharded)
                self._versions = _version(full), _version(local)
            return full

    def like(self, local: Tensor) -> SequenceShard:
        """Return a SequenceShard with the part `local`, split in the same way as this tensor.

        If `local` is this tensor's own part, return this tensor itself.
        """
        return (
            self
            if local is self._local
            else SequenceShard(local, self.group, self.randomness, self.sharded)
        )

    def constructor(self) -> Callable[[Tensor], Tensor]:
        """Return a function that maps a part to a SequenceShard, split like this one."""
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
            # A split parameter is involved, which ParameterUses must gather first.
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            return _apply(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Autograd detaches tensors that a checkpoint has saved. Return a leaf with the same part.
        if func is torch.ops.aten.detach.default:
            return args[0].constructor()(args[0].local)
        raise _untracked_error()


def _version(value: Tensor) -> int:
    # Inference tensors have no version counter.
    return 0 if value.is_inference() else value._version


def gather_nested(values: Any) -> Any:
    """Replace split tensors with full tensors in a pytree, and in the attributes of its objects.

    Collective if any tensor is split.
    """
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
        value = getattr(leaf, name, None)
        if any(isinstance(each, SequenceShard) for each in pytree.tree_leaves(value)):
            object.__setattr__(leaf, name, gather_nested(value))
    return leaf


def _refuse_gradient(grad: Tensor) -> None:
    raise _untracked_error()


def _untracked_error() -> UsageError:
    return UsageError(
        "A tensor that is split by tokens (--sequence-parallel) went into a "
        "torch.autograd.Function, which cannot run on a part. For checkpointing, write "
        "use_reentrant=False. For a layer that computes token by token, name its module in "
        'tensor_plan: {"blocks.*.norm": "sequence_parallel"}. For register_full_backward_hook, '
        "register a hook on the tensor that forward returns. Otherwise start without "
        "--sequence-parallel."
    )


def _apply(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func`, which has SequenceShards among its arguments."""
    if func in METADATA:
        return func(*args, **kwargs)
    if func in GRAPH:
        return func(args[0].local, *args[1:], **kwargs)
    # Register on the part, because the wrapper itself never receives a gradient.
    if func is Tensor.register_hook:
        return args[0].local.register_hook(_GradientHook(args[1], args[0].constructor()))
    if func is Tensor.requires_grad_:
        return args[0].like(func(args[0].local, *args[1:], **kwargs))
    if func in UNTRACKED_WRITES:
        raise UsageError(
            f"{getattr(func, '__qualname__', func)} does not work on a tensor that is split by "
            "tokens (--sequence-parallel). Create a new tensor, or start without "
            "--sequence-parallel."
        )
    # The remaining functions run on parts if they are token-wise, otherwise on full tensors.
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tokens = next(leaf for leaf in leaves if isinstance(leaf, SequenceShard))
    if func in CASTS_LIKE and not isinstance(args[0], SequenceShard):
        # x.type_as(tokens) uses only the dtype and device of its argument.
        return func(
            args[0], *(leaf.local if isinstance(leaf, SequenceShard) else leaf for leaf in args[1:])
        )
    if not tokens.randomness.in_region and is_token_wise(
        func, args, kwargs, _is_tensor, _is_writable_shard
    ):
        local_leaves = _local_arguments(tokens, leaves, casts=func in CASTS_LIKE)
        if local_leaves is not None:
            local_args, local_kwargs = pytree.tree_unflatten(local_leaves, spec)
            # Each rank has different tokens, which need a different dropout mask, so draw per rank.
            is_random = (
                func is F.dropout and kwargs.get("training", True) and kwargs.get("p", 0.5) > 0
            )
            with tokens.randomness.region() if is_random else nullcontext():
                result = func(*local_args, **local_kwargs)
            if func in ELEMENTWISE_IN_PLACE:
                return args[0]  # torch returns the caller's object too
            if has_same_tokens(result, tokens.local):
                return tokens.like(result)
    return _call_on_full(func, leaves, spec)


def _call_on_full(func: Callable[..., Any], leaves: Sequence[Any], spec: pytree.TreeSpec) -> Any:
    """Call `func` with full tensors.

    If its result contains one of these full tensors, return the SequenceShard instead.
    """
    # The result may contain an argument, and the caller must get its own object back. The id of the
    # full tensor identifies it.
    shards_by_id = {}
    for leaf in leaves:
        if isinstance(leaf, SequenceShard):
            shards_by_id[id(leaf.full())] = leaf
    args, kwargs = pytree.tree_unflatten(
        [leaf.full() if isinstance(leaf, SequenceShard) else leaf for leaf in leaves], spec
    )
    return pytree.tree_map(lambda value: shards_by_id.get(id(value), value), func(*args, **kwargs))


class _GradientHook:
    """Calls a user's gradient hook with a SequenceShard, given the gradient of this rank's part."""

    def __init__(
        self, hook: Callable[[Tensor], Any], constructor: Callable[[Tensor], Tensor]
    ) -> None:
        self._hook = hook
        self._constructor = constructor

    def __call__(self, grad: Tensor) -> Tensor | None:
        grad_shard = self._constructor(grad)
        assert isinstance(grad_shard, SequenceShard)
        result = self._hook(grad_shard)
        if result is None:
            return None
        return (
            result.local
            if isinstance(result, SequenceShard)
            else scatter_to_region(result, grad_shard.group, grad_shard.sharded)
        )


def has_same_tokens(result: Any, tokens: Tensor) -> bool:
    """Return whether `result` is a tensor with the same number of tokens as `tokens`."""
    return (
        isinstance(result, Tensor)
        and result.ndim >= 2
        and result.shape[TOKEN_DIM] == tokens.shape[TOKEN_DIM]
        and result.device == tokens.device
    )


def is_token_wise(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    is_tensor: Callable[[Any], bool],
    is_split: Callable[..., bool],
) -> bool:
    """Return whether `func` computes each token from that token's values only.

    `is_split(argument, write=True)` returns whether an argument is split, and its part may be
    written.
    """
    if kwargs.get("out") is not None or not (args and is_tensor(args[0])):
        return False
    if func in ELEMENTWISE_IN_PLACE or kwargs.get("inplace"):
        return is_split(args[0], write=True)
    if func in ELEMENTWISE:
        return True
    if not is_split(args[0]):
        return False
    second = args[1] if len(args) > 1 else None
    if func in NORMS:
        shape = kwargs.get("normalized_shape", second)
        # A norm over more dimensions would mix tokens.
        return isinstance(shape, Sequence) and len(shape) == 1
    if func in FEATURE_REDUCTIONS:
        dim = kwargs.get("dim", second)
        keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
        # Without keepdim, the token dimension would change its position.
        return keepdim is True and dim in (-1, (-1,), [-1])
    return func in CASTS_LIKE


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _is_writable_shard(value: Any, *, write: bool = False) -> bool:
    # If the full tensor exists, a write must go there, so that its views see the change.
    return isinstance(value, SequenceShard) and not (write and value.has_full)


def is_replicated(value: Tensor) -> bool:
    """Return whether `value` has no token dimension, or is broadcast over the tokens."""
    return value.ndim < 2 or value.shape[TOKEN_DIM] == 1


def shard_arguments(tokens: SequenceShard, nest: Any) -> Any:
    """Split the tensors in the pytree `nest` like `tokens`.

    Raises UsageError if that is impossible.
    """
    leaves, spec = pytree.tree_flatten(nest)
    local_leaves = _local_arguments(tokens, leaves)
    if local_leaves is None:
        raise UsageError(
            "The arguments of a module with the style sequence_parallel in tensor_plan have "
            "different numbers of tokens. Pass it tensors with the same number of tokens."
        )
    return pytree.tree_unflatten(local_leaves, spec)


def _local_arguments(
    tokens: SequenceShard, leaves: Sequence[Any], *, casts: bool = False
) -> list[Any] | None:
    """Replace tensors that have tokens with their parts, split like `tokens`.

    Other arguments stay unchanged, but the gradients of any tensors among them are summed over
    ranks. If `casts` is true, plain tensors only provide a dtype and stay unchanged. Returns None
    if a tensor cannot be split like `tokens`.
    """
    arguments: list[Any] = []
    replicated: list[int] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, SequenceShard):
            # Parts of a different length, or from a different replica, do not match token by token.
            if leaf.group is not tokens.group or leaf.sharded != tokens.sharded:
                return None
            arguments.append(leaf.local)
        elif not isinstance(leaf, Tensor) or casts:
            arguments.append(leaf)
        elif is_replicated(leaf):
            if leaf.requires_grad and torch.is_grad_enabled():
                replicated.append(place)
            arguments.append(leaf)
        elif leaf.shape[TOKEN_DIM] == tokens.sharded.size:
            arguments.append(scatter_to_region(leaf, tokens.group, tokens.sharded))
        else:
            return None
    # A single all-reduce sums the gradients of all replicated tensors.
    if replicated:
        copies = copy_to_region(tokens.group, *(arguments[place] for place in replicated))
        for place, value in zip(replicated, copies, strict=True):
            arguments[place] = value
    return arguments
