"""What the class of a split module becomes; its names and what hangs on it stay as they are.

Copies and pickles of a split module are of the plain class again. While parameters are whole for a
time (`Replica.is_whole`) its forward is the plain one.
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
from shardwise.parallel.tensor.graph_paths import Path
from shardwise.parallel.tensor.regions import Parts, apart, gathered, is_stand_in
from shardwise.parallel.tensor.replica import Replica
from shardwise.parallel.tensor.sequence_parallel import Tokens, bring_to_parts
from shardwise.shards import Range

straight = torch._C.DisableTorchFunctionSubclass
"""Inside this block parameters are what this rank has of them, whoever computes with them."""


class SplitModule(nn.Module):
    """A module of which each rank has a part.

    `_locals` are attributes that tell of its size (out_features, num_heads), by name as they are
    of the whole and of this rank's part.
    """

    _plain: type[nn.Module]
    _replica: Replica
    _locals: Mapping[str, tuple[Any, Any]]

    def show(self, *, whole: bool) -> None:
        """Let the attributes tell of the whole, or of this rank's part."""
        for name, (of_whole, of_part) in self._locals.items():
            setattr(self, name, of_whole if whole else of_part)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._refuse("state_dict()", "to read or copy whole tensors")
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._refuse("load_state_dict()", "with write=True")
        super()._load_from_state_dict(*args, **kwargs)

    def _refuse(self, call: str, how: str) -> None:
        """Raise UsageError unless parameters are whole now."""
        if not self._replica.is_whole:
            raise UsageError(
                f"{call} of a split {self._plain.__name__}: this rank has a part of it only. "
                f"Inside with engine.full_parameters(), {how}; engine.save and engine.export write "
                "whole models."
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse("A copy", "to read or copy whole tensors")
        reduced = list(super().__reduce_ex__(protocol))
        reduced[:2] = copyreg._reconstructor, (self._plain, object, None)  # type: ignore[attr-defined]
        reduced[2] = {k: v for k, v in dict(reduced[2]).items() if k not in _OWN}
        return tuple(reduced)


_OWN = ("_replica", "_locals", "_gathers", "ranges", "path")


class Colwise(SplitModule):
    """A linear map whose output features are split."""

    takes_whole = True
    """Whether what goes in is the same on all ranks."""

    _gathers: bool
    """Whether the output is put together."""
    ranges: Sequence[Range]
    """By rank its output features."""

    def forward(self, value: Tensor) -> Tensor:
        """value: (..., in_features), of which all ranks have the same, or each some tokens."""
        replica = self._replica
        if replica.is_whole:
            return super().forward(value)  # type: ignore[no-any-return]
        if self._gathers:
            part = replica.opened(value).given_to(self._of_part)
            return gathered(part, replica.group, Parts(-1, self.ranges))
        return replica.enter(value, self._of_part)

    def _of_part(self, whole: Tensor) -> Tensor:
        with straight():
            return super().forward(whole)  # type: ignore[no-any-return]


class Rowwise(SplitModule):
    """A linear map whose input features are split; its bias is added once, to the sum."""

    weight: Tensor
    bias: Tensor | None
    path: Path | None
    """What may stand before it, where that was tried."""

    def forward(self, value: Tensor) -> Tensor:
        """value: (..., this rank's in_features)."""
        replica = self._replica
        if replica.is_whole:
            return super().forward(value)  # type: ignore[no-any-return]
        if self.path is not None:
            self.path.check(value, replica.begun)
        columns = has_columns(self._plain)
        whole = replica.leave(
            lambda: value @ self.weight if columns else F.linear(value, self.weight)
        )
        # In the dtype of the product, which autocast may have chosen.
        return whole if self.bias is None else whole + self.bias.to(whole.dtype)


class SplitEmbedding(SplitModule):
    """An embedding of which each rank has the rows of a part of the vocabulary."""

    weight: Tensor
    padding_idx: int | None
    ranges: Sequence[Range]
    """By rank its rows."""

    def forward(self, numbers: Tensor) -> Tensor:
        """numbers: any shape, of the whole vocabulary, alike on all ranks."""
        replica = self._replica
        if replica.is_whole:
            return super().forward(numbers)  # type: ignore[no-any-return]
        check_within(numbers, self.ranges[-1][1], "index out of range in self")
        first, end = self.ranges[replica.group.rank]
        elsewhere = (numbers < first) | (numbers >= end)
        padding = self.padding_idx
        if padding is not None:
            padding = padding - first if first <= padding < end else None
        rows = F.embedding((numbers - first).masked_fill(elsewhere, 0), self.weight, padding)
        return replica.closed(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0))


