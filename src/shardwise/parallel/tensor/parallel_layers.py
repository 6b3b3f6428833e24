"""Defines the classes of split modules.

A split module keeps its name and attributes. Copies and pickles of a split module have its unsplit
class. While full parameters are gathered (`Replica.is_whole`), it runs the unsplit `forward`.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.errors import UsageError
from shardwise.layout.bucket_layout import Span
from shardwise.parallel.tensor import graph_paths
from shardwise.parallel.tensor.graph_paths import AllowedOperations
from shardwise.parallel.tensor.region_collectives import (
    ShardedDim,
    copy_to_region,
    is_fake,
)
from shardwise.parallel.tensor.replica import Replica
from shardwise.parallel.tensor.sequence_parallel import SequenceShard, shard_arguments

on_local_tensors = torch._C.DisableTorchFunctionSubclass
"""Context manager that makes every use of a parameter refer to this rank's part."""


class TensorParallelModule(nn.Module):
    """Base class of modules of which each rank has one part.

    `_size_attributes` maps attributes that depend on the size (out_features, num_heads) to their
    values for the full module and for this rank's part.
    """

    _unsplit_class: type[nn.Module]
    _replica: Replica
    _size_attributes: Mapping[str, tuple[Any, Any]]

    def set_sizes(self, *, whole: bool) -> None:
        """Set the size attributes for the full module (if `whole`) or for this rank's part."""
        for name, (of_whole, of_part) in self._size_attributes.items():
            setattr(self, name, of_whole if whole else of_part)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._refuse("state_dict()", "to read or copy whole tensors")
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._refuse("load_state_dict()", "with write=True")
        super()._load_from_state_dict(*args, **kwargs)

    def _refuse(self, call: str, how: str) -> None:
        """Raise UsageError unless the full parameters are gathered."""
        if not self._replica.is_whole:
            raise UsageError(
                f"{call} of a split {self._unsplit_class.__name__} is not possible: this rank has "
                f"only a part of it. Inside with engine.full_parameters(), {how}; engine.save and "
                "engine.export write whole models."
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse("A copy", "to read or copy whole tensors")
        # Unpickle as the unsplit class, because the split class exists only in this process.
        reduced = list(super().__reduce_ex__(protocol))
        reduced[:2] = copyreg._reconstructor, (self._unsplit_class, object, None)  # type: ignore[attr-defined]
        reduced[2] = {k: v for k, v in dict(reduced[2]).items() if k not in _OWN_ATTRIBUTES}
        return tuple(reduced)


_OWN_ATTRIBUTES = ("_replica", "_size_attributes", "_gather_output", "ranges", "allowed_operations")


class ColwiseParallel(TensorParallelModule):
    """A linear layer split by output features."""

    takes_whole = True
    """True if the input is the same on all ranks."""

    _gather_output: bool
    """True if `forward` gathers the output."""
    ranges: Sequence[Span]
    """The range of output features on each rank."""

    def forward(self, value: Tensor) -> Tensor:
        """Compute this rank's output features, or all features if the output is gathered.

        `value`, (..., in_features), is identical on all ranks or split by tokens.
        """
        replica = self._replica
        if replica.is_whole:
            return super().forward(value)  # type: ignore[no-any-return]
        if self._gather_output:
            return replica.gather_output(value, self._run_local, ShardedDim(-1, self.ranges))
        return replica.enter_region(value, self._run_local)

    def _run_local(self, whole: Tensor) -> Tensor:
        with on_local_tensors():
            return super().forward(whole)  # type: ignore[no-any-return]


class RowwiseParallel(TensorParallelModule):
    """A linear layer split by input features. Its bias is added once, to the sum over ranks."""

    weight: Tensor
    bias: Tensor | None
    allowed_operations: AllowedOperations | None
    """The operations allowed before the module if a trial accepted the split, otherwise None."""

    def forward(self, value: Tensor) -> Tensor:
        """Compute the output, summed over ranks.

        `value` has shape (..., in_features of this rank).
        """
        replica = self._replica
        if replica.is_whole:
            return super().forward(value)  # type: ignore[no-any-return]
        allowed = self.allowed_operations
        if allowed is not None and not replica.in_graph:
            if replica.graph_left_region_open:
                raise graph_paths.split_graph_error()
            allowed.check(value, replica.region_starts)
        number = -1 if allowed is None else allowed.number
        whole = replica.leave_region(lambda: self._multiply(value), allowed=number)
        # Add the bias after the sum, which must include it only once. Use the product's dtype,
        # which autocast may have chosen.
        return whole if self.bias is None else whole + self.bias.to(whole.dtype)

    def _multiply(self, value: Tensor) -> Tensor:
        with on_local_tensors():
            if has_columns(self._unsplit_class):
                return value @ self.weight
            return F.linear(value, self.weight)


class VocabParallelEmbedding(TensorParallelModule):
    """An embedding split by its vocabulary."""

    weight: Tensor
    padding_idx: int | None
    ranges: Sequence[Span]
    """The range of rows on each rank."""

    def forward(self, numbers: Tensor) -> Tensor:
        """Look up the indices `numbers` in the full vocabulary.

        `numbers` may have any shape, and must be identical on all ranks.
        """
        replica = self._replica
        if replica.is_whole:
            return super().forward(numbers)  # type: ignore[no-any-return]
        check_in_range(numbers, self.ranges[-1][1], "index out of range in self")
        first, end = self.ranges[replica.group.rank]
        elsewhere = (numbers < first) | (numbers >= end)
        # The row at padding_idx receives no gradient. Only the rank that has this row may pass its
        # index.
        padding = self.padding_idx
        if padding is not None:
            padding = padding - first if first <= padding < end else None
        # Each rank looks up its own rows and uses zeros for all others. Exactly one rank
        # contributes to each row, so the sum over ranks is the embedding.
        rows = F.embedding((numbers - first).masked_fill(elsewhere, 0), self.weight, padding)
        return replica.reduce_output(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0))


