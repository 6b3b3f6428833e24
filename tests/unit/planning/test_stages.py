"""Pipeline stages of a hand-written record, and their memory in a schedule."""

import pytest

from shardwise.layout.placement import Placement
from shardwise.tools.plan.catalogue import read_catalogue
from shardwise.tools.plan.choice import Choice
from shardwise.tools.plan.cluster import parse_cluster
from shardwise.tools.plan.memory import (
    Hardware,
    most_waiting,
    predict_pipeline,
    saved_bytes,
)
from shardwise.tools.plan.meshes import AxisSizes, meshes
from shardwise.tools.plan.record import (
    GroupRecord,
    LayerRecord,
    Operation,
    ParameterRecord,
    StepRecord,
    TensorLife,
)
from shardwise.tools.plan.stage_records import part_of, stage_layers

ADAM = GroupRecord("AdamW", 0, 0, ("exp_avg", "exp_avg_sq"), True, True, True, True)
SAVED, WEIGHTS = 2048, 4096


def record():
    """Return four layers of 1,024 floats; forward saves 2,048 bytes in each until backward."""
    forward = [Operation("mm", 0, 0, "float32", n, "forward", "", (), n) for n in range(4)]
    backward = [Operation("mm", 0, 0, "float32", n, "backward", "", (), n) for n in (3, 2, 1, 0)]
    return StepRecord(
        operations=(*forward, *backward),
        tensors=tuple(
            TensorLife(SAVED, n, 7 - n, n, "", "mm", (512,), "float32", True) for n in range(4)
        ),
        parameters=tuple(
            ParameterRecord(f"{n}", (32, 32), "float32", 4, n, 0, 7 - n, layer=n) for n in range(4)
        ),
        groups=(ADAM,),
        units=("0", "1", "2", "3"),
        uses=(),
        batch_size=1,
        total_batch=8,
        backward=4,
        precision="fp32",
        activations="kept",
        layers=tuple(LayerRecord(f"{n}", 1024, True) for n in range(4)),
    )


def test_stage_contains_its_layers_operations_tensors_and_parameters():
    assert stage_layers(record(), 2) == [range(2), range(2, 4)]
    first = part_of(record(), range(2))
    assert [(each.layer, each.phase) for each in first.operations] == [
        (0, "forward"), (1, "forward"), (1, "backward"), (0, "backward"),
    ]  # fmt: skip
    assert first.backward == 2
    assert [each.name for each in first.parameters] == ["0", "1"]
    assert [(each.born, each.died, each.saved) for each in first.tensors] == [
        (0, 3, True), (1, 2, True),
    ]  # fmt: skip
    assert saved_bytes(first) == 2 * SAVED


@pytest.mark.parametrize(
    ("name", "rank", "forward", "backward"),
    [
        ("gpipe", 0, 7, 7),
        ("1f1b", 0, 3, 3),
        ("1f1b", 3, 0, 0),
        ("zero-bubble", 0, 3, 3),
    ],
)
def test_micro_batches_in_flight_match_the_schedule(name, rank, forward, backward):
    found = most_waiting(name, 4, 4, 8, rank, 0)
    assert (found.forward, found.backward) == ((forward,), (backward,))


def test_first_stage_of_1f1b_holds_one_micro_batch_per_rank():
    choice = Choice(row=Placement(), data=1, micro_batch=1, micro_batches=8, pipeline=4)
    plan = predict_pipeline(record(), choice, Hardware(apart=True))
    assert plan.states == {"parameters": WEIGHTS, "gradients": WEIGHTS, "optimizer": 2 * WEIGHTS}
    assert plan.peak == 4 * WEIGHTS + 4 * SAVED
    # Two stages on each rank: the micro-batches of the first layer wait for all others.
    several = Choice(
        row=Placement(), data=1, micro_batch=1, micro_batches=8, pipeline=2, schedule="interleaved"
    )
    assert predict_pipeline(record(), several, Hardware(apart=True)).states["parameters"] == 8192


def test_lists_meshes_of_a_cluster():
    cluster = parse_cluster("4xH100", read_catalogue(user=False))
    found = list(meshes(cluster, [(1, 1), (2, 1)], 3, 16))
    assert AxisSizes(data=2, tensor=2) in found
    assert AxisSizes(data=2, pipeline=2, schedule="1f1b") in found
    assert AxisSizes(data=1, tensor=2, pipeline=2, schedule="gpipe") in found
    # Three layers are too few for two stages on each of two ranks, and for four stages.
    assert not any(each.schedule == "interleaved" or each.pipeline == 4 for each in found)
    assert {each.pipeline for each in meshes(cluster, [(1, 1)], 0, 16)} == {1}
    # Two rows employ all 4 devices only if each row is split over 2 of them.
    found = list(meshes(cluster, [(1, 1), (1, 2), (1, 4)], 0, 2))
    assert [(each.data, each.context) for each in found] == [(2, 1), (4, 2), (4, 4)]
    # Each row is split over 2 devices, and so are the layers, or they are on 2 devices in turn.
    found = list(meshes(cluster, [(1, 2), (2, 2)], 2, 2))
    assert AxisSizes(data=2, context=2, pipeline=2, schedule="1f1b") in found
    assert AxisSizes(data=2, context=2, tensor=2) in found
    assert all(each.data * each.tensor * each.pipeline == 4 for each in found)
    # Experts are spread over the ranks of all context groups, next to split layers only if asked.
    found = list(meshes(cluster, [(1, 2), (2, 2)], 0, 1, 4, [(1, 2), (2, 2)]))
    assert [(m.data, m.tensor, m.context, m.expert) for m in found if m.expert > 1] == [
        (2, 1, 2, 2),
        (2, 2, 2, 2),
        (2, 2, 2, 4),
    ]
    assert not any(each.expert > 1 for each in meshes(cluster, [(2, 2)], 0, 1, 4))