class OnTokens(SplitModule):
    """A module that computes token by token, such as a norm: on this rank's tokens, where its
    input is in parts."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Of tensors (..., tokens, features); those that it gives have the same tokens."""
        found = (each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tokens))
        tokens = next(found, None)
        if tokens is None:
            return super().forward(*args, **kwargs)
        args, kwargs = bring_to_parts(tokens, (args, kwargs))
        before = dict(self._parameters)
        trained = {k: p for k, p in before.items() if p is not None and p.requires_grad}
        if trained and torch.is_grad_enabled():
            shared = apart(self._replica.group, *trained.values())
            self._parameters.update(zip(trained, shared, strict=True))  # type: ignore[arg-type]
        try:
            with tokens.draws.own() if self.training else nullcontext():
                made = super().forward(*args, **kwargs)
        finally:
            self._parameters.update(before)
        return pytree.tree_map_only(Tensor, tokens.like, made)

    def _refuse(self, call: str, how: str) -> None:
        """Every rank has all of it."""


class Part(SplitModule):
    """A module inside a split region, which computes with its part as the plain one would."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the plain one."""
        own = any(getattr(type(p), "is_split", False) for p in self._parameters.values())
        with straight() if own else nullcontext():
            return super().forward(*args, **kwargs)


def check_within(numbers: Tensor, count: int, text: str) -> None:
    """Raise IndexError, as torch does, where `numbers` (any shape) are not all of 0 to `count` - 1;
    on an accelerator its assertion fails instead, and nothing waits for it."""
    if is_stand_in(numbers):
        return
    within = ((numbers >= 0) & (numbers < count)).all()
    if numbers.device.type != "cpu":
        torch._assert_async(within, text)
    elif not within:
        raise IndexError(f"{text}: from {numbers.min()} to {numbers.max()}, of {count}")


def has_columns(plain: type[nn.Module]) -> bool:
    """Whether `plain` keeps its weight as (in_features, out_features), as GPT-2's Conv1D does."""
    return plain.__name__ == "Conv1D" and not issubclass(plain, nn.modules.conv._ConvNd)


_classes: dict[tuple[type[nn.Module], type[SplitModule]], type[SplitModule]] = {}


def _split_class(plain: type[nn.Module], style: type[SplitModule]) -> type[SplitModule]:
    """One class for each pair, so that modules of one class stay so."""
    if (plain, style) not in _classes:
        fields = {"_plain": plain, "__module__": plain.__module__}
        _classes[plain, style] = type(plain.__name__, (style, plain), fields)
    return _classes[plain, style]


def become(
    module: nn.Module,
    style: type[SplitModule],
    replica: Replica,
    local: Mapping[str, Any],
    ranges: Sequence[Range] | None = None,
    *,
    gathers: bool = False,
    path: Path | None = None,
) -> None:
    """Let `module` be of `style`; `local` are attributes as they are of this rank's part, `ranges`
    what each rank has, which is put together where it `gathers`, `path` what may stand before."""
    pairs = {name: (getattr(module, name), value) for name, value in local.items()}
    module.__class__ = _split_class(type(module), style)
    module.__dict__.update({"_replica": replica, "_locals": pairs, "ranges": ranges})
    module.__dict__.update({"_gathers": gathers, "path": path})
    assert isinstance(module, SplitModule)
    module.show(whole=False)


def restore(module: SplitModule) -> None:
    """Undo `become`."""
    module.show(whole=True)
    module.__class__ = module._plain  # type: ignore[assignment]
    for name in _OWN:
        module.__dict__.pop(name, None)
