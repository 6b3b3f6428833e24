"""With `--spares`, other workers replace lost ones, and the result stays exact."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.disk import wait_until
from tests.random_losses.drawing import ENTERS, JOINS
from tests.random_losses.reference import STEPS, check
from tests.system.launcher import Launcher, Ran, script

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="--survive needs Linux"),
    pytest.mark.usefixtures("warm_programs"),
]

CASES = [
    # size, spares, --zero, transport, loop, optimizer, kills
    (2, 1, 2, "auto", "steps", "adamw", ["1:backward:2"]),
    (3, 2, 0, "gloo", "plain", "sgd", ["0:reduce:2", "1:refilled:-1"]),
]
MORE = [
    (2, 1, 3, "auto", "steps", "writes", ["0:forward:1"]),
    (2, 1, 1, "auto", "steps", "adamw", ["1:update:3:TERM"]),
    (3, 1, 3, "gloo", "steps", "adamw", ["1:gathered:2", "0:exchange:9"]),
    (2, 1, 2, "gloo", "steps", "writes", ["0:save:4"]),
    *(
        (3, 2, (number + rank) % 4, "auto", "steps", "sgd", ["1:reduce:2", f"{rank}:{moment}:-1"])
        for rank, moments in ((0, JOINS), (2, JOINS), (3, ENTERS))
        for number, moment in enumerate(moments)
    ),
]


def run(
    shardwise: Launcher,
    size: int,
    spares: int,
    zero: int,
    transport: str,
    *words: str,
    most: int = 1,
) -> tuple[Ran, list[int]]:
    """Run the script, and return the ranks that have finished, in their order."""
    flags = ["-n", str(size), "--survive", str(most), "--spares", str(spares), "--zero", str(zero)]
    ran = shardwise.run(
        *("run", *flags, "--transport", transport, "--timeout", "60", script("survives"), *words),
        env={"TESTS_RANKS": str(size)},
    )
    assert ran.code == 0, ran.err
    found = re.findall(rf"rank (\d+) is (\d+) of (\d+) after step {STEPS}", ran.out)
    places = {int(place): int(rank) for rank, place, _ in found}
    assert sorted(places) == list(range(len(found)))
    assert {int(count) for *_, count in found} == {len(found)}
    return ran, [places[place] for place in range(len(found))]


def joined(ran: Ran) -> set[int]:
    """Return the ranks that have joined."""
    found = re.findall(r"ranks? ([\d, ]+) joined after step", ran.out)
    return {int(rank) for ranks in found for rank in ranks.split(", ")}


@pytest.mark.parametrize(
    ("size", "spares", "zero", "transport", "loop", "kind", "kills"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)],
)
def test_a_spare_replaces_a_lost_rank(
    shardwise: Launcher,
    size: int,
    spares: int,
    zero: int,
    transport: str,
    loop: str,
    kind: str,
    kills: list[str],
) -> None:
    ran, order = run(shardwise, size, spares, zero, transport, loop, kind, "out", *kills)
    # A main rank that is lost has not printed who has joined.
    others = joined(ran) | {rank for rank in order if rank >= size}
    assert others, ran.out
    # A spare that is not needed for the first loss waits for the next one.
    if not any(kill.startswith(f"{size}:") for kill in kills):
        assert "before it joined the others" not in ran.err
    check(shardwise.folder, kind, order, joined=others)


@pytest.mark.full
def test_four_ranks_become_two_and_four_again(shardwise: Launcher) -> None:
    kills = ["3:forward:1", "1:reduce:1"]
    ran, order = run(shardwise, 4, 2, 2, "auto", "steps", "adamw", "out", *kills, most=2)
    assert order[:2] == [0, 2]
    assert len(order) == 4
    check(shardwise.folder, "adamw", order, joined=joined(ran))


@pytest.mark.full
def test_a_lost_rank_starts_again_as_a_spare(shardwise: Launcher) -> None:
    """The first spare takes the place of rank 1, and rank 1 that of rank 0."""
    ran, order = run(
        shardwise, 2, 1, 2, "auto", "plain", "sgd", "out", "1:forward:1", "0:forward:9"
    )
    assert "shardwise: rank 2 joined after step" in ran.out
    assert "shardwise: rank 1 joined after step" in ran.out
    assert order == [2, 1]
    check(shardwise.folder, "sgd", order, joined=joined(ran))


@pytest.mark.full
def test_scale_up_adds_workers_to_a_run(shardwise: Launcher) -> None:
    flags = ["-n", "2", "--survive", "1", "--zero", "2", "--timeout", "60"]
    flags += ["--log-dir", "logs", "--record", "record"]
    process = shardwise.start(
        *("run", *flags, script("survives"), "steps", "adamw", "out"), env={"TESTS_RANKS": "3"}
    )
    wait_until(lambda: any((shardwise.folder / "temporary").glob("*/scale-up-*")), 60)
    asked = shardwise.run("scale-up", "-n", "1")
    assert asked.code == 0, asked.err
    assert asked.out == "started rank 2\n"
    ran = shardwise.finish(process)
    assert ran.code == 0, ran.err
    assert joined(ran) == {2}
    assert f"rank 2 is 2 of 3 after step {STEPS}" in ran.out
    check(shardwise.folder, "adamw", [0, 1, 2], joined={2})
    assert "rank 2 is 2 of 3 after step" in (shardwise.folder / "logs/rank2.log").read_text()
    first, second = (
        [json.loads(line)["step"] for line in path.read_text().splitlines()]
        for path in sorted((shardwise.folder / "record").glob("rank-*.jsonl"))[1:]
    )
    assert first == list(range(STEPS))
    assert 0 < len(second) < STEPS
    assert second == first[-len(second) :]


def test_scale_up_names_the_runs_that_can_grow(shardwise: Launcher) -> None:
    ran = shardwise.run("scale-up", "--run", "1")
    assert ran.code
    assert "with the process id 1 on this host that can grow" in ran.err
    assert "with --survive: none." in ran.err


LACKING = """
import time
import torch
import shardwise as sw

