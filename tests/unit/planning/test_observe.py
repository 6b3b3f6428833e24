"""Steps observed with two batch sizes: fitting between them, and reasons not to."""

from dataclasses import replace
from unittest import mock

import pytest

from shardwise.errors import LaunchError
from shardwise.tools.plan import observe, plans
from shardwise.tools.plan.catalogue import read_catalogue
from shardwise.tools.plan.cluster import parse_cluster
from shardwise.tools.plan.observe import PLAIN, ObservedStep, Script, Way
from shardwise.tools.plan.record import Operation, RoutedTokens, StepRecord, TensorLife


def record(samples, *names):
    """Return a step with operations of these names. Each makes a tensor of 4 x `samples` bytes."""
    operations = tuple(
        Operation(name, 10 * samples, 8 * samples, "float32", -1, "forward", f"train.py:{n}",
                  ((samples, 2),))
        for n, name in enumerate(names)
    )  # fmt: skip
    tensors = tuple(
        TensorLife(4 * samples, n, n, -1, "", name, (samples,), "float32", saved=False)
        for n, name in enumerate(names)
    )
    return StepRecord(
        operations, tensors, (), (), (), (), samples, 8, len(names), "fp32", "kept"
    )  # fmt: skip


def test_sizes_are_linear_between_two_observations():
    step = ObservedStep(record(8, "mm", "add"), record(4, "mm", "add"))
    assert step.difference() == ""
    assert step.knows(2)
    made = step.at(2)
    assert made.operations[0].flops == 20
    assert made.operations[1].shapes == ((2, 2),)
    assert made.tensors[0].nbytes == 8


def test_names_the_first_operation_that_differs():
    step = ObservedStep(record(8, "mm", "add", "sum"), record(4, "mm", "mul", "sum"))
    why = "with 8 and with 4 samples it makes different operations: add and mul (train.py:1)"
    assert step.difference() == why
    assert not step.knows(2)
    assert step.at(4) is step.small
    with pytest.raises(LaunchError, match=r"observed with 8 samples.*add and mul \(train\.py:1\)"):
        step.at(2)


def test_names_an_operation_that_only_one_record_has():
    step = ObservedStep(record(8, "mm", "add"), record(4, "mm"))
    assert "add and no more (train.py:1)" in step.difference()


def test_refuses_to_fit_tensors_with_different_lifetimes():
    small = record(4, "mm", "add")
    longer = replace(small.tensors[0], died=1)
    step = ObservedStep(record(8, "mm", "add"), replace(small, tensors=(longer, small.tensors[1])))
    assert step.difference().endswith("its tensors have different lifetimes")


def test_says_that_only_one_size_was_observed():
    assert ObservedStep(record(8, "mm")).difference() == "it was observed with one batch size only"


def test_a_batch_that_ignores_its_loader_is_one_batch_size():
    fixed = replace(record(8, "mm"), total_batch=8)
    with mock.patch.object(observe, "observe", return_value=fixed):
        step = observe.observe_sizes(Script(("train.py",)))
    assert step.small is None
    with pytest.raises(LaunchError, match="observed with one batch size only"):
        step.at(4)


@pytest.mark.parametrize("spread", [False, True])
def test_a_failure_with_split_experts_does_not_stop_the_search_without(spread):
    """Observe --tensor 2, 4 and 8, each alone and together with --expert, of which one fails."""
    tried = []

    def observe(way):
        tried.append((way.tensor, way.spread))
        if way.spread == spread:
            raise LaunchError("no")
        return ObservedStep(record(8, "mm"))

    routed = replace(record(8, "mm"), routed=(RoutedTokens(64, -1, 8, divisible=True),))
    steps = {PLAIN: ObservedStep(routed)}
    cluster = parse_cluster("8xH100", read_catalogue(()))
    notes = list(plans._observe_parts(Script(("train.py",), ()), cluster, steps, observe))
    assert sorted(tried) == sorted([(2, spread), *((n, not spread) for n in (2, 4, 8))])
    assert set(steps) == {PLAIN, *(Way(tensor=n, spread=not spread) for n in (2, 4, 8))}
    beside = " together with --expert" if spread else ""
    assert notes[0] == f"--tensor 2 was not tried{beside}: no"


def test_a_failure_with_split_layers_and_sequences_does_not_stop_the_search():
    def observe(way):
        if way.tensor == 2 or (way.activations, way.context) == ("recomputed", 2):
            raise LaunchError("no")
        return ObservedStep(record(8, "mm"))

    steps = {way: ObservedStep(record(8, "mm")) for way in (PLAIN, Way(tensor=2), Way(tensor=4))}
    cluster = parse_cluster("8xH100", read_catalogue(()))
    request = plans.PlanRequest(Script(("train.py",), ()), "8xH100", context=2)
    notes = list(plans._observe_contexts(request, cluster, steps, observe, splits=True))
    assert notes == [
        f"--context 2 with {method} and --tensor 2 was not tried: no" for method in plans.METHODS
    ]
    assert {Way(tensor=4, context=2, method=method) for method in plans.METHODS} < set(steps)
    notes = list(plans._observe_recomputed(steps, observe))
    assert len(notes) == 1 + 4  # --tensor 2, and all with --context 2
    assert f"{Way('recomputed', context=2, method='gathered')} was not tried: no" in notes
    assert Way("recomputed", tensor=4) in steps


@pytest.mark.parametrize("shape", [(8, 12), (12, 8)])
def test_reads_tokens_per_sample_of_either_order_of_dimensions(shape):
    ids = TensorLife(768, 0, 0, -1, "", "batch", shape, "int64", saved=False)
    assert plans.tokens_per_sample(replace(record(8, "mm"), tensors=(ids,))) == 12
