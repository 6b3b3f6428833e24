"""Stochastic rounding to bf16: unbiased, and a pure function of seed, parameter and element."""

import numpy as np
import pytest
import torch

from shardwise.layout.bucket_layout import Span
from shardwise.layout.shards import Shard, even_ranges
from shardwise.states.storage.rounded_masters import NoisePiece, RoundedMaster, round_stochastically
from shardwise.states.storage.storage import MemoryStorage


def rounded(value, seed=1, key=2, element=0):
    into = torch.empty(len(value), dtype=torch.bfloat16)
    round_stochastically(value, into, seed, key, element)
    return into


def mixed(bits):
    """MurmurHash3's finalizer on uint32."""
    with np.errstate(over="ignore"):
        bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        bits = (bits ^ (bits >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return bits ^ (bits >> np.uint32(16))


def test_adds_the_upper_half_of_a_hash():
    value = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    seed, key, first = 0x9ABCDEF0, 0xFFFF1234, 2**32 - 2500
    element = (np.arange(5000, dtype=np.uint64) + first).astype(np.uint32)
    noise = mixed(mixed(element ^ np.uint32(key)) ^ np.uint32(seed)) >> np.uint32(16)
    bits = (value.numpy().view(np.uint32) + noise) >> np.uint32(16) << np.uint32(16)
    expected = torch.from_numpy(bits.view(np.float32))
    assert torch.equal(rounded(value, seed, key, first).float(), expected)


def test_is_unbiased():
    value = torch.tensor([1.0, -3.3, 1e-30, 2.7e20]).repeat_interleave(10_000) * (1 + 2**-11)
    below, above = (torch.nextafter(value.bfloat16(), value.bfloat16() * s) for s in (0, 2))
    result = torch.stack([rounded(value, seed) for seed in range(20)])
    assert ((result >= torch.minimum(below, above)) & (result <= torch.maximum(below, above))).all()
    means = result.double().mean(0).view(4, -1).mean(1)
    # The distance of neighbours is 2**-7 of a power of two, and there are 200,000 draws.
    torch.testing.assert_close(
        means, value.double().view(4, -1)[:, 0], rtol=5 * 2**-8 / 447, atol=0
    )


def test_neighbouring_elements_and_steps_are_independent():
    value = torch.full((100_000,), 1 + 2**-8)  # halfway between two values
    first = (rounded(value, seed=1) > 1).double()
    assert abs(first.mean() - 0.5) < 0.01
    for other in (rounded(value, seed=2), rounded(value, key=3), rounded(value, element=1)):
        correlation = torch.corrcoef(torch.stack([first, (other > 1).double()]))[0, 1]
        assert abs(correlation) < 0.02


def test_keeps_values_of_bf16_and_special_values():
    value = torch.randn(1000).bfloat16().float()
    assert torch.equal(rounded(value).float(), value)
    special = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0])
    assert torch.equal(rounded(special).float().view(torch.int32), special.view(torch.int32))
    nan = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert rounded(nan).isnan().all()


def interval(value, first: int, spans: list[Span], seed):
    """Update elements [first, first + ...) of a parameter, in spans. Return the new parameters."""
    own = MemoryStorage(torch.zeros(spans[-1][1], dtype=torch.bfloat16), spans)
    length = spans[-1][1] - 3
    master = RoundedMaster(own, [NoisePiece(3, spans[-1][1], 77, first)], lambda: seed)
    for index, (low, high) in enumerate(spans):
        held = master.take(index)
        part = torch.cat([torch.zeros(3), value[first : first + length]])[low:high]
        held.copy_(part)
        master.send(index, held, own.take(index))
        master.put(index, changed=True)
    return own.loaded()[3:]


def test_noise_does_not_depend_on_intervals_and_spans(monkeypatch):
    value = torch.randn(4000)
    whole = interval(value, 0, [(0, 4003)], seed=5)
    assert torch.equal(whole, rounded(value, 5, 77))
    monkeypatch.setattr("shardwise.states.storage.rounded_masters._CHUNK", 300)
    for first, spans in [(0, [(0, 1000), (1000, 2003)]), (2000, [(0, 512), (512, 2003)])]:
        assert torch.equal(interval(value, first, spans, seed=5), whole[first : first + 2000])
    assert not torch.equal(interval(value, 0, [(0, 4003)], seed=6), whole)


@pytest.mark.parametrize(("dim", "blocks"), [(0, 1), (0, 3), (1, 1), (1, 3)])
def test_noise_does_not_depend_on_splits(monkeypatch, dim, blocks):
    monkeypatch.setattr("shardwise.states.storage.rounded_masters._CHUNK", 50)
    shape = (18, 24)
    whole = torch.randn(shape)
    expected = rounded(whole.view(-1), 5, 77).view(shape)
    ranges = tuple(even_ranges(shape[dim], 2, blocks=blocks))
    for rank in range(2):
        shard = Shard(shape, dim, ranges, rank)
        value, known = shard.of(whole).view(-1), shard.of(expected).view(-1)
        for first in (0, 100):  # where an interval begins
            numel = len(value) - first
            target = MemoryStorage(torch.zeros(numel, dtype=torch.bfloat16))
            piece = NoisePiece(0, numel, 77, first, shard)
            master = RoundedMaster(target, [piece], lambda: 5)
            held = master.take(0)
            held.copy_(value[first:])
            master.send(0, held, target.take(0))
            assert torch.equal(target.tensor, known[first:])


def test_other_writes_are_rounded_to_the_nearest_value():
    target = MemoryStorage(torch.zeros(1000, dtype=torch.bfloat16))
    master = RoundedMaster(target, [NoisePiece(0, 1000, 1, 0)], lambda: 3)
    value = torch.randn(1000)
    master.store(value)
    assert torch.equal(target.tensor, value.bfloat16())
    assert torch.equal(master.loaded(), target.tensor.float())
    assert master.nbytes == master.memory_bytes == 0