world = sw.init(seed=0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
engine = sw.Engine(model, optimizer)
loader = sw.Loader(torch.ones(240, 4), batch_size=4)
{prepare}
for step in loader.steps():
    for x in step:
        engine.backward(model(x).mean())
    engine.step()
    scheduler.step()
    time.sleep({pause})
"""
UNTRACKED_LOADER = "engine.track(scheduler=scheduler); engine.resume('saved')"
UNTRACKED_SCHEDULER = "engine.track(loader=loader); engine.resume('saved')"


@pytest.mark.parametrize(
    ("prepare", "loop", "message"),
    [
        (UNTRACKED_LOADER, "steps", "Loader(Tensor) is not tracked"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                (UNTRACKED_LOADER, "plain", "Loader(Tensor) is not tracked"),
                (UNTRACKED_SCHEDULER, "steps", "a learning-rate scheduler of SGD is not tracked"),
                ("", "steps", "the script has not called engine.resume(folder)"),
            ]
        ),
    ],
)
def test_spares_need_a_script_that_loads_the_whole_state(
    shardwise: Launcher, prepare: str, loop: str, message: str
) -> None:
    text = LACKING.format(prepare=prepare, pause=0)
    if loop == "plain":
        loop_over_steps = "for step in loader.steps():\n    for x in step:"
        text = text.replace(loop_over_steps, "for x in loader:\n    if True:")
    (shardwise.folder / "train.py").write_text(text)
    ran = shardwise.run("run", "-n", "2", "--survive", "1", "--spares", "1", "train.py")
    assert ran.code == 1
    assert message in ran.err
    assert not list(shardwise.folder.glob("saved/step*")), "an error before the first step"


@pytest.mark.full
@pytest.mark.parametrize("prepare", [UNTRACKED_LOADER, UNTRACKED_SCHEDULER])
def test_scale_up_needs_it_too_and_the_run_continues(shardwise: Launcher, prepare: str) -> None:
    (shardwise.folder / "train.py").write_text(LACKING.format(prepare=prepare, pause=0.2))
    process = shardwise.start("run", "-n", "2", "--survive", "1", "--timeout", "60", "train.py")
    wait_until(lambda: any((shardwise.folder / "temporary").glob("*/scale-up-*")), 60)
    assert shardwise.run("scale-up").code == 0
    ran = shardwise.finish(process)
    assert ran.code == 0, ran.err
    assert not joined(ran)
    assert ran.err.count("no worker can join, because ") == 1
    assert "is not tracked" in ran.err


@pytest.mark.full
def test_a_spare_that_has_not_joined_does_not_save(shardwise: Launcher) -> None:
    prepare = f"engine.save('first'); engine.track(loader=loader); {UNTRACKED_LOADER}"
    (shardwise.folder / "train.py").write_text(LACKING.format(prepare=prepare, pause=0.2))
    ran = shardwise.run("run", "-n", "2", "--survive", "1", "--spares", "1", "train.py")
    assert ran.code == 0, ran.err
    assert "engine.save on a spare before its first training batch" in ran.err
    assert "spare rank 2 ended" in ran.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-n", "2", "--spares", "1"], "--spares 1 has no effect without --survive K"),
        (["-n", "1", "--survive", "1", "--spares", "1"], "--spares 1 needs two or more workers"),
    ],
)
def test_spares_that_could_replace_nobody_are_refused(
    shardwise: Launcher, flags: list[str], message: str
) -> None:
    ran = shardwise.run("run", *flags, script("survives"), "plain", "sgd", "out")
    assert ran.code
    assert message in ran.err
