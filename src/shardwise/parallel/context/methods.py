"""Computes attention on parts of sequences, with one of two methods.

    ulysses    each rank computes full sequences for some heads: bit-identical to a single process
    gathered   each rank computes its queries with the keys and values of full sequences (the
               method of Llama 3, Meta 2024): equal up to rounding, for any number of heads

A mask has the shape (rows, heads, queries, keys). Rows and heads may be 1. The model may pass key
masks or query-key masks that came with the batch:

    queries  keys
    1        own      this rank's keys
    own      total    this rank's queries, all keys
    total    total    the full mask
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.parallel.context.compiled_exchange import Group
from shardwise.parallel.context.token_exchange import CausalShares, gather, to_heads, to_parts


@dataclass(frozen=True)
class AttentionCall:
    """A call of scaled_dot_product_attention with this rank's part of the sequences.

    query, key, value   (rows, heads, own length, features); key and value may have fewer heads
    mask                up to 4 dimensions (see the module's docstring), or None
    dropout             the probability with which a score is dropped
    plain               torch's function
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    scale: float | None
    plain: Callable[..., Any]

    prefers_heads: ClassVar[bool] = False
    """True to choose "ulysses" if it is possible, also if it sends more bytes."""

    def problem(self) -> str | None:
        """Return a message saying why a call without a mask is unsupported, or None."""
        return None

    def with_heads(self) -> AttentionCall:
        """Return this call with a head dimension of size 1 added to its tensors."""
        query, key, value = (each.unsqueeze(1) for each in (self.query, self.key, self.value))
        mask = self.mask
        if mask is not None and mask.ndim == 3:
            mask = mask.unsqueeze(1)
        return replace(self, query=query, key=key, value=value, mask=mask)

    def with_wide_mask(self) -> AttentionCall:
        """Return this call with its mask expanded to 4 dimensions."""
        if self.mask is None:
            return self
        return replace(self, mask=self.mask[(None,) * (4 - self.mask.ndim)])

    def compute(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Any:
        """Run torch's function with this call's options. A mask replaces `is_causal`."""
        return self.plain(
            query,
            key,
            value,
            attn_mask=mask,
            # Ranks compute different scores, so each draws its own random numbers for them.
            dropout_p=self.dropout,
            is_causal=self.is_causal and mask is None,
            scale=self.scale,
            # Also for a single head of keys, which torch would broadcast without this option.
            enable_gqa=query.size(1) != key.size(1),
        )


class CausalBiases:
    """The masks of the last causal chunks that a rank computed, which all layers share."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Tensor] = {}

    def clear(self) -> None:
        """Free the masks."""
        self._known.clear()

    def of(self, query: Tensor, first: int, end: int) -> Tensor:
        """Return the `causal_bias` of `query`."""
        if torch.compiler.is_compiling():  # a graph computes its own
            return causal_bias(query, first, end)
        # `plan` has several modes of fake tensors, which must not meet.
        place = first, end, query.dtype, query.device, getattr(query, "fake_mode", None)
        if place not in self._known:
            if len(self._known) > 1:  # a rank computes two chunks
                self.clear()
            with torch.inference_mode(mode=False):  # also used in training
                self._known[place] = causal_bias(query, first, end)
        return self._known[place]


def causal_bias(query: Tensor, first: int, end: int) -> Tensor:
    """Return a mask (end - first, end) for the queries of tokens `first` to `end`.

    The queries are the last of their keys' tokens, but torch's `is_causal` would align them with
    the first. The mask is added to scores, because torch would convert a mask of bools, and keep
    the result for the backward pass, in each layer.
    """
    size, device = (end - first, end), query.device
    allowed = torch.ones(size, dtype=torch.bool, device=device).tril(first)
    bias = torch.zeros(size, dtype=query.dtype, device=device)
    return bias.masked_fill(~allowed, -torch.inf)


def attend(
    call: AttentionCall,
    lengths: Sequence[int],
    group: Group,
    method: str,
    biases: CausalBiases,
) -> Any:
    """Compute attention for this rank's queries. Differentiable and collective.

    Args:
        call: The call on this rank.
        lengths: The length of each rank's part.
        group: The ranks, in the order of the parts.
        method: "ulysses" or "gathered".
        biases: The masks that calls share.

    Returns:
        The result of `call.compute`, (rows, heads, own length, features), or a nest of them.
    """
    if method == "ulysses":
        return _by_heads(call, lengths, group)
    return _by_gathering(call, lengths, group, biases)


def bytes_sent(call: AttentionCall, lengths: Sequence[int], method: str) -> float:
    """Return the number of bytes that a rank sends for a forward and a backward pass of `call`.

    The number is a mean over the ranks, and the same on all of them. It includes the bytes that a
    rank sends to itself. Masks are sent in the forward pass only.

    Args:
        call: The call on this rank, with a wide mask.
        lengths: The length of each rank's part.
        method: "ulysses" or "gathered".
    """
    total, size = sum(lengths), len(lengths)
    query, key, value, mask = call.query, call.key, call.value, call.mask
    rows, heads = query.size(0), query.size(1)
    # The features of one token.
    queries, results = heads * query.size(3), heads * value.size(3)
    keys = key.size(1) * (key.size(3) + value.size(3))
    if method == "ulysses":
        copies = size // gcd(key.size(1), size)
        features = (queries + results + copies * keys) / size
    elif mask is None and call.is_causal:
        features = keys + (queries + results) / size
    else:
        features = float(keys)
    both_passes = 2 * rows * total * features * query.element_size()
    if mask is None:
        return both_passes
    width = mask.size(0) * mask.size(1) * mask.element_size()
    if mask.size(3) != total and mask.size(3) > 1:  # keys of a part
        return both_passes + width * mask.size(2) * total
    if method == "ulysses" and mask.size(2) not in (1, total):  # queries of a part
        pairs = total * mask.size(3)
        return both_passes + width * (pairs / size if mask.size(1) > 1 else pairs)
    return both_passes


def costs(call: AttentionCall, lengths: Sequence[int]) -> dict[str, float]:
    """Map each method that can compute `call` to the bytes that it sends (see `bytes_sent`)."""
    divides = call.query.size(1) % len(lengths) == 0
    methods = ("ulysses", "gathered") if divides else ("gathered",)
    return {method: bytes_sent(call, lengths, method) for method in methods}


def _by_heads(call: AttentionCall, lengths: Sequence[int], group: Group) -> Any:
    q, k, v = whole_heads([call.query, call.key, call.value], lengths, group)
    mask = None if call.mask is None else mask_of_heads(call.mask, lengths, group)
    result = call.compute(q, k, v, mask)
    return pytree.tree_map_only(Tensor, lambda whole: to_parts(whole, lengths, group), result)


def whole_heads(parts: Sequence[Tensor], lengths: Sequence[int], group: Group) -> list[Tensor]:
    """Return queries, keys and values of full sequences for this rank's heads.

    Args:
        parts: Tensors (rows, heads, own length, features).
        lengths: The length of each rank's part.
        group: The ranks, in the order of the parts.
    """
    repeated = []
    for part in parts:
        # Repeat K/V heads until every rank has equally many. Autograd adds their gradients.
        copies = group.size // gcd(part.size(1), group.size)
        repeated.append(part.repeat_interleave(copies, 1) if copies > 1 else part)
    return to_heads(repeated, lengths, group)


def mask_of_heads(mask: Tensor, lengths: Sequence[int], group: Group) -> Tensor:
    """Return the full sequences' mask for this rank's heads."""
    own = lengths[group.rank]
    if mask.size(2) == own:
        if mask.size(1) > 1:
            numbers = mask.to(torch.uint8) if mask.dtype == torch.bool else mask
            (received,) = to_heads([numbers], lengths, group)
            return received.to(mask.dtype)
        return gather(mask, 2, lengths, group)
    if mask.size(3) == own:
        mask = gather(mask, 3, lengths, group)
    if mask.size(1) > 1:
        each = mask.size(1) // group.size
        return mask.narrow(1, group.rank * each, each)
    return mask


def _by_gathering(
    call: AttentionCall, lengths: Sequence[int], group: Group, biases: CausalBiases
) -> Any:
    widths = [call.key.size(3), call.value.size(3)]
    both = gather(torch.cat([call.key, call.value], 3), 2, lengths, group)
    key, value = torch.split(both, widths, 3)
    if call.mask is None and call.is_causal:
        shares = CausalShares(lengths, group)
        results = []
        for query, (first, end) in zip(shares.spread(call.query), shares.chunks, strict=True):
            bias = biases.of(query, first, end)
            results.append(call.compute(query, key[:, :, :end], value[:, :, :end], bias))
        return shares.collect(results)
    mask = None if call.mask is None else _mask_of_queries(call.mask, lengths, group)
    return call.compute(call.query, key, value, mask)


def _mask_of_queries(mask: Tensor, lengths: Sequence[int], group: Group) -> Tensor:
    """Return the mask for this rank's queries and all keys."""
    own, total = lengths[group.rank], sum(lengths)
    if mask.size(3) == own and mask.size(2) == 1:
        return gather(mask, 3, lengths, group)
    if mask.size(2) == total:
        return mask.narrow(2, sum(lengths[: group.rank]), own)
    return mask
