"""Partitions of models into stages, and schedule tables."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwise.config import SCHEDULES
from shardwise.errors import ConfigError, ModelError
from shardwise.parallel.pipeline import Action, actions_of, partition, schedule
from shardwise.world.mesh import Mesh
from tests.parity.problems import GPT, MLP


def test_the_mesh_has_three_axes():
    mesh = Mesh(8, tensor=2, pipeline=2)
    assert (mesh.data, mesh.in_words()) == (2, "2 data x 2 pipeline x 2 tensor")
    assert mesh.tensor_groups == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.pipeline_groups == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.data_groups == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh.stage_groups == [[0, 1, 4, 5], [2, 3, 6, 7]]
    with pytest.raises(ConfigError, match=r"--pipeline 2 --tensor 3 does not divide 8.*6 or 12"):
        Mesh(8, tensor=3, pipeline=2)


@given(st.data())
def test_every_rank_is_in_one_group_of_each_axis(data):
    pipeline, tensor, replicas = (data.draw(st.integers(1, 4)) for _ in range(3))
    mesh = Mesh(pipeline * tensor * replicas, tensor, pipeline)
    kinds = [mesh.data_groups, mesh.tensor_groups, mesh.pipeline_groups, mesh.stage_groups]
    for groups in kinds:
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for rank in range(mesh.size):
        place = mesh.data_of(rank), mesh.stage_of(rank), mesh.tensor_of(rank)
        assert (place[0] * pipeline + place[1]) * tensor + place[2] == rank


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_stages_are_as_even_as_possible(sizes, data):
    parts = data.draw(st.integers(1, len(sizes)))

    def largest(starts):
        edges = [*starts, len(sizes)]
        return max(sum(sizes[a:b]) for a, b in pairwise(edges))

    found = partition.balanced_starts([float(size) for size in sizes], parts)
    assert found[0] == 0
    assert len(set(found)) == parts
    every = ([0, *cuts] for cuts in combinations(range(1, len(sizes)), parts - 1))
    assert largest(found) == min(map(largest, every))


def test_partitions_models_into_layers():
    model = GPT()
    cut = partition.partition_model(model, 2)
    assert [a.name for a in cut.layers] == ["tokens", "blocks.0", "blocks.1", "norm", "head"]
    assert cut.owners[model.places] == 0  # in no layer, and used before the first layer
    assert cut.tied == {model.tokens.weight: [1]}
    assert [cut.describe_stage(stage) for stage in range(2)] == [
        "tokens to blocks.0",
        "blocks.1 to head",
    ]
    named = partition.partition_model(model, 3, names=("blocks.0", "head"))
    assert [named.describe_stage(s) for s in range(3)] == ["tokens", "blocks.0 to norm", "head"]
    plain = partition.partition_model(MLP(), 3)
    assert [a.name for a in plain.layers] == ["0", "2", "4"]
    assert len(plain.floating) == 2
    with pytest.raises(ModelError, match=r"has 3 layer\(s\).*fewer than 4 stages"):
        partition.partition_model(MLP(), 4)
    with pytest.raises(ModelError, match=r"1 layer.s. .itself."):
        partition.partition_model(nn.Linear(2, 2), 2)


@settings(deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(2, 4), st.integers(1, 3), st.data())
def test_every_action_runs_once_without_deadlock(name, ranks, rounds, data):
    stages = ranks * (2 if name == "interleaved" else 1)
    micros = ranks * rounds
    actions = [a for rank in range(ranks) for a in actions_of(name, ranks, stages, micros, rank)]
    assert len(actions) == len(set(actions))
    whole = {"F", "B"} if name != "zero-bubble" else {"F", "I", "W"}
    assert {(a.stage, a.kind, a.micro) for a in actions} == {
        (s, k, m) for s in range(stages) for k in whole for m in range(micros)
    }
    for rank in range(ranks):
        order = actions_of(name, ranks, stages, micros, rank)
        assert all(a.stage % ranks == rank for a in order)
        for stage in range(rank, stages, ranks):
            firsts = [a.micro for a in order if a.stage == stage and a.kind == "F"]
            assert firsts == list(range(micros))
    times = {kind: [1.0] * stages for kind in "FBIW"}
    assert 0 <= schedule.idle_fraction(name, ranks, stages, micros, times) < 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micros"), [(2, 2), (2, 8), (4, 4), (4, 16)])
def test_idle_fraction_matches_the_formula(name, ranks, micros):
    """(S - 1) / (M + S - 1), Huang et al., 2019."""
    times = {"F": [1.0] * ranks, "B": [2.0] * ranks, "I": [1.0] * ranks, "W": [1.0] * ranks}
    wanted = (ranks - 1) / (micros + ranks - 1)
    assert schedule.idle_fraction(name, ranks, ranks, micros, times) == pytest.approx(wanted)
    # Splitting backwards fills gaps, and two stages on each rank halve them.
    assert schedule.idle_fraction("zero-bubble", ranks, ranks, micros, times) < wanted
    halves = {kind: [t / 2 for t in several] * 2 for kind, several in times.items()}
    assert schedule.idle_fraction("interleaved", ranks, 2 * ranks, micros, halves) < wanted


def test_1f1b_holds_no_more_micro_batches_than_stages():
    held = most = 0
    for action in actions_of("1f1b", 4, 4, 16, 0):
        held += {"F": 1, "B": -1}[action.kind]
        most = max(most, held)
    assert most == 4
    assert Action(0, "F", 0) == actions_of("1f1b", 4, 4, 16, 0)[0]


def test_rejects_micro_batches_that_a_schedule_does_not_support():
    with pytest.raises(
        ConfigError, match="interleaved on 4 workers does not support 9 micro-batches"
    ):
        actions_of("interleaved", 4, 8, 9, 0)
