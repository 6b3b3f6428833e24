"""The clock: operations, collectives, overlap, pipelines, and a step of a hand-written record."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from shardwise.layout.placement import Placement, Tier
from shardwise.parallel.pipeline import schedule as tables
from shardwise.tools.plan.catalogue import GIB, Curve, Device, NetworkLink
from shardwise.tools.plan.choice import Choice
from shardwise.tools.plan.clock import (
    EXPANSION_BYTES,
    ROUNDING_BYTES,
    bytes_of,
    step_estimate,
)
from shardwise.tools.plan.cluster import Cluster
from shardwise.tools.plan.collectives import (
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    group_of,
    reduce_scatter_seconds,
    send_seconds,
)
from shardwise.tools.plan.layout import lay_out
from shardwise.tools.plan.meshes import meshes
from shardwise.tools.plan.operations import Work, busy
from shardwise.tools.plan.overlap import UnitTimes, backward_pass, forward_pass
from shardwise.tools.plan.pipeline_time import _walked, pipeline_seconds
from shardwise.tools.plan.record import (
    GroupRecord,
    LayerRecord,
    Operation,
    ParameterRecord,
    RoutedTokens,
    SequenceExchange,
    StepRecord,
    UnitUse,
)

NEAR, FAR = NetworkLink("near", "near", 100e9, 0.0), NetworkLink("far", "far", 10e9, 0.0)
DEVICE = Device(
    name="Box",
    title="Box",
    inside="near",
    between="far",
    per_host=4,
    numbers={
        "fp32_tflops": 1e12,
        "memory_gib": 8 * GIB,
        "memory_tb_per_s": 1e12,
        "host_gb_per_s": 10e9,
        "host_memory_gb_per_s": 20e9,
    },
    curves={"matmul": Curve(((1.0, 0.5),)), "memory": Curve(((1.0, 0.5),))},
    launch=1e-6,
)


def _cluster(hosts: int = 1, per_host: int = 4) -> Cluster:
    return Cluster(hosts, per_host, DEVICE, NEAR, FAR)


def test_operation_takes_the_longest_of_arithmetic_traffic_and_launch() -> None:
    assert busy([Work(1e9, 1, "fp32")], DEVICE).matmul == pytest.approx(2e-3)
    assert busy([Work(1e9, 1e10, "fp32")], DEVICE).memory == pytest.approx(2e-2)
    assert busy([Work(0, 8, count=5)], DEVICE).seconds == pytest.approx(5e-6)
    both = busy([Work(1e9, 1, "fp32"), Work(0, 1e9)], DEVICE)
    assert (both.matmul, both.memory, both.launch) == pytest.approx((2e-3, 2e-3, 0))


def test_rings_move_the_published_bytes() -> None:
    group = group_of(_cluster(), 4, 1)
    assert reduce_scatter_seconds(1e9, group) == pytest.approx(0.75 * 0.01)
    assert all_gather_seconds(1e9, group) == pytest.approx(0.75 * 0.01)
    assert all_reduce_seconds(1e9, group) == pytest.approx(1.5 * 0.01)
    assert all_reduce_seconds(1e9, group_of(_cluster(), 1, 1)) == 0
    slow = replace(NEAR, latency=1e-3)
    assert reduce_scatter_seconds(1.0, Group(4, 1, slow, FAR)) == pytest.approx(3e-3, rel=1e-3)
    assert send_seconds(1e9, FAR) == pytest.approx(0.1)


def test_group_on_several_hosts_exchanges_slices() -> None:
    group = group_of(_cluster(2), 8, 1)
    assert (group.inside, group.hosts) == (4, 2)
    inside, between = 0.75 * 1e9 / 100e9, 0.5 * 0.25e9 / 10e9
    assert reduce_scatter_seconds(1e9, group) == pytest.approx(inside + between)
    strided = group_of(_cluster(2), 4, 2)  # two of its ranks on each host
    assert (strided.inside, strided.hosts) == (2, 2)
    assert group_of(_cluster(2), 2, 4).inside == 1


def test_tree_is_used_if_hops_cost_more_than_bytes() -> None:
    slow = replace(NEAR, latency=1e-3)
    group = Group(64, 1, slow, FAR)
    assert all_reduce_seconds(1.0, group) == pytest.approx(12e-3, rel=1e-3)
    assert all_reduce_seconds(1e12, group) < 2 * 1e12 / 100e9 + 0.126


def test_gathers_overlap_the_previous_unit() -> None:
    units = [UnitTimes(2.0, 4.0, gather=1.0)] * 3
    assert forward_pass(units).computed == 1.0 + 3 * 2.0  # the first gather only
    slow = [UnitTimes(1.0, 1.0, gather=3.0)] * 3
    assert forward_pass(slow).computed == 3 * 3.0 + 1.0  # gathers one after the other
    assert forward_pass([UnitTimes(2.0, 4.0)] * 3).computed == 6.0


def test_reductions_overlap_the_following_backward() -> None:
    units = [UnitTimes(1.0, 2.0, reduce=1.5)] * 3
    passed = backward_pass(units, reduced=True)
    assert (passed.computed, passed.reduced) == (6.0, 7.5)
    late = backward_pass(units, reduced=True, overlap=False)
    assert (late.computed, late.reduced) == (6.0, 10.5)
    felt = backward_pass(units, reduced=True, hidden=0.0)
    assert felt.reduced == pytest.approx(6.0 + 3 * 1.5)
    assert backward_pass(units, reduced=False).reduced == 6.0


@pytest.mark.parametrize(
    ("name", "ranks", "micros"),
    [(n, r, m) for n, r, m in product(("gpipe", "1f1b", "interleaved"), (2, 4), (4, 8))],
)
def test_closed_form_equals_the_length_of_the_table(name: str, ranks: int, micros: int) -> None:
    stages = ranks * (2 if name == "interleaved" else 1)
    forward, backward = (1.0,) * stages, (2.0,) * stages
    closed = pipeline_seconds(name, ranks, micros, forward, backward)
    assert closed == pytest.approx(_walked(name, ranks, micros, forward, backward, 0.0))


def test_length_matches_the_engines_idle_fraction() -> None:
    drawn = random.Random(3)
    for name in ("gpipe", "1f1b", "interleaved"):
        stages = 8 if name == "interleaved" else 4
        forward = tuple(drawn.uniform(1, 2) for _ in range(stages))
        backward = tuple(drawn.uniform(2, 4) for _ in range(stages))
        length = pipeline_seconds(name, 4, 8, forward, backward)
        times = {"F": forward, "B": backward, "I": backward, "W": backward}
        idle = tables.idle_fraction(name, 4, stages, 8, times)  # type: ignore[arg-type]
        work = 8 * (sum(forward) + sum(backward))
        assert 1 - work / (4 * length) == pytest.approx(idle)


def test_zero_bubble_waits_less_and_sends_take_time() -> None:
    even = ((1.0,) * 4, (2.0,) * 4)
    assert pipeline_seconds("zero-bubble", 4, 8, *even) < pipeline_seconds("1f1b", 4, 8, *even)
    plain = pipeline_seconds("1f1b", 4, 8, *even)
    assert pipeline_seconds("1f1b", 4, 8, *even, 0.1) >= plain + 6 * 0.1


PARAMETERS = 50_000_000


def _record(units: int = 2) -> StepRecord:
    """Return a script of `units` equal units: one product of 1 GFLOP forward, two backward."""
    forward = [
        Operation("mm", 10**9, 0, "float32", u, "forward", "a.py:1", layer=u) for u in range(units)
    ]
    back = [
        Operation("mm", 10**9, 0, "float32", u, "backward", "a.py:1", layer=u)
        for u in reversed(range(units))
        for _ in range(2)
    ]
    last = {u: units + 2 * (units - u) for u in range(units)}
    weights = [
        ParameterRecord(f"{u}.weight", (PARAMETERS,), "float32", 4, u, 0, last[u], layer=u)
        for u in range(units)
    ]
    group = GroupRecord("AdamW", 0, 0, ("exp_avg", "exp_avg_sq"), True, True, True, True)
    uses = [UnitUse(u, "forward", u, u + 1) for u in range(units)]
    return StepRecord(
        operations=(*forward, *back),
        tensors=(),
        parameters=tuple(weights),
        groups=(group,),
        units=tuple(f"blocks.{u}" for u in range(units)),
        uses=tuple(uses),
        batch_size=1,
        total_batch=4,
        backward=units,
        precision="fp32",
        activations="kept",
        layers=tuple(LayerRecord(f"blocks.{u}", PARAMETERS, True) for u in range(units)),
    )


def _seconds(level: int, data: int, micros: int = 1, **more: object) -> dict[str, float]:
    row, cluster = more.pop("row", Placement.zero(level)), more.pop("cluster", _cluster())
    choice = Choice(
        row=row, data=data, micro_batch=1, micro_batches=micros, bucket_mb=1e6, **more  # type: ignore[arg-type]
    )  # fmt: skip
    estimate = step_estimate(_record(), choice, cluster)  # type: ignore[arg-type]
    assert estimate.seconds == pytest.approx(sum(estimate.parts.values()))
    return estimate.parts


def _with_experts() -> StepRecord:
    """Return the record with 4 experts in its first unit, each in a parameter of its own."""
    record = _record()
    first, *rest = record.parameters
    experts = [
        replace(first, name=f"e.{n}", shape=(PARAMETERS // 4,), experts=4, expert=n)
        for n in range(4)
    ]
    routed = (RoutedTokens(8_000_000, 0, 4, True),)
    return replace(record, parameters=(*experts, *rest), routed=routed)


def test_experts_on_several_ranks_exchange_tokens() -> None:
    record, cluster = _with_experts(), _cluster()

    def parts(expert: int) -> dict[str, float]:
        choice = Choice(row=Placement.zero(1), data=4, micro_batch=1, bucket_mb=1e6, expert=expert)
        return step_estimate(record, choice, cluster).parts

    replicated, spread = parts(1), parts(4)
    assert "token exchanges" not in replicated
    # Each of two exchanges per pass sends 3 of 4 parts over the links inside the host.
    sent = 3 * (8_000_000 / 4 / cluster.inside.bandwidth + cluster.inside.latency)
    assert spread["token exchanges"] == pytest.approx(4 * sent)
    # No other rank holds the same experts, so their values are neither reduced nor published.
    assert spread["publishing parameters"] == pytest.approx(replicated["publishing parameters"] / 2)
    assert spread["update"] == pytest.approx(replicated["update"])


def test_attention_over_parts_of_sequences_exchanges_tokens() -> None:
    cluster = _cluster()
    exchanged = (
        SequenceExchange(8_000_000, 0, "forward"),
        SequenceExchange(4_000_000, -1, "backward"),
    )
    record = replace(_record(), context=4, exchanged=exchanged)
    choice = Choice(row=Placement.zero(0), data=4, context=4, micro_batch=1, bucket_mb=1e6)
    assert choice.samples == 1  # of one context group
    # The first rank sends 3 of 4 parts over the links inside the host.
    sent = sum(3 * (n / 4 / cluster.inside.bandwidth + cluster.inside.latency) for n in (8e6, 4e6))
    assert step_estimate(record, choice, cluster).parts["token exchanges"] == pytest.approx(sent)
    assert record.sent_bytes == 9_000_000


@pytest.mark.parametrize(
    ("data", "experts", "sizes"), [(8, 16, [2, 4, 8]), (8, 5, [2, 4]), (6, 8, [2]), (4, 0, [])]
)
def test_expert_sizes_divide_the_replicas(data: int, experts: int, sizes: list[int]) -> None:
    cluster = Cluster(1, data, DEVICE, NEAR, FAR)
    found = [each.expert for each in meshes(cluster, [(1, 1)], 0, 0, experts) if each.expert > 1]
    assert found == sizes


@pytest.mark.parametrize(
    ("experts", "expert", "ranks", "held"),
    [
        (0, -1, 4, 120),
        (5, -1, 2, 72),
        (5, 2, 2, 120),
        (5, 1, 2, 0),
        (5, 4, 5, 120),
        (6, -1, 1, 120),
    ],
)
def test_elements_on_the_rank_with_the_most_experts(
    experts: int, expert: int, ranks: int, held: int
) -> None:
    shape = (experts or 5, 120 // (experts or 5)) if experts != 6 else (6, 20)
    record = ParameterRecord("p", shape, "float32", 4, 0, 0, 0, experts=experts, expert=expert)
    assert record.held(ranks) == held


def test_step_on_one_device_is_products_and_update() -> None:
    parts = _seconds(0, 1)
    assert parts["matrix products"] == pytest.approx(6 * 2e-3)
    # AdamW in fp32: the gradient three times, three states read and written
    assert bytes_of(_record(), 25.0).update == 12 + 24
    assert parts["update"] == pytest.approx(2 * PARAMETERS * 36 / 0.5e12)
    assert set(parts) == {"matrix products", "update"}


def test_quantised_states_and_weights_cost_traffic() -> None:
    record, (group,) = _record(), _record().groups
    narrow = replace(record, groups=(replace(group, quantised=True),))
    assert bytes_of(narrow, 25.0).update == 12 + 24 + 2 * ROUNDING_BYTES
    base = ParameterRecord("base", (10**6,), "bfloat16", 2, 0, -1, -1, quantised=True)
    frozen = replace(record, parameters=(*record.parameters, base))
    for level, data in ((0, 1), (0, 2), (3, 2)):
        choice = Choice(row=Placement.zero(level), data=data, micro_batch=1, micro_batches=1)
        parts = step_estimate(frozen, choice, _cluster()).parts
        # Each rank expands all of them, in forward and in backward. Gathers send 4 bits.
        assert parts["memory traffic"] == pytest.approx(2 * EXPANSION_BYTES * 10**6 / 0.5e12)
        full = replace(record, parameters=(*record.parameters, replace(base, quantised=False)))
        waits = [
            step_estimate(each, choice, _cluster()).parts.get("waits for parameters", 0.0)
            for each in (record, frozen, full)
        ]
        # 4.25 of 16 bits
        assert waits[1] - waits[0] == pytest.approx((waits[2] - waits[0]) * 4.25 / 16, rel=1e-3)
        assert (waits[2] > waits[0]) is (level == 3)


def test_rows_wait_for_different_collectives() -> None:
    sent = 2 * PARAMETERS * 4 / 2 / 100e9  # of a ring of two, one way
    replicated, sharded = _seconds(0, 2), _seconds(1, 2)
    # the first unit's all-reduce runs in parallel with the other unit's backward of 4 ms
    assert replicated["waits for gradients"] == pytest.approx(2 * sent - min(sent, 4e-3))
    assert sharded["publishing parameters"] == pytest.approx(sent)
    assert sharded["update"] == pytest.approx(replicated["update"] / 2)
    three = _seconds(3, 2)
    assert "publishing parameters" not in three
    # two gathers in forward and two in backward: the first of each pass in the open at least
    assert three["waits for parameters"] >= sent
    many, few = _seconds(2, 2, micros=4), _seconds(1, 2, micros=4)
    # the rest of a micro-batch's reductions overlaps the next forward
    assert many["waits for gradients"] == pytest.approx(few["waits for gradients"])
    slow = Cluster(1, 4, DEVICE, NetworkLink("slow", "slow", 10e9, 0.0), FAR)
    assert _seconds(2, 2, 4, cluster=slow)["waits for gradients"] > 3 * 5e-3


@pytest.mark.parametrize(
    ("gradients", "link", "seconds"),
    [
        # The host's update takes longer than the copies, which run at the same time.
        ("device", 10e9, PARAMETERS * 28 / 20e9),
        ("device", 1e9, PARAMETERS * 4 / 1e9),
        # The backward pass takes 8 ms. Gradients are copied during that time.
        ("cpu", 100e9, PARAMETERS * 28 / 20e9),
        ("cpu", 10e9, PARAMETERS * 28 / 20e9 + PARAMETERS * 4 / 10e9 - 8e-3),
        ("cpu", 1e9, PARAMETERS * (4 + 4) / 1e9 - 8e-3),
    ],
)
def test_offloaded_update_overlaps_with_copies(gradients: str, link: float, seconds: float) -> None:
    row = Placement.zero(2).resting(optimizer=Tier("cpu"), gradients=Tier(gradients))
    device = replace(DEVICE, numbers=DEVICE.numbers | {"host_gb_per_s": link})
    parts = _seconds(2, 2, row=row, cluster=Cluster(1, 4, device, NEAR, FAR))
    assert parts["offload"] == pytest.approx(seconds)  # two units, two ranks
    assert "update" not in parts


def test_pipeline_waits_and_divides_the_units() -> None:
    parts = _seconds(0, 1, micros=4, pipeline=2)
    assert parts["matrix products"] == pytest.approx(4 * 3 * 2e-3)
    assert parts["pipeline waits"] == pytest.approx(3 * 2e-3)  # (p - 1) micro-batches of a stage


def test_names_a_disk_missing_from_the_catalogue() -> None:
    row = Placement.zero(1).resting(optimizer=Tier("nvme", "/scratch"))
    with pytest.raises(Exception, match="no disk_gb_per_s for Box"):
        _seconds(1, 2, row=row)


@pytest.mark.parametrize(
    ("devices", "beside", "found"),
    [(8, [1, 2], [(8, 1, 2), (8, 1, 4), (4, 2, 2), (4, 2, 4)]), (4, [1], [(4, 1, 2), (4, 1, 4)])],
)
def test_expert_sizes_are_multiples_of_tensor_sizes(
    devices: int, beside: list[int], found: list[tuple[int, int, int]]
) -> None:
    cluster = Cluster(1, devices, DEVICE, NEAR, FAR)
    sizes = [(1, 1), (2, 1)]
    several = meshes(cluster, sizes, 0, 0, 4, [(each, 1) for each in beside])
    assert [(m.data, m.tensor, m.expert) for m in several if m.expert > 1] == found


@pytest.mark.parametrize(
    ("expert", "tensor", "held", "shares"),
    [(4, 2, 1, [1.0, 1.0]), (2, 2, 2, [0.5, 0.5]), (2, 1, 2, [1.0, 1.0]), (1, 2, 4, [0.5, 0.5])],
)
def test_ranks_of_two_replicas_hold_and_shard_experts(
    expert: int, tensor: int, held: int, shares: list[float]
) -> None:
    """`held` is the number of a rank's experts. `shares` are the parts that replicas own."""
    size = 64 * held
    record = replace(
        _with_experts(),
        parameters=tuple(
            replace(each, shape=(64,)) for each in _with_experts().parameters if each.experts
        ),
    )
    layout = lay_out(record, Placement.zero(1), 2, expert=expert, tensor=tensor)
    assert sum(bucket.layout.numel for bucket in layout.buckets) == size
    for rank, share in enumerate(shares):
        assert sum(bucket.share(rank) for bucket in layout.buckets) == share * size
