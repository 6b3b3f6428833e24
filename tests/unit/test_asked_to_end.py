"""Signals to end a run whose loop steps several engines."""

import signal
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.engine import Engine
from shardwise.world.world import World
from tests.unit.two_engines import engines, step

__all__ = ["engines"]


def test_finishes_the_body_of_the_loop_first(
    solo: World, tmp_path: Path, engines: list[Engine]
) -> None:
    """The second engine makes all its steps of a batch, which a resume would not repeat."""
    both = sw.Engines(first=engines[0], second=engines[1])
    both.save(tmp_path)
    solo.preemption.asked = signal.SIGTERM
    loader = sw.Loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=4)
    engines[0].track(loader=loader)

    def train() -> None:
        for _ in loader:
            for number in (0, 1, 1):
                step(engines[number])

    with pytest.raises(SystemExit):
        train()
    assert [engine.steps for engine in engines] == [1, 2]
    assert (tmp_path / "together-2.json").is_file()


def test_saves_an_engine_again_that_has_not_stepped(
    solo: World, tmp_path: Path, engines: list[Engine]
) -> None:
    """Its tracked objects have advanced with the steps of the other engine."""
    both, seen = sw.Engines(first=engines[0], second=engines[1]), {"batches": 0}
    engines[1].track(seen=seen)
    both.resume(tmp_path)
    for engine in engines:
        step(engine)
    both.save(tmp_path)
    solo.preemption.asked = signal.SIGTERM
    step(engines[0])
    seen["batches"] = 7
    with pytest.raises(SystemExit):
        step(engines[0])
    seen["batches"] = 0
    both.resume(tmp_path)
    assert [engine.steps for engine in engines] == [2, 1]
    assert seen == {"batches": 7}


@pytest.mark.parametrize("shares", [False, True])
def test_rewinds_draws_for_a_step_that_does_not_follow(
    solo: World, tmp_path: Path, engines: list[Engine], shares: bool
) -> None:
    """Without a Loader, a resume repeats the draw for the next step."""
    (engine, _), drawn = engines, []
    engine.resume(tmp_path)

    def train(until: int) -> None:
        while engine.steps < until:
            with solo.alike():
                drawn.append(torch.rand(1).item())
            if shares:
                solo.share(torch.ones(4, 2))
            step(engine)

    train(1)
    solo.preemption.asked = signal.SIGTERM
    with pytest.raises(SystemExit):
        train(9)
    solo.preemption.asked = solo.preemption.agreed = 0
    engine.resume(tmp_path)
    assert engine.steps == 2
    train(3)
    assert len(drawn) == 4
    assert drawn[2] == drawn[3]


def test_keeps_draws_between_two_loops(solo: World, tmp_path: Path, engines: list[Engine]) -> None:
    (engine, _), drawn = engines, []
    loader = sw.Loader(torch.utils.data.TensorDataset(torch.ones(4, 2)), batch_size=4)
    engine.track(loader=loader)
    engine.resume(tmp_path)

    def epoch() -> None:
        for _ in loader:
            step(engine)
        with solo.alike():
            drawn.append(torch.rand(1).item())

    solo.preemption.asked = signal.SIGTERM
    epoch()
    with pytest.raises(SystemExit):
        epoch()
    solo.preemption.asked = solo.preemption.agreed = 0
    engine.resume(tmp_path)
    epoch()
    assert drawn[0] != drawn[1]
