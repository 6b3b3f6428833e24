"""Stragglers, spikes and hashes of the guard: arithmetic, without ranks."""

import math

import pytest
import torch

from shardwise.guard.spikes import FIRST, LAST, MOST, Spikes
from shardwise.guard.step_times import STEPS, StepTimes, straggler
from shardwise.layout import fingerprints


def row(data=0.1, forward=0.1, backward=0.2, update=0.1):
    phases = [data, forward, backward, update]
    return [sum(phases), *phases]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([row(), row(), row(data=0.3)], (2, "data")),
        ([row(), row(backward=0.4)], (1, "backward")),
        ([row(), row(data=0.2)], None),  # 1.2 times the others
        ([row(), row(data=0.3), row(data=0.3)], None),  # as slow as the median of the others
        ([row(), row(forward=0.0, data=0.5)], (1, "data or forward")),
        ([[0.0] * 5, row()], None),  # too few steps on a rank
        ([row()], None),
        ([row(1e-4, 1e-4, 1e-4, 1e-4), row(1e-3, 1e-4, 1e-4, 1e-4)], None),  # below 2 ms
    ],
)
def test_straggler(rows, found):
    slow = straggler(rows)
    assert (slow and (slow.rank, slow.phase)) == found


def test_waits_count_for_no_phase(monkeypatch):
    now, waited = [0.0], [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    times = StepTimes(lambda: waited[0])
    for _ in range(STEPS):
        assert times.row() == [0.0] * 5
        for phase, seconds, idle in (
            ("forward", 1, 0),
            ("backward", 2, 0),
            ("data", 4, 3),
            ("update", 1, 0),
        ):
            now[0] += seconds
            waited[0] += idle
            times.enter(phase)
        now[0] += 0.5
        times.end_step()
        now[0] += 100  # a check
        times.begin_step()
    # "data" ran for 1 s before the forward pass, and for 1 s after the backward pass.
    assert times.row() == [5.5, 2.0, 2.0, 1.0, 0.5]


def test_spike_is_found_in_loss_or_norm():
    for name, values in (("loss", (9.0, 1.0)), ("gradient norm", (1.0, 9.0))):
        spikes = Spikes()
        for step in range(FIRST):
            assert spikes.look_at(1 + step % 3 * 0.1, 1 + step % 2 * 0.1) == ""
        assert spikes.look_at(*values).startswith(f"the {name} is 9; the median of the last 20")
        assert spikes.look_at(1.0, 1.0) == ""


def test_new_level_is_accepted_after_three_steps():
    spikes = Spikes()
    for _ in range(LAST):
        spikes.look_at(1.0, 1.0)
    found = [spikes.look_at(5.0, 5.0) for _ in range(FIRST + MOST)]
    assert [bool(each) for each in found] == [True] * MOST + [False] * FIRST
    assert "spike 3 in a row" in found[MOST - 1]


def test_values_that_are_not_finite_are_no_spikes():
    spikes = Spikes()
    for _ in range(FIRST):
        spikes.look_at(1.0, 1.0)
    assert spikes.look_at(math.nan, math.inf) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
def test_each_flipped_bit_changes_hash_and_checksum(dtype):
    """Also the exponents of large tensors, whose words are summed in pairs."""
    value = torch.randn(fingerprints._SMALL).to(dtype)
    flat = value.view(torch.uint8)
    hashed, summed = int(fingerprints.hash_of(value)), fingerprints.checksum([value])
    for place in range(3, 8):
        for bit in range(8 if dtype != torch.bool else 1):
            flat[place] ^= 1 << bit
            assert int(fingerprints.hash_of(value)) != hashed
            assert fingerprints.checksum([value]) != summed
            flat[place] ^= 1 << bit
    assert int(fingerprints.hash_of(value)) == hashed


def test_rounding_errors_do_not_cancel_in_a_hash():
    value = torch.rand(61 * 64) + 1
    other = value.clone()
    words = other.view(torch.int32)
    # In a sum of words, one ulp more and one less in the same column cancel.
    words[5] += 1
    words[5 + 2 * 61] -= 1
    assert int(fingerprints.hash_of(other)) != int(fingerprints.hash_of(value))
