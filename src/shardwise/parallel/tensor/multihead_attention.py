"""Splits nn.MultiheadAttention modules by heads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import ModelError
from shardwise.layout.bucket_layout import Span
from shardwise.parallel.tensor import split_rules
from shardwise.parallel.tensor.parallel_layers import TensorParallelModule
from shardwise.parallel.tensor.region_collectives import (
    ShardedDim,
    gather_from_region,
    reduce_from_region,
)
from shardwise.parallel.tensor.split_rules import ModuleSplit, SplitGroup


class SplitMultiheadAttention(TensorParallelModule):
    """An nn.MultiheadAttention with only this rank's heads.

    torch's own function derives the total width of all heads from its input, so it cannot compute
    only some of the heads. This class performs the same steps itself: projections,
    scaled_dot_product_attention (or softmax if weights are requested), and the output layer.
    """

    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    _qkv_same_embed_dim: bool
    out_proj: nn.Linear
    in_proj_weight: Tensor
    in_proj_bias: Tensor | None
    ranges: Sequence[Span]
    """The range of heads on each rank."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the same result as nn.MultiheadAttention.forward, with the same shapes and masks.

        Like torch, raises RuntimeError if `is_causal` is true and `attn_mask` is None.
        """
        replica = self._replica
        if replica.is_whole:
            return super().forward(  # type: ignore[no-any-return]
                query, key, value, key_padding_mask, need_weights, attn_mask,
                average_attn_weights, is_causal,
            )  # fmt: skip
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "Need attn_mask if specifying the is_causal hint. Pass "
                "nn.Transformer.generate_square_subsequent_mask(length)."
            )
        batched = query.ndim == 3
        q, k, v = self._project((query, key, value))
        mask = self._mask(q, k, key_padding_mask, attn_mask, batched=batched)
        drop = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            # Compute the scores, (N, heads of this rank, L, S), here, because
            # scaled_dot_product_attention does not return them.
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
            weights = F.softmax(scores if mask is None else scores + mask, -1)
            weights = F.dropout(weights, drop) if drop else weights
            context = weights @ v
        else:
            context = F.scaled_dot_product_attention(q, k, v, mask, drop)
        context = context.transpose(1, 2).flatten(2)
        if not batched:
            context = context.squeeze(0)
        elif not self.batch_first:
            context = context.transpose(0, 1)
        out = replica.leave_region(lambda: F.linear(context, self.out_proj.weight))
        # Add the bias after the sum over ranks, which must include it only once.
        if self.out_proj.bias is not None:
            out = out + self.out_proj.bias.to(out.dtype)
        if weights is not None:
            # (N, heads of this rank, L, S) becomes (N, L, S), or (N, all heads, L, S).
            group, heads = self._replica.group, self.ranges[-1][1]
            if average_attn_weights:
                # Each rank sums over its own heads, and the average is over all heads.
                weights = reduce_from_region(weights.sum(1), group) / heads
            else:
                sharded = ShardedDim(1 - weights.ndim, self.ranges)
                weights = gather_from_region(weights, group, sharded)
            weights = weights if batched else weights.squeeze(0)
        return out, weights

    def _project(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return queries, keys and values, each (N, heads of this rank, length, head_dim)."""
        if self._qkv_same_embed_dim:
            matrices = self.in_proj_weight.chunk(3)
        else:
            names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
            matrices = tuple(getattr(self, name) for name in names)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = []
        for value, matrix, bias in zip(inputs, matrices, biases, strict=True):
            heads = self._replica.enter_region(value, partial(F.linear, weight=matrix, bias=bias))
            if value.ndim == 2:
                heads = heads.unsqueeze(0)
            elif not self.batch_first:
                heads = heads.transpose(0, 1)
            projected.append(heads.view(*heads.shape[:-1], self.num_heads, -1).transpose(1, 2))
        return projected

    def _mask(
        self,
        q: Tensor,
        k: Tensor,
        padding: Tensor | None,
        mask: Tensor | None,
        *,
        batched: bool,
    ) -> Tensor | None:
        """Combine `padding` and `mask` into one mask, which is added to this rank's scores."""
        joined: Tensor | None = None
        if mask is not None:
            joined = _additive(mask, q.dtype)
            if joined.ndim == 3:  # (N * all heads, L, S)
                first, end = self.ranges[self._replica.group.rank]
                joined = joined.view(q.shape[0], -1, *joined.shape[1:])[:, first:end]
        if padding is not None:
            rows = _additive(padding if batched else padding.unsqueeze(0), q.dtype)
            rows = rows.view(q.shape[0], 1, 1, k.shape[2])
            joined = rows if joined is None else joined + rows
        return joined


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


def split_multihead(name: str, module: nn.MultiheadAttention, parts: int) -> SplitGroup:
    """Split an nn.MultiheadAttention by heads into `parts` parts.

    Raises ModelError if that is impossible.
    """
    if module.bias_k is not None or module.add_zero_attn:
        raise ModelError(
            f"{name} has add_bias_kv or add_zero_attn, which --tensor cannot split. Leave it whole "
            f'with tensor_plan={{"{name}": "whole"}}.'
        )
    heads = split_rules.even_split(f"{name} of {module.num_heads} heads", module.num_heads, parts)
    width_ranges = split_rules.even_split(name, module.embed_dim, parts, grain=module.head_dim)
    # in_proj_weight holds the blocks for queries, keys and values, stacked along dimension 0.
    fused = split_rules.even_split(
        name, 3 * module.embed_dim, parts, grain=module.head_dim, blocks=3
    )
    tensors: dict[str, Any] = {}
    if module._qkv_same_embed_dim:
        tensors["in_proj_weight"] = (0, fused)
    else:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        tensors |= dict.fromkeys(names, (0, width_ranges))
    if module.in_proj_bias is not None:
        tensors["in_proj_bias"] = (0, fused)
    local = [{"num_heads": split_rules.range_length(part)} for part in heads]
    of_heads = [part[0] for part in heads]
    attend = ModuleSplit(name, module, SplitMultiheadAttention, tensors, local, of_heads)
    local_width = [{"in_features": split_rules.range_length(part)} for part in width_ranges]
    out = split_rules.local_module(
        f"{name}.out_proj", module.out_proj, {"weight": (1, width_ranges)}, local_width
    )
    return SplitGroup("attention", name, [attend, out])
