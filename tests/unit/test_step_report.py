"""The totals of one rank are the same with and without the table of all ranks' numbers."""

import math
import random
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.engine import exchange
from shardwise.engine.step_statistics import Aggregation, StepReport
from shardwise.world.world import World
from tests.distributed.group import Groups


def report(draw: random.Random, *, parameters: int, mix: tuple[float, float]) -> StepReport:
    """Return a report whose fields are drawn at random."""
    flag = lambda: draw.random() < 0.5  # noqa: E731
    return StepReport(
        weights=[draw.uniform(0, 9)],
        losses=[draw.uniform(-9, 9)],
        squared_norm=torch.tensor(draw.uniform(0, 9), dtype=torch.float64),
        backwards=draw.randrange(3),
        shares=draw.random(),
        options=float(draw.randrange(2**32)),
        calls=float(draw.randrange(2**32)),
        rows=draw.uniform(-9, 9),
        shown=draw.uniform(0, 9),
        mix=mix,
        copies=draw.uniform(0, 9),
        used=[flag() for _ in range(parameters)],
        late=[flag() for _ in range(3)],
        news=flag(),
        several=flag(),
        unsaved=flag(),
        asked=draw.choice([0, 15]),
        written=flag(),
        divisor=draw.choice([-1.0, 0.0, 1.0, 4.0]),
        alone=flag(),
        experts=[float(draw.randrange(99)) for _ in range(draw.choice([0, 4]))],
        buffer_rows=[float(draw.randrange(9))],
    )


@pytest.mark.parametrize("mix", [(math.inf, -math.inf), (1.0, 1.0), (1.0, 1.0 + 1e-9), (1.0, 2.0)])
@pytest.mark.parametrize("parameters", [1, 17, 100])
def test_totals_of_one_rank_equal_the_joined_table(parameters, mix):
    aggregation = Aggregation(0)
    for seed in range(20):
        mine = report(random.Random(seed), parameters=parameters, mix=mix)
        assert mine.is_near
        table = [mine.row(torch.device("cpu")).tolist()]
        assert mine.totals_of_one(aggregation) == mine.join(table, aggregation)


def test_divisor_of_nan_counts_as_unknown():
    aggregation = Aggregation(0)
    mine = report(random.Random(0), parameters=1, mix=(1.0, 1.0))
    mine.divisor = math.nan
    table = [mine.row(torch.device("cpu")).tolist()]
    assert mine.totals_of_one(aggregation).divisor == mine.join(table, aggregation).divisor == 0


def gathers_in_two_steps(world: World) -> int:
    """Return how often the steps of a small model send their report to all ranks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    count, gather = 0, exchange._gather

    def counted(*given: Any, **keywords: Any) -> Any:
        nonlocal count
        count += 1
        return gather(*given, **keywords)

    exchange._gather = counted
    try:
        for _ in range(2):
            engine.backward(model(torch.ones(4, 3)).square().mean())
            engine.step()
    finally:
        exchange._gather = gather
        engine.close()
    return count


@pytest.mark.parametrize(("size", "count"), [(1, 0), (2, 2)])
def test_one_rank_sends_no_report(group: Groups, size: int, count: int) -> None:
    assert group(size)(gathers_in_two_steps) == [count] * size


def test_one_process_without_a_launcher_sends_no_report(solo: World) -> None:
    assert gathers_in_two_steps(solo) == 0
