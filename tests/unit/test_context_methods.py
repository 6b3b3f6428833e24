"""The bytes that the two methods of `--context` send decide which one is used."""

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.parallel.context.methods import (
    AttentionCall,
    CausalBiases,
    attend,
    bytes_sent,
    costs,
)
from shardwise.tools.plan.engine_parts import AbsentParts

ROWS, OWN, PARTS, FEATURES = 2, 6, 4, 2
TOTAL = OWN * PARTS
LENGTHS = [OWN] * PARTS

MASKS: dict[str, Callable[[], Tensor | None]] = {
    "none": lambda: None,
    "causal": lambda: None,
    "keys": lambda: torch.ones(ROWS, 1, 1, OWN, dtype=torch.bool),
    "queries": lambda: torch.ones(ROWS, 1, OWN, TOTAL, dtype=torch.bool),
    "queries of heads": lambda: torch.ones(ROWS, 8, OWN, TOTAL),
    "whole": lambda: torch.ones(TOTAL, TOTAL)[None, None],
}


def call_of(mask: str, heads: int, groups: int) -> AttentionCall:
    """Return the call of one rank, whose tensors hold bytes but no meaningful values."""
    query, key = torch.ones(ROWS, heads, OWN, FEATURES), torch.ones(ROWS, groups, OWN, FEATURES)
    return AttentionCall(
        query,
        key,
        key.clone(),
        MASKS[mask](),
        0.0,
        mask == "causal",
        None,
        F.scaled_dot_product_attention,
    )


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("method", ["ulysses", "gathered"])
def test_counts_the_bytes_of_a_forward_pass(method, mask, groups):
    noted: list[int] = []
    call = call_of(mask, 8, groups)
    attend(call, LENGTHS, AbsentParts(PARTS, noted.append), method, CausalBiases())
    # Exchanged masks have no gradient, so the rest is sent twice.
    without = bytes_sent(
        call_of("causal" if mask == "causal" else "none", 8, groups), LENGTHS, method
    )
    expected = bytes_sent(call, LENGTHS, method) - without / 2
    assert sum(noted) == expected


@pytest.mark.parametrize(
    ("mask", "heads", "groups", "cheapest"),
    [
        ("causal", 8, 8, "ulysses"),
        ("causal", 8, 1, "ulysses"),
        ("none", 8, 8, "ulysses"),
        ("none", 8, 1, "gathered"),
        ("queries", 8, 8, "ulysses"),
        ("queries", 8, 1, "gathered"),
        ("causal", 6, 6, "gathered"),  # 4 parts do not divide 6 heads
    ],
)
def test_chooses_the_method_that_sends_less(mask, heads, groups, cheapest):
    sent = costs(call_of(mask, heads, groups), LENGTHS)
    assert min(sent, key=sent.__getitem__) == cheapest
    assert ("ulysses" in sent) == (heads % PARTS == 0)


def test_layers_share_the_masks_of_causal_chunks_until_lengths_change():
    biases, query = CausalBiases(), torch.ones(1, 1, 3, 1)
    first, second = biases.of(query, 0, 3), biases.of(query, 9, 12)
    assert biases.of(query, 0, 3) is first
    assert biases.of(query, 9, 12) is second
    expected = torch.ones(3, 12).tril(9).log()
    assert torch.equal(second, expected)
    kept = weakref.ref(first)
    del first
    biases.of(query, 0, 4)
    assert kept() is None
