"""Causes of `verify --stock`, recognised in values that a run could have recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.layout import fingerprints
from shardwise.tools.verify.comparing import compare
from shardwise.tools.verify.records import FeedRecord, RecordedTraining, Step, WholeTensor
from shardwise.tools.verify.stock import findings, metrics, suspects
from shardwise.tools.verify.stock.batches import are_copies
from shardwise.tools.verify.stock.recorder import CONTRIBUTIONS
from shardwise.tools.verify.stock.stock_runs import StockRecords

RANKS = 2
Tensors = Mapping[tuple[str, str], Tensor | Mapping[int, Tensor]]
NO_FACTS: dict[str, Any] = {
    "events": [[]],
    "dtypes": ["float32"],
    "rates": [[0.1]],
    "seen": [],
    "loaders": {},
    "trained": [],
    "tensor_parallel": False,
    "groups": {},
    "reduced": [],
    "printed": [],
    "saves": [],
    "kinds": {},
    "split": [],
    "static": False,
}
TERM = {"value": 1.0, "items": 8.0, "factor": 1.0, "addends": 1, "is_sum": False}
WEIGHT, BIAS = torch.arange(1.0, 5), torch.tensor([2.0, -1.0])


def whole(values: Tensor | Mapping[int, Tensor], ranks: int) -> WholeTensor:
    copies = values if isinstance(values, Mapping) else dict.fromkeys(range(ranks), values)
    prints = {copy: fingerprints.of(each, 0) for copy, each in copies.items()}
    return WholeTensor(prints, copies[min(copies)].flatten(), {copy: [copy] for copy in copies})


def records(
    *steps: Tensors, ranks: int = RANKS, terms: int = 1, facts: Sequence[dict[str, Any]] = ()
) -> StockRecords:
    """Return records with the tensors of the first state and of each step."""
    made = [
        Step(
            number=number,
            loss=1.0,
            grad_norm=float("nan"),
            weight=float("nan"),
            lr=(0.1,),
            samples=(),
            fed=FeedRecord(0, 0, (0.0, 0.0), 0),
            numbers={},
            tensors={key: whole(values, ranks) for key, values in tensors.items()},
        )
        for number, tensors in enumerate(steps)
    ]
    trained = [[name for kind, name in steps[0] if kind == "model"]]
    own = [dict(each) for each in facts] or [{} for _ in range(ranks)]
    term = TERM | {"items": 8.0 * RANKS / ranks}  # the same rows for any number of ranks
    rows = [{"terms": [term] * terms, "batches": terms}] * (len(steps) - 1)
    return StockRecords(
        RecordedTraining({0: made}, facts={"driver": "plain"}),
        [NO_FACTS | {"trained": trained} | each for each in own],
        [rows] * ranks,
    )


def trained(scale: float = 1.0, bias: Tensor | Mapping[int, Tensor] = BIAS) -> list[Tensors]:
    """Return the first state and a step with gradients of `scale` times WEIGHT, and `bias`."""
    first: Tensors = {("model", "weight"): WEIGHT, ("model", "bias"): BIAS}
    step = {("gradient", "weight"): scale * WEIGHT, ("gradient", "bias"): bias}
    return [first, {**step, ("model", "weight"): WEIGHT - scale * WEIGHT}]


def suspected(reference: StockRecords, made: StockRecords) -> list[str]:
    comparison = compare(reference.training, made.training)
    return [each.name for each in suspects.suspects(reference, made, comparison, 1e-8)]


ONE = records(*trained(), ranks=1)


@pytest.mark.parametrize(
    ("scale", "bias", "name"),
    [
        (2.0, 2 * BIAS, "gradients summed"),
        (0.5, BIAS / 2, "gradients averaged twice"),
        (0.25, BIAS / 4, "gradients averaged twice"),
        (3.0, 3 * BIAS, "gradients scaled"),
        (2.0, {1: BIAS}, "some gradients scaled"),
        (2.0, {0: BIAS, 1: 3 * BIAS}, "gradients not reduced"),
    ],
)
def test_recognises_the_scale_of_gradients(scale: float, bias: Any, name: str) -> None:
    made = records(*trained(scale, bias))
    first = suspected(ONE, made)
    assert name in first[:2], first


@pytest.mark.parametrize(
    ("scale", "bias", "name"),
    [(0.5, BIAS / 2, "sums averaged over ranks"), (0.25, BIAS / 4, "gradients averaged twice")],
)
def test_tells_averaged_sums_from_gradients_averaged_twice(
    scale: float, bias: Tensor, name: str
) -> None:
    made = records(*trained(scale, bias))
    for term in ({"items": None, "is_sum": True}, {"items": 4.0}):
        rows = [row | {"terms": [TERM | term]} for row in made.steps[0]]
        one, two = replace(ONE, steps=[rows]), replace(made, steps=[rows] * RANKS)
        assert suspected(one, two)[0] == name


@pytest.mark.parametrize(
    ("factors", "names"),
    [([0.5, 0.25], ["clipping by a local norm"]), ([0.5, 0.5], ["gradients averaged twice"])],
)
def test_recognises_shards_scaled_by_a_factor_per_rank(
    factors: list[float], names: list[str]
) -> None:
    scales = torch.tensor(factors).repeat_interleave(2)
    steps = trained()
    changed = {("gradient", "weight"): WEIGHT * scales, ("gradient", "bias"): BIAS * scales[::2]}
    made = records(steps[0], {**steps[1], **changed}, facts=[{"split": ["weight", "bias"]}] * RANKS)
    shapes = [[("weight", (4,)), ("bias", (2,))]]
    rows = [row | {"parameters": shapes} for row in made.steps[0]]
    assert suspected(ONE, replace(made, steps=[rows] * RANKS)) == names


LARGE = "accumulation not divided"
SMALL = "accumulation divided twice"


@pytest.mark.parametrize(
    ("ranks", "window", "scale", "alone", "names"),
    [
        # One process has the same factor, so the window causes it.
        (2, 2, 2.0, (2, 2.0), [LARGE]),
        (2, 2, 0.5, (2, 0.5), [SMALL]),
        # One process has the factor 1, so the number of ranks causes it.
        (2, 2, 2.0, (2, 1.0), []),
        (2, 2, 0.5, (2, 1.0), []),
        (2, 4, 0.25, (4, 1.0), []),
        # The number of ranks explains no factor of 3.
        (2, 3, 3.0, None, [LARGE]),
        (2, 3, 3.0, (1, 1.0), [LARGE]),
        # One process is unknown, or has a single micro-batch.
        (2, 2, 2.0, None, [f"{LARGE}, or loss multiplied by the ranks"]),
        (2, 2, 0.5, (1, 1.0), [f"{SMALL}, or loss divided by the ranks"]),
        (2, 4, 0.25, None, [f"{SMALL}, or loss divided by the ranks"]),
    ],
)
def test_tells_a_factor_of_the_window_from_one_of_the_ranks(
    ranks: int, window: int, scale: float, alone: tuple[int, float] | None, names: list[str]
) -> None:
    def scaled(ranks: int, window: int, scale: float) -> StockRecords:
        made = records(*trained(), ranks=ranks)
        term = TERM | {"factor": scale / window}
        rows = [{"terms": [term] * window, "batches": window}]
        return replace(made, steps=[rows] * ranks)

    reference = None if alone is None else scaled(1, *alone)
    found = findings.findings(scaled(ranks, window, scale), reference)
    assert [each.name for each in found] == names


@pytest.mark.parametrize(
    ("batches", "names"),
    [
        ((2, 2, 2), ["mean of means"]),
        ((3, 2, 1), ["mean of means"]),  # the loader reads one batch ahead
        ((3, 2, 2), ["mean of means"]),
        ((4, 4, 4), []),  # two batches per loss
        ((3, 3, 3), []),
        ((1, 1, 1), []),  # two losses per batch
    ],
)
def test_finds_means_of_means_if_a_loader_reads_ahead(
    batches: Sequence[int], names: list[str]
) -> None:
    first, step = trained()
    made = records(first, *[step] * len(batches))
    terms = [TERM | {"items": items, "factor": 0.5} for items in (8.0, 9.0)]
    rows = [{"terms": terms, "batches": count} for count in batches]
    found = findings.findings(replace(made, steps=[rows] * RANKS))
    assert [each.name for each in found] == names


def test_a_factor_of_experts_alone_is_theirs() -> None:
    steps = trained(1.0, {1: 2 * BIAS})
    steps[0] = {**steps[0], ("model", "bias"): {1: BIAS}}
    assert suspected(ONE, records(*steps))[0] == "expert gradients multiplied"


def test_clipping_does_not_hide_a_sum() -> None:
    length = float(torch.cat([WEIGHT, BIAS]).norm())
    events = [{"events": [[f"clip {n * length} 0.5 2"]]} for n in (1, 2)]
    clipped = 0.5 / length
    one = records(*trained(clipped, BIAS * clipped), ranks=1, facts=events[:1])
    # Both are clipped to 0.5; a norm that is twice as large tells that gradients were, too.
    steps = trained(clipped, BIAS * clipped)
    steps[1] = {**steps[1], ("model", "weight"): WEIGHT * 0.9}
    assert suspected(one, records(*steps, facts=events[1:] * 2))[0] == "gradients summed"


def test_a_norm_of_some_parameters_is_found_without_a_reference() -> None:
    length = float(WEIGHT.norm())
    scale = 0.5 / length
    facts = [{"events": [[f"clip {length} 0.5 2"]]}] * 2
    steps = trained(scale, BIAS * scale)
    assert [e.name for e in findings.findings(records(*steps, facts=facts))] == [
        "norm without a part of the parameters"
    ]
    alone = [{"events": [[f"clip {length} 0.5 1"]]}] * 2  # given the weight alone
    assert findings.findings(records(*steps, facts=alone)) == []


def test_parameters_that_a_rank_does_not_have_are_not_frozen() -> None:
    steps = trained(1.0, {0: BIAS})
    steps[0] = {**steps[0], ("model", "bias"): {0: BIAS}}
    facts = [{"trained": [["weight", "bias"]]}, {"trained": [["weight"]]}]
    assert findings.findings(records(*steps, facts=facts)) == []
    steps[0] = {**steps[0], ("model", "bias"): BIAS}
    found = findings.findings(records(*steps, facts=facts))
    assert [each.name for each in found] == ["frozen on some ranks"]


@pytest.mark.parametrize("used", [1, 2])
def test_finds_dropped_micro_batches(used: int) -> None:
    one, two = torch.tensor([1.0, 0, 0, 0]), torch.tensor([0.0, 1, 0, 0])
    gradient = one if used == 1 else one + two
    kinds = zip(CONTRIBUTIONS, (one + two, one, two), strict=True)
    step = {(kind, "weight"): values for kind, values in kinds}
    reference = records(
        {("model", "weight"): WEIGHT}, {("gradient", "weight"): gradient, **step}, ranks=1, terms=2
    )
    made = records(*trained(), terms=1)
    names = [each.name for each in findings.findings(made, reference)]
    assert names == (["micro-batches dropped"] if used == 1 else [])


def test_tied_weights_are_an_embedding_and_a_linear_layer() -> None:
    values = torch.randn(6, generator=torch.Generator().manual_seed(0))
    steps: list[Tensors] = [
        {("model", "a"): values, ("model", "b"): values},
        {("model", "a"): values + 1, ("model", "b"): values + 2},
    ]
    kinds = {"kinds": {"a": "Embedding", "b": "Linear"}}
    assert [e.name for e in findings.findings(records(*steps, facts=[kinds] * 2))] == [
        "untied weights"
    ]
    copies = {"kinds": {"a": "Linear", "b": "Linear"}}
    assert findings.findings(records(*steps, facts=[copies] * 2)) == []


def test_metrics_are_means_of_unequal_parts() -> None:
    reduced = [
        [{"step": 1, "values": [value], "rows": rows}] for value, rows in ((1.0, 7), (2.0, 6))
    ]
    printed = [{"step": 1, "text": f"epoch 0: {(7 * 1.0 + 6 * 2.0) / 13:.6f}"}]
    one = records(*trained(), ranks=1, facts=[{"printed": printed}])
    made = records(*trained(), facts=[{"reduced": each, "printed": []} for each in reduced])
    assert [each.name for each in metrics.findings(one, made)] == ["metrics averaged unweighted"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("eval loss 5.2000 in 2 s", ["metric multiplied by the ranks"]),
        ("eval loss 1.3000 in 4 s", ["metric multiplied by the ranks"]),
        ("eval loss 2.6000 in 4 s", []),
        ("other words 5.2000", []),
    ],
)
def test_metrics_are_multiplied(text: str, name: list[str]) -> None:
    one, made = (
        records(*trained(), ranks=ranks, facts=[{"printed": [{"step": 1, "text": each}]}] * ranks)
        for ranks, each in ((1, "eval loss 2.6000 in 2 s"), (2, text))
    )
    assert [each.name for each in metrics.findings(one, made)] == name


def test_copies_are_batches_that_all_occur_equally_often() -> None:
    a, b = torch.ones(2, 3), torch.zeros(2, 3)
    assert are_copies([a, a])
    assert are_copies([a, b, b, a])
    assert not are_copies([a, b])
    assert not are_copies([a, a, b])
