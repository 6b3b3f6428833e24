"""Describes custom attention modules, and splits them by heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.errors import ModelError
from shardwise.layout.shards import Ranges
from shardwise.parallel.tensor import split_rules
from shardwise.parallel.tensor.split_rules import SplitGroup, range_length


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Names the parts of a custom attention module, so that its heads can be split over ranks.

    Pass it as a value in the `tensor_plan` of `Engine`. Each rank has only some of the heads, so
    the module's `forward` must either read the number of heads from the attribute `heads`, or not
    use the number at all (`view(..., -1, head_dim)`).

    Args:
        qkv: The names of the three linear layers for queries, keys and values, or the name of a
            single layer that computes all of them in this order.
        out: The name of the linear layer after the attention.
        heads: The number of heads, or the name of the attribute that holds it. An attribute with a
            dotted name such as "config.num_attention_heads" is only read, never changed.
        kv_heads: The number of key and value heads, or the name of its attribute, if it is smaller
            than `heads` (grouped-query attention). Default: `heads`.
        widths: The names of attributes that hold the total width of all heads, such as GPT-2's
            split_size. They are set to the width of this rank's heads.
        per_head: The names of embeddings with one value per head, such as T5's
            relative_attention_bias.

    Raises:
        ModelError: `qkv` is neither one name nor three names.

    Example:
        >>> import shardwise as sw
        >>> attention = sw.Attention(qkv=("wq", "wk", "wv"), out="wo", heads="num_heads")
        >>> plan = {"blocks.*.attention": attention}  # sw.Engine(..., tensor_plan=plan)
    """

    qkv: str | tuple[str, str, str]
    out: str
    heads: str | int
    kv_heads: str | int | None = None
    widths: tuple[str, ...] = ()
    per_head: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = (self.qkv,) * 3 if isinstance(self.qkv, str) else tuple(self.qkv)
        if len(names) != 3 or not all(isinstance(name, str) for name in names):
            one = f"qkv={names[0]!r}" if len(names) == 1 else 'qkv="c_attn"'
            raise ModelError(
                "sw.Attention(qkv=...) takes the three names of the maps to queries, keys and "
                "values, or a string with the name of one map that computes all of them "
                f"({one}), not {self.qkv!r}."
            )

    @property
    def maps(self) -> tuple[str, ...]:
        """The names of all linear layers."""
        return (*((self.qkv,) if isinstance(self.qkv, str) else self.qkv), self.out)


def split_attention(name: str, module: nn.Module, how: Attention, parts: int) -> SplitGroup:
    """Split the attention module `name` by heads into `parts` parts.

    Queries stay on the same rank as their keys. Raises ModelError if there are fewer heads than
    parts.
    """
    heads = _number(name, module, how.heads)
    kv_heads = heads if how.kv_heads is None else _number(name, module, how.kv_heads)
    of_kv = split_rules.even_split(f"{name} of {kv_heads} heads", kv_heads, parts)
    # In grouped-query attention, each key head serves several query heads.
    of_heads = [_scale(each, heads // kv_heads) for each in of_kv]
    out = _child(name, module, how.out)
    # Use the width of the output layer, because the total width of the heads may exceed the model's
    # (T5).
    head_dim = split_rules.widths(out)[0] // heads
    group = SplitGroup("attention", name)
    if isinstance(how.qkv, str):
        fused = _child(name, module, how.qkv)
        query, key = heads * head_dim, kv_heads * head_dim
        # The layer's output features are all queries, then all keys, then all values.
        ranges = [
            (
                *_scale(own, head_dim),
                *_shift(_scale(kv, head_dim), query),
                *_shift(_scale(kv, head_dim), query + key),
            )
            for own, kv in zip(of_heads, of_kv, strict=True)
        ]
        if split_rules.widths(fused)[1] != query + 2 * key:
            raise ModelError(
                f"{name}.{how.qkv} has {split_rules.widths(fused)[1]} output features, but "
                f"queries, keys and values of {heads} heads of width {head_dim} need "
                f"{query + 2 * key}. Correct heads or kv_heads in sw.Attention(...)."
            )
        group.splits.append(split_rules.colwise(f"{name}.{how.qkv}", fused, ranges))
    else:
        for child, own in zip(how.qkv, (of_heads, of_kv, of_kv), strict=True):
            linear = _child(name, module, child)
            each = split_rules.widths(linear)[1] // (heads if own is of_heads else kv_heads)
            ranges = [_scale(part, each) for part in own]
            group.splits.append(split_rules.colwise(f"{name}.{child}", linear, ranges))
    rows = [_scale(part, head_dim) for part in of_heads]
    group.splits.append(split_rules.rowwise(f"{name}.{how.out}", out, rows))
    for child in how.per_head:
        # Only one T5 layer in a stack has the table of relative positions.
        if (table := module._modules.get(child)) is not None:
            tensors = {"weight": (1, of_heads)}
            group.splits.append(
                split_rules.local_module(f"{name}.{child}", table, tensors, [{}] * parts)
            )
    local: list[dict[str, Any]] = [
        {width: getattr(module, width) // heads * range_length(part) for width in how.widths}
        for part in of_heads
    ]
    for attribute, ranges_by_rank in ((how.heads, of_heads), (how.kv_heads, of_kv)):
        # A dotted name belongs to a config, which describes the full model and stays unchanged.
        if isinstance(attribute, str) and "." not in attribute:
            for attributes, part in zip(local, ranges_by_rank, strict=True):
                attributes[attribute] = range_length(part)
    # The module's `forward` reads these attributes, so each rank needs the values for its own
    # heads.
    if any(local):
        group.splits.append(split_rules.local_module(name, module, {}, local))
    return group


def _number(name: str, module: nn.Module, attribute: str | int) -> int:
    value: Any = attribute
    if isinstance(attribute, str):
        value = module
        for each in attribute.split("."):
            value = getattr(value, each, None)
    if not isinstance(value, int) or value < 1:
        raise ModelError(
            f"{name}.{attribute} is {value!r}, not a number of heads. Set heads and kv_heads in "
            "sw.Attention(...)."
        )
    return value


def _child(name: str, module: nn.Module, child: str) -> nn.Module:
    linear: Any = module
    for part in child.split("."):
        linear = getattr(linear, part, None)
    if not isinstance(linear, nn.Module) or not split_rules.is_linear(linear):
        raise ModelError(
            f"{name} has no linear map called {child!r}. Set its name in sw.Attention(...)."
        )
    return linear


def _scale(ranges: Ranges, by: int) -> Ranges:
    return tuple((first * by, end * by) for first, end in ranges)


def _shift(ranges: Ranges, by: int) -> Ranges:
    return tuple((first + by, end + by) for first, end in ranges)
