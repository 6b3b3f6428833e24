"""Describes attention modules and splits them by heads."""

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
    """How a module attends, so that its heads can be split over ranks.

    qkv: the names of its linear maps to queries, keys and values; or of the one that makes all,
    in this order. out: that of the map after. heads: the attribute with the number of heads, or
    that number; kv_heads the same of keys and values where they are fewer. A head's number must
    be taken from there in forward, or not at all (`view(..., -1, head_dim)`). `widths`: further
    attributes that hold the width of all heads together, such as GPT-2's split_size.
    """

    qkv: str | tuple[str, str, str]
    out: str
    heads: str | int
    kv_heads: str | int | None = None
    widths: tuple[str, ...] = ()
    per_head: tuple[str, ...] = ()
    """Embeddings of one number for each head, such as T5's relative_attention_bias."""

    def __post_init__(self) -> None:
        """Raise ModelError for names that are not one map's, or three maps'."""
        names = (self.qkv,) * 3 if isinstance(self.qkv, str) else tuple(self.qkv)
        if len(names) != 3 or not all(isinstance(name, str) for name in names):
            one = f"qkv={names[0]!r}" if len(names) == 1 else 'qkv="c_attn"'
            raise ModelError(
                "sw.Attention(qkv=...) takes the names of the maps to queries, keys and values, "
                f"three of them, or as a string that of the one that makes all ({one}), not "
                f"{self.qkv!r}."
            )

    @property
    def maps(self) -> tuple[str, ...]:
        """The names of all linear maps."""
        return (*((self.qkv,) if isinstance(self.qkv, str) else self.qkv), self.out)


def split_attention(name: str, module: nn.Module, how: Attention, parts: int) -> SplitGroup:
    """Split attention `name` into `parts`, each with whole heads; queries stay with their keys.

    Raises ModelError for fewer heads than parts.
    """
    heads = _number(name, module, how.heads)
    kv_heads = heads if how.kv_heads is None else _number(name, module, how.kv_heads)
    of_kv = split_rules.even_split(f"{name} of {kv_heads} heads", kv_heads, parts)
    of_heads = [_scaled(each, heads // kv_heads) for each in of_kv]
    out = _child(name, module, how.out)
    head_dim = split_rules.widths(out)[0] // heads
    group = SplitGroup("attention", name)
    if isinstance(how.qkv, str):
        fused = _child(name, module, how.qkv)
        query, key = heads * head_dim, kv_heads * head_dim
        ranges = [
            (
                *_scaled(mine, head_dim),
                *_shifted(_scaled(kv, head_dim), query),
                *_shifted(_scaled(kv, head_dim), query + key),
            )
            for mine, kv in zip(of_heads, of_kv, strict=True)
        ]
        if split_rules.widths(fused)[1] != query + 2 * key:
            raise ModelError(
                f"{name}.{how.qkv} makes {split_rules.widths(fused)[1]} features, and queries, "
                f"keys and values of {heads} heads of {head_dim} are {query + 2 * key}."
            )
        group.splits.append(split_rules.colwise(f"{name}.{how.qkv}", fused, ranges))
    else:
        for child, mine in zip(how.qkv, (of_heads, of_kv, of_kv), strict=True):
            linear = _child(name, module, child)
            each = split_rules.widths(linear)[1] // (heads if mine is of_heads else kv_heads)
            ranges = [_scaled(part, each) for part in mine]
            group.splits.append(split_rules.colwise(f"{name}.{child}", linear, ranges))
    rows = [_scaled(part, head_dim) for part in of_heads]
    group.splits.append(split_rules.rowwise(f"{name}.{how.out}", out, rows))
    for child in how.per_head:
        if (table := module._modules.get(child)) is not None:
            tensors = {"weight": (1, of_heads)}
            group.splits.append(
                split_rules.local_module(f"{name}.{child}", table, tensors, [{}] * parts)
            )
    local: list[dict[str, Any]] = [
        {width: getattr(module, width) // heads * range_length(part) for width in how.widths}
        for part in of_heads
    ]
    for attribute, several in ((how.heads, of_heads), (how.kv_heads, of_kv)):
        if isinstance(attribute, str) and "." not in attribute:  # a config tells of the whole
            for own, part in zip(local, several, strict=True):
                own[attribute] = range_length(part)
    if any(local):
        group.splits.append(split_rules.local_module(name, module, {}, local))
    return group


def _number(name: str, module: nn.Module, given: str | int) -> int:
    value: Any = given
    if isinstance(given, str):
        value = module
        for each in given.split("."):
            value = getattr(value, each, None)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{name} has no number of heads called {given!r}: it is {value!r}.")
    return value


def _child(name: str, module: nn.Module, child: str) -> nn.Module:
    found: Any = module
    for part in child.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, nn.Module) or not split_rules.is_linear(found):
        raise ModelError(
            f"{name} has no linear map called {child!r}: name it in sw.Attention(...)."
        )
    return found


def _scaled(ranges: Ranges, by: int) -> Ranges:
    return tuple((first * by, end * by) for first, end in ranges)


def _shifted(ranges: Ranges, by: int) -> Ranges:
    return tuple((first + by, end + by) for first, end in ranges)
