"""Mixtures of datasets: exact shares, no sample twice in a pass, resumes at other sizes."""

from collections import Counter

import pytest
import torch

import shardwise as sw
from shardwise.errors import DataError

SIZES = {"web": 50, "code": 7, "chat": 20}
WEIGHTS = {"web": 7, "code": 2, "chat": 1}
SAMPLES = 30
EPOCHS = 4


def mixture(samples=SAMPLES):
    parts = {name: [(name, index) for index in range(size)] for name, size in SIZES.items()}
    return sw.Mixture(parts, WEIGHTS, samples)


def legs(world, shuffle, tokens, state, most):
    """Run at most `most` steps. Return the samples of each step on this rank, and the position."""
    options = {"tokens": tokens, "length": lambda sample: 1 + sample[1] % 3} if tokens else {}
    loader = sw.Loader(
        mixture(),
        **(options or {"batch_size": 8}),
        shuffle=shuffle,
        collate_fn=list,
    )
    if state is not None:
        loader.load_state_dict(state)
    seen = []
    for epoch in loader.epochs(EPOCHS):
        for step in loader.steps():
            seen.append((epoch, [row for rows in step if world.rows for row in rows]))
            if len(seen) == most:
                return seen, loader.state_dict()
    return seen, None


def steps_of(ranks):
    steps = []
    for parts in zip(*(seen for seen, _ in ranks), strict=True):
        assert len({epoch for epoch, _ in parts}) == 1
        steps.append((parts[0][0], sorted(row for _, rows in parts for row in rows)))
    return steps


@pytest.mark.parametrize(("shuffle", "tokens"), [(True, None), (False, None), (True, 12)])
def test_passes_use_every_sample_once_over_resumes_at_other_sizes(group, shuffle, tokens):
    expected = steps_of(group(1)(legs, shuffle, tokens, None, None))
    for epoch in range(EPOCHS):
        rows = [row for number, rows in expected for row in rows if number == epoch]
        assert Counter(name for name, _ in rows) == {"web": 21, "code": 6, "chat": 3}
    draws = Counter(row for _, rows in expected for row in rows)
    for name, drawn in (("web", 84), ("code", 24), ("chat", 12)):
        times = [draws[name, index] for index in range(SIZES[name])]
        assert sum(times) == drawn
        assert set(times) <= {drawn // SIZES[name], -(-drawn // SIZES[name])}
    draw = torch.Generator().manual_seed(0)
    for _ in range(2):
        found, state = [], None
        while True:
            size, most = (int(torch.randint(1, 5, (), generator=draw)) for _ in range(2))
            ranks = group(size)(legs, shuffle, tokens, state, 2 * most)
            found += steps_of(ranks)
            if (state := ranks[0][1]) is None:
                break
        assert found == expected


def test_unshuffled_datasets_are_spread_evenly():
    order = mixture().order(0, 0, shuffle=False).tolist()
    assert [index for index in order if index < 50] == list(range(21))
    # Six of 30 samples are code, so every fifth is.
    places = [place for place, index in enumerate(order) if 50 <= index < 57]
    assert all(3 <= gap <= 7 for gap in torch.tensor(places).diff().tolist())
    again = mixture().order(0, 1, shuffle=False).tolist()
    assert [index for index in again if index < 50] == list(range(21, 42))
    assert not torch.equal(*(mixture().order(3, epoch, shuffle=True) for epoch in (1, 2)))


def test_length_of_a_loader_is_that_of_an_epoch(solo):
    assert len(sw.Loader(mixture(), 8)) == 4
    assert len(sw.Loader(mixture(None), 8)) == 10
    with pytest.raises(DataError, match="drops all 30 samples"):
        sw.Loader(mixture(), 31, drop_last=True)


@pytest.mark.parametrize(
    ("datasets", "weights", "options", "words"),
    [
        ({"a": [1]}, {"b": 1}, {}, "one weight per dataset"),
        ({}, {}, {}, "one weight per dataset"),
        ({"a": iter([1])}, {"a": 1}, {}, "not map-style"),
        ({"a": []}, {"a": 1}, {}, "a has length 0"),
        ({"a": [1]}, {"a": 0}, {}, "above 0"),
        ({"a": [1], "b": [1]}, {"a": 1, "b": 1e-9}, {"samples": 10}, "weight of b is so small"),
        ({"a": [1]}, {"a": 1}, {"samples": 0}, "samples must be"),
    ],
)
def test_rejects_bad_arguments(datasets, weights, options, words):
    with pytest.raises(DataError, match=words):
        sw.Mixture(datasets, weights, **options)
