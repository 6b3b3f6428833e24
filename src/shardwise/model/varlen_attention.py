"""A reference implementation of flash attention in Transformers models, for fp64 on the CPU.

Flash attention needs a GPU and half precision, so the packing test cannot run it. Instead, the test
replaces the copied model's kernel with plain arithmetic that takes the same arguments: query, key
and value of whole rows, and `cu_seq_lens_q`, the starts of the documents in the flattened rows. The
test therefore shows whether a model passes these arguments from its forward method to every
attention layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

NAME = "shardwise_packing_reference"
"""Name of the reference among the attention functions of Transformers."""


def uses_flash(model: nn.Module) -> bool:
    """Return whether `model` is a Transformers model that was loaded with flash attention."""
    for config in _configs(model):
        chosen = config._attn_implementation
        # Models of several modalities choose an implementation for each.
        names = chosen.values() if isinstance(chosen, Mapping) else [chosen]
        if any("flash" in str(name) for name in names):
            return True
    return False


def flash_arguments(sizes: list[int]) -> dict[str, Any]:
    """Return the `FlashAttentionKwargs` of Transformers for documents of these `sizes`."""
    starts = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    return {
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": max(sizes),
        "max_length_k": max(sizes),
    }


@contextmanager
def on_reference(model: nn.Module) -> Iterator[None]:
    """Replace the attention functions of the Transformers `model` with the reference."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    configs = {id(config): config for config in _configs(model)}
    before = {key: config._attn_implementation for key, config in configs.items()}
    ALL_ATTENTION_FUNCTIONS[NAME] = attend
    try:
        for config in configs.values():
            config._attn_implementation = NAME
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]
        del ALL_ATTENTION_FUNCTIONS[NAME]


def attend(
    module: nn.Module,
    query: Tensor,  # (rows, heads, row, width)
    key: Tensor,  # (rows, groups of heads, row, width)
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return causal attention within each document, of shape (rows, row, heads, width)."""
    rows, heads, length, width = query.shape
    # Without the argument, the kernel takes each row as one document.
    ends = [length * (number + 1) for number in range(rows)]
    if cu_seq_lens_q is not None:
        ends = cu_seq_lens_q[1:].tolist()
    place = torch.arange(rows * length, device=query.device)
    document = torch.bucketize(place, torch.tensor(ends, device=query.device), right=True)
    sees = (document[:, None] == document[None]) & (place[:, None] >= place[None])
    if sliding_window is not None:
        sees &= place[:, None] - place[None] < sliding_window
    # All rows end to end, as the kernel takes them: (heads, rows * row, width)
    flat = [each.transpose(0, 1).flatten(1, 2) for each in (query, key, value)]
    q, k, v = (each.repeat_interleave(heads // len(each), dim=0) for each in flat)
    scores = q @ k.transpose(1, 2) * (width**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
    return (weights @ v).view(-1, rows, length, v.size(-1)).permute(1, 2, 0, 3), None


def _configs(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            yield config
