"""The mesh of a run, and the parts of a tensor: pure arithmetic."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config import Settings
from shardwise.errors import ConfigError
from shardwise.layout.byte_ranges import Extent, of_whole
from shardwise.layout.shards import Shard, even_ranges
from shardwise.world.mesh import Mesh, mesh_of


def test_tensor_ranks_are_neighbours():
    mesh = Mesh(6, tensor=3)
    assert (mesh.data, mesh.in_words()) == (2, "2 data x 3 tensor")
    assert mesh.tensor_groups == [[0, 1, 2], [3, 4, 5]]
    assert mesh.data_groups == [[0, 3], [1, 4], [2, 5]]
    assert [(mesh.data_of(r), mesh.tensor_of(r)) for r in (0, 2, 3, 5)] == [
        (0, 0), (0, 2), (1, 0), (1, 2)
    ]  # fmt: skip
    assert Mesh(4).is_flat


@pytest.mark.parametrize(
    ("size", "tensor", "hint"),
    [
        (6, 4, "Start 4 or 8 workers, or write --tensor with one of 1, 2, 3, 6"),
        (2, 3, "Start 3 workers, or write --tensor with one of 1, 2."),
    ],
)
def test_an_impossible_product_names_numbers_that_fit(size, tensor, hint):
    with pytest.raises(ConfigError, match=f"--tensor {tensor} does not divide {size}.*{hint}"):
        Mesh(size, tensor=tensor)


def test_expert_ranks_are_consecutive():
    mesh = Mesh(8, expert=4)
    assert mesh.expert_groups == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.expert_copy_groups == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert (mesh.data, mesh.is_flat) == (8, False)
    assert mesh.in_words() == "8 data (experts over 4)"
    with pytest.raises(ConfigError, match=r"--expert 3 does not divide 8.*one of 1, 2, 4, 8"):
        Mesh(8, expert=3)


def test_expert_ranks_are_in_one_stage():
    mesh = Mesh(8, pipeline=2, expert=2)
    assert mesh.expert_groups == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert mesh.expert_copy_groups == [[0, 4], [2, 6], [1, 5], [3, 7]]
    # The workers of a replica that split its layers hold different experts.
    assert Mesh(8, tensor=2, pipeline=2, expert=4).expert_groups == [[0, 1, 4, 5], [2, 3, 6, 7]]
    with pytest.raises(ConfigError, match=r"--expert 4 does not divide 2 .*stage .--pipeline 4"):
        Mesh(8, pipeline=4, expert=4)


@pytest.mark.parametrize("others", [{"tensor": 4}, {"islands": 2}, {"exact": 9}], ids=str)
def test_expert_refuses_what_it_cannot_be_combined_with(others):
    settings = Settings(expert=2, **others)
    with pytest.raises(ConfigError, match="--expert 2"):
        mesh_of(settings, 4, others.get("islands", 1))


def test_context_ranks_are_consecutive():
    mesh = Mesh(8, context=4)
    assert mesh.context_groups == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [mesh.context_of(rank) for rank in (0, 3, 4, 6)] == [0, 3, 0, 2]
    assert (mesh.data, mesh.replica, mesh.is_flat) == (8, 1, False)
    assert mesh.in_words() == "2 data x 4 context"
    # With split layers, ranks exchange tokens with those that have the same part of the model.
    split = Mesh(8, tensor=2, context=2)
    assert split.context_groups == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert [split.context_of(rank) for rank in range(8)] == [0, 0, 1, 1] * 2
    assert split.in_words() == "2 data x 2 context x 2 tensor"
    stages = Mesh(8, pipeline=2, context=2)
    assert stages.context_groups == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert stages.in_words() == "2 data x 2 context x 2 pipeline"
    with pytest.raises(ConfigError, match=r"--context 3 does not divide 8.*one of 1, 2, 4, 8"):
        Mesh(8, context=3)
    with pytest.raises(ConfigError, match=r"--context 4 does not divide 2 replica.* each island"):
        Mesh(8, tensor=2, islands=2, context=4)


@pytest.mark.parametrize("others", [{"exact": 4}], ids=str)
def test_context_refuses_what_it_cannot_be_combined_with(others):
    settings = Settings(context=2, **others)
    with pytest.raises(ConfigError, match=f"(?=.*--context 2)(?=.*--{next(iter(others))})"):
        mesh_of(settings, 4, 1)


def test_a_rank_may_hold_nothing_of_a_tensor():
    held, empty = (Shard((3, 4), 0, (((0, 3),), ()), rank) for rank in (0, 1))
    whole = torch.arange(12.0).view(3, 4)
    assert empty.of(whole).shape == empty.part_shape(1) == (0, 4)
    assert torch.equal(held.joined([held.of(whole), empty.of(whole)]), whole)
    assert list(empty.runs(0, 0)) == []


def test_ranges():
    assert even_ranges(7, 3) == [((0, 3),), ((3, 5),), ((5, 7),)]
    assert even_ranges(12, 2, grain=2, blocks=3) == [
        ((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12))
    ]  # fmt: skip
    for bad in ({"length": 2, "parts": 3}, {"length": 8, "parts": 3, "grain": 4}):
        with pytest.raises(ValueError, match="cannot be spread over 3"):
            even_ranges(**bad)


@st.composite
def split_tensors(draw):
    parts, blocks, grain = (draw(st.integers(1, 3)) for _ in range(3))
    length = draw(st.integers(parts, 5)) * grain * blocks
    shape = draw(st.lists(st.integers(1, 4), max_size=2))
    dim = draw(st.integers(0, len(shape)))
    shape.insert(dim, length)
    return tuple(shape), dim, even_ranges(length, parts, grain=grain, blocks=blocks)


@given(split_tensors(), st.data())
def test_parts_make_up_the_whole(problem, data):
    shape, dim, ranges = problem
    whole = torch.arange(prod(shape)).view(shape)
    shards = [Shard(shape, dim, tuple(ranges), rank) for rank in range(len(ranges))]
    parts = [shard.of(whole) for shard in shards]
    assert [tuple(part.shape) for part in parts] == [
        shards[0].part_shape(r) for r in range(len(parts))
    ]
    assert torch.equal(shards[0].joined(parts), whole)
    assert shards[0].most == max(part.numel() for part in parts)
    for shard, part in zip(shards, parts, strict=True):
        first = data.draw(st.integers(0, part.numel()))
        end = data.draw(st.integers(first, part.numel()))
        flat = part.reshape(-1)
        covered = []
        for low, high, offset in shard.runs(first, end):
            assert torch.equal(flat[low:high], torch.arange(offset, offset + high - low))
            covered += range(low, high)
        assert covered == list(range(first, end))


def test_an_extent_of_a_part():
    columns = Shard((2, 4), 1, (((0, 2),), ((2, 4),)), 1)
    found = of_whole(Extent("w", 10, 13, 1), columns)
    assert found == [Extent("w", 10, 11, 3), Extent("w", 11, 13, 6)]
