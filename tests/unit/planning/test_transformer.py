"""Formulas for transformers against the published ones."""

from dataclasses import replace

import pytest

from shardwise.tools.plan.cluster import Cluster
from shardwise.tools.plan.parallelism import Parallelism
from shardwise.tools.plan.transformer import (
    Software,
    Transformer,
    _layers_of,
    step_seconds,
    transformer_times,
)

from .test_clock import DEVICE, FAR, NEAR

GPT3 = Transformer(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=51200)


def test_parameter_counts_match_narayanan() -> None:
    h, layers = GPT3.hidden, GPT3.layers
    formula = 12 * layers * h**2 * (1 + 13 / (12 * h) + (51200 + 2048) / (12 * layers * h))
    assert GPT3.parameters == pytest.approx(formula, rel=1e-6)


def test_flops_match_korthikanti() -> None:
    layers, h, s, batch = GPT3.layers, GPT3.hidden, GPT3.sequence, 64
    formula = 72 * batch * layers * s * h**2 * (1 + s / (6 * h) + 51200 / (12 * h * layers))
    assert GPT3.model_flops(batch) == pytest.approx(formula)
    # and of the operations that the clock takes: forward once, backward twice
    works = GPT3.forward(1, 1, sequence_parallel=False)
    back = GPT3.backward(1, 1, sequence_parallel=False)
    head = sum(w.flops * w.count for w in GPT3.head(1, 1))
    layer = sum(w.flops * w.count for w in works + back)
    assert layers * layer + 3 * head == pytest.approx(GPT3.model_flops(1))


def test_tensor_parallelism_divides_the_products() -> None:
    whole, part = (
        sum(w.flops for w in GPT3.forward(2, t, sequence_parallel=False)) for t in (1, 8)
    )
    assert part == pytest.approx(whole / 8)


@pytest.mark.parametrize(
    ("recompute", "sequence", "factor"),
    [
        ("none", False, 10 + 24 / 8 + 80 / 8),
        ("none", True, (34 + 80) / 8),
        ("selective", False, 10 + 24 / 8),
        ("selective", True, 34 / 8),
        ("full", False, 2),
    ],
)
def test_activation_bytes_match_korthikanti(recompute: str, sequence: bool, factor: float) -> None:
    sbh = 2048 * 12288
    kept = GPT3.activation_bytes(1, 8, recompute, sequence_parallel=sequence)
    assert kept == pytest.approx(factor * sbh)  # 5as/h is 80


def test_layers_are_divided_among_stages() -> None:
    assert _layers_of(96, 8) == [12] * 8
    assert _layers_of(126, 128) == [0, *[1] * 126, 0]
    assert _layers_of(10, 4) == [2, 3, 3, 2]
    assert _layers_of(11, 4) == [3, 3, 3, 2]


def test_recomputation_and_replicas_cost_time() -> None:
    model = Transformer(layers=4, hidden=1024, heads=16, sequence=512, vocabulary=1024)
    device = replace(DEVICE, numbers={**DEVICE.numbers, "bf16_tflops": 1e14})
    cluster = Cluster(1, 4, device, NEAR, FAR)

    def seconds(**more: object) -> float:
        run = Parallelism(micro_batch=2, micros=4, **more)  # type: ignore[arg-type]
        return step_seconds(transformer_times(model, run, cluster, Software()))

    assert seconds() < seconds(recompute="selective") < seconds(recompute="full")
    assert seconds() < seconds(data=4) < seconds(data=4, overlap=False)
    assert seconds(pipeline=2) > seconds() / 2
    assert step_seconds(transformer_times(
        model, Parallelism(micros=4), cluster, Software(host=1.0)
    )) == pytest.approx(4 * 4 * 3.0, rel=0.01)  # fmt: skip
