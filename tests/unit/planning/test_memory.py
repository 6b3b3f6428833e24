"""Memory through a step: what counts when, on a hand-written record."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from shardwise.comm.shared_buffers import POOLED
from shardwise.layout.placement import Placement, Tier
from shardwise.tools.plan import search
from shardwise.tools.plan.choice import Choice
from shardwise.tools.plan.memory import Hardware, predict
from shardwise.tools.plan.observe import PLAIN
from shardwise.tools.plan.record import (
    GroupRecord,
    Operation,
    ParameterRecord,
    SequenceExchange,
    StepRecord,
    TensorLife,
    UnitUse,
)

GPU = Hardware(apart=True)
ADAM = GroupRecord("AdamW", 0, 0, ("exp_avg", "exp_avg_sq"), True, True, True, True)


def record(**changes):
    """Return a record of two units of 4,096 floats; forward saves 2,048 bytes in each."""
    operations = [
        Operation("mm", 0, 0, "float32", 1, "forward", "a.py:1"),
        Operation("mm", 0, 0, "float32", 2, "forward", "a.py:2"),
        Operation("mm", 0, 0, "float32", 2, "backward", "a.py:2"),
        Operation("mm", 0, 0, "float32", 1, "backward", "a.py:1"),
    ]
    tensors = [
        TensorLife(2048, 0, 3, 1, "a.py:1", "mm", (512,), "float32", True),
        TensorLife(2048, 1, 2, 2, "a.py:2", "mm", (512,), "float32", True),
        TensorLife(16384, 2, 2, 2, "a.py:2", "mm", (64, 64), "float32", False),
    ]
    given = {
        "operations": tuple(operations),
        "tensors": tuple(tensors),
        "parameters": tuple(
            ParameterRecord(f"{n}", (64, 64), "float32", 4, n, 0, 4 - n) for n in (1, 2)
        ),
        "groups": (ADAM,),
        "units": ("the rest of M", "1", "2"),
        "uses": (UnitUse(1, "forward", 0, 1), UnitUse(2, "forward", 1, 2)),
        "batch_size": 1,
        "total_batch": 2,
        "backward": 2,
        "precision": "fp32",
        "activations": "kept",
    }
    return StepRecord(**given | changes)


def choice(level, data=2):
    return Choice(row=Placement.zero(level), data=data, micro_batch=1)


WEIGHTS = 2 * 4096 * 4


def test_peak_of_replicated_states_is_in_backward():
    plan = predict(record(), choice(0), GPU)
    assert plan.states == {
        "parameters": WEIGHTS,
        "gradients": WEIGHTS,
        "optimizer": 2 * WEIGHTS,
    }
    assert plan.at == 2
    assert plan.peak == 4 * WEIGHTS + 2048 + 2048 + 16384
    assert plan.where == "mm in backward of 2 (a.py:2)"
    assert [each.nbytes for each in plan.held] == [16384, 2048, 2048]


@pytest.mark.parametrize(
    ("level", "data", "held", "sent"),
    [
        (0, 4, 0, 0),
        (2, 1, 0, 0),
        # A quarter of the gradients, which are sent, of two moments, and of sharded parameters.
        (1, 4, WEIGHTS // 4 * 3, WEIGHTS // 4),
        (2, 4, WEIGHTS // 4 * 3, WEIGHTS // 4),
        (3, 4, WEIGHTS, WEIGHTS // 4),
        (3, 2, 2 * WEIGHTS, WEIGHTS // 2),
    ],
)
def test_survive_adds_second_copies(level: int, data: int, held: int, sent: int) -> None:
    assert predict(record(), choice(level, data), GPU).second_copies == (held, sent)


def test_sharded_parameters_are_gathered_by_unit():
    plan = predict(record(), choice(3), GPU)
    assert plan.states["optimizer"] == WEIGHTS
    # The unit at work, and the next one on its way, in forward of the first.
    assert list(plan.parts["gathered"]) == [WEIGHTS, WEIGHTS // 2, WEIGHTS, WEIGHTS // 2, 0]


def test_frozen_weights_are_gathered_in_4_bits_and_expanded():
    base = [
        ParameterRecord(f"base {n}", (64, 64), "float32", 4, n, -1, -1, quantised=True)
        for n in (1, 2)
    ]
    frozen = record(parameters=(*record().parameters, *base))
    packed = 4096 // 64 * (32 + 4)
    gathered = predict(frozen, choice(3), GPU).parts["gathered"]
    # The next unit is on its way in 4 bits, and its buffer exists already.
    assert list(gathered) == [2 * WEIGHTS + packed, WEIGHTS, 2 * WEIGHTS + packed, WEIGHTS, 0]


def test_offloaded_states_use_no_device_memory():
    row = Placement.zero(2).resting(optimizer=Tier("cpu"))
    plan = predict(record(), Choice(row=row, data=2, micro_batch=1), GPU)
    # Two moments, and a master because the parameters are in other memory. This rank has half.
    assert plan.tiers["cpu"] == plan.states["optimizer"] + plan.states["gradients"]
    assert plan.states["optimizer"] == 3 * WEIGHTS // 2
    assert plan.at_peak()["optimizer"] == 0


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_one_device_holds_all_states(level):
    states = predict(record(), choice(level, data=1), GPU).states
    assert states["parameters"] == WEIGHTS
    assert states["optimizer"] == 2 * WEIGHTS


def test_record_round_trips_through_its_file(tmp_path):
    made = record(total_batch=7)
    made.write(tmp_path / "record.json")
    assert StepRecord.read(tmp_path / "record.json") == made


def test_gradients_on_disk_need_a_whole_buffer_for_sums():
    # Only a shard in memory is summed in place, without the buffer.
    shared = Hardware(apart=False, shares=True)
    in_memory, on_disk = (
        predict(record(), replace(choice(2), row=row), shared).parts["buckets"]
        for row in (
            Placement.zero(2),
            Placement.zero(2).resting(optimizer=Tier("nvme", "disk")),
        )
    )
    assert set(in_memory) == {WEIGHTS // 2}
    assert set(on_disk) == {WEIGHTS}


def test_shared_memory_keeps_two_copies_of_exchanged_tokens():
    exchanged = tuple(SequenceExchange(nbytes, 1, "forward") for nbytes in (100, 700, 300))
    for hardware, kept in ((Hardware(apart=False, shares=True), 1400), (GPU, 0)):
        plan = predict(record(exchanged=exchanged), choice(0), hardware)
        assert set(plan.parts["buckets"]) == {kept}
    # The pool does not take one that is too large, so it exists only while the unit runs.
    longest = SequenceExchange(POOLED + 1, 1, "forward")
    for others in ((), exchanged):
        plan = predict(
            record(exchanged=(longest, *others)), choice(0), Hardware(False, shares=True)
        )
        kept = 1400 if others else 0
        assert list(plan.parts["buckets"]) == [kept + POOLED + 1, *[kept] * 4]


@pytest.mark.parametrize("per_host", [1, 8])
def test_host_memory_is_the_share_of_one_device(monkeypatch, per_host):
    """A rank may use the share, however many ranks are on its host."""
    used = {"cpu": 30 * 2**30}
    predicted = SimpleNamespace(peak=1, tiers=used)
    monkeypatch.setattr(search, "predict", lambda *_: predicted)
    for share, over in ((40, 0), (20, 10 * 2**30)):
        numbers = {"host_memory_gib": float(share * 2**30)}
        device = SimpleNamespace(number=lambda name, numbers=numbers: numbers.get(name))
        question = SimpleNamespace(
            record=lambda *_: SimpleNamespace(no_pipeline=""),
            cluster=SimpleNamespace(device=device, per_host=per_host),
            hardware=None,
            clock=None,
            capacity=2,
        )
        axes = {"tensor": 1, "expert": 1, "context": 1, "pipeline": 1}
        mesh = SimpleNamespace(data=8, schedule="1f1b", **axes)
        line = search.measure(question, mesh, Placement.zero(2), PLAIN, (1, 1))
        assert line.over_host == over
        assert line.fits == (over == 0)