class SequenceParallelModule(TensorParallelModule):
    """A module that computes each token separately, such as a norm.

    If its input is split by tokens, the module runs on this rank's tokens.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute outputs of shape (..., tokens, features) for the input's tokens."""
        if self._replica.in_graph:  # compiled_sequences.py splits its operations
            return super().forward(*args, **kwargs)
        shards = (
            each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, SequenceShard)
        )
        tokens = next(shards, None)
        if tokens is None:
            return super().forward(*args, **kwargs)
        args, kwargs = shard_arguments(tokens, (args, kwargs))
        # Every rank has all parameters but only some of the tokens, so gradients must be summed
        # over ranks. The backward pass of these copies does that.
        before = dict(self._parameters)
        trained = {k: p for k, p in before.items() if p is not None and p.requires_grad}
        if trained and torch.is_grad_enabled():
            shared = copy_to_region(self._replica.group, *trained.values())
            self._parameters.update(zip(trained, shared, strict=True))  # type: ignore[arg-type]
        try:
            # Dropout inside must draw differently on each rank, because each rank has different
            # tokens.
            with tokens.randomness.region() if self.training else nullcontext():
                output = super().forward(*args, **kwargs)
        finally:
            self._parameters.update(before)
        return pytree.tree_map_only(Tensor, tokens.like, output)

    def _refuse(self, call: str, how: str) -> None:
        """No-op: every rank has the full module."""


class LocalModule(TensorParallelModule):
    """A module between split layers whose own `forward` also works on this rank's part."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # If no parameter is split, the context manager is not needed. The compiler cannot inspect
        # the classes.
        own = self._replica.in_graph or any(
            getattr(type(p), "is_split", False) for p in self._parameters.values()
        )
        with on_local_tensors() if own else nullcontext():
            return super().forward(*args, **kwargs)


def check_in_range(numbers: Tensor, count: int, text: str) -> None:
    """Raise IndexError, as torch does, unless all `numbers` (any shape) are in [0, count).

    On an accelerator, a device-side assertion fails instead, so that the host does not synchronise.
    """
    if is_fake(numbers):
        return
    # Without this check, all ranks would mask an invalid index, and the result would be zeros.
    within = ((numbers >= 0) & (numbers < count)).all()
    if numbers.device.type != "cpu":
        torch._assert_async(within, text)
    elif not within:
        raise IndexError(f"{text}: from {numbers.min()} to {numbers.max()}, of {count}")


def has_columns(unsplit: type[nn.Module]) -> bool:
    """Return whether a class stores its weight as (in_features, out_features), like Conv1D."""
    return unsplit.__name__ == "Conv1D" and not issubclass(unsplit, nn.modules.conv._ConvNd)


_classes: dict[tuple[type[nn.Module], type[TensorParallelModule]], type[TensorParallelModule]] = {}


def _tensor_parallel_class(
    unsplit: type[nn.Module], style: type[TensorParallelModule]
) -> type[TensorParallelModule]:
    """Return the class that splits modules of class `unsplit` in the style `style`."""
    # Create each class only once, because scripts compare the classes of modules.
    if (unsplit, style) not in _classes:
        fields = {"_unsplit_class": unsplit, "__module__": unsplit.__module__}
        _classes[unsplit, style] = type(unsplit.__name__, (style, unsplit), fields)
    return _classes[unsplit, style]


def make_tensor_parallel(
    module: nn.Module,
    style: type[TensorParallelModule],
    replica: Replica,
    local: Mapping[str, Any],
    ranges: Sequence[Span] | None = None,
    *,
    gather_output: bool = False,
    allowed: AllowedOperations | None = None,
) -> None:
    """Change the class of `module` to its split counterpart.

    Args:
        module: The module, whose parameters are already split.
        style: The class that determines how it is split.
        replica: The ranks that share the module.
        local: Values for this rank's attributes, such as out_features.
        ranges: The range on each rank, for example of output features.
        gather_output: True if `forward` gathers the output.
        allowed: The operations allowed before the module if a trial accepted the split, or None.
    """
    pairs = {name: (getattr(module, name), value) for name, value in local.items()}
    # Change the object's class rather than replacing the object, because the user, optimizers and
    # hooks hold references to it.
    module.__class__ = _tensor_parallel_class(type(module), style)
    module.__dict__.update({"_replica": replica, "_size_attributes": pairs, "ranges": ranges})
    module.__dict__.update({"_gather_output": gather_output, "allowed_operations": allowed})
    assert isinstance(module, TensorParallelModule)
    module.set_sizes(whole=False)


def restore(module: TensorParallelModule) -> None:
    """Undo `make_tensor_parallel`."""
    module.set_sizes(whole=True)
    module.__class__ = module._unsplit_class  # type: ignore[assignment]
    for name in _OWN_ATTRIBUTES:
        module.__dict__.pop(name, None)
