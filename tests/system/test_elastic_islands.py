"""A failed island leaves the others running, and returns from the anchor."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import nn

from shardwise.checkpoint.atomic_folders import complete
from shardwise.net.restarts import SAVED
from tests.system.launcher import LIMIT, Launcher, Ran, script
from tests.system.test_restarts import rank_of

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="--elastic-islands needs Linux"),
    pytest.mark.usefixtures("warm_programs"),
]

EVERY, BATCH = 4, 8
WIRES = ("fp32", "bf16", "int8", "int4")


def words(*more: str, size: int = 4, islands: int = 2, every: int = EVERY) -> list[str]:
    shape = ["-n", str(size), "--islands", str(islands), "--equal-every", str(every)]
    return ["run", *shape, "--elastic-islands", *more]


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def put(model: nn.Module, values: torch.Tensor) -> None:
    nn.utils.vector_to_parameters(values.clone(), model.parameters())


def ends(folder: Path, ranks: Iterable[int] = range(4)) -> torch.Tensor:
    """Return the final state of these ranks, which must be bit-equal."""
    found = [torch.load(folder / f"end-{rank}.pt") for rank in ranks]
    assert all(torch.equal(each, found[0]) for each in found)
    return found[0]


def is_away(ran: Ran, island: int) -> bool:
    """Return whether the run finished before an island could return."""
    lines = [line for line in ran.err.splitlines() if f"shardwise: island {island} " in line]
    return bool(lines) and re.search(r"has ended( at step \d+)? \(", lines[-1]) is not None


def back_at(ran: Ran, island: int) -> int:
    """Return the step after which an island takes part again."""
    return int(
        re.findall(rf"shardwise: island {island} has returned, from step (\d+) on", ran.err)[-1]
    )


class Plain:
    """One island of the plain loop: a model with its optimizer and schedule."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.9)

    def step(self, rows: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        (self.model(rows) - rows[:, :3].sin()).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()


def plain(steps: int, gone: int, back: int, absent: int, width: int = 40) -> torch.Tensor:
    """Run local SGD with two islands.

    `absent` misses the boundaries after step `gone`, and continues from the anchor of step `back`,
    with the other's optimizer state.
    """
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(64, 6, generator=generator, dtype=torch.float64)
    islands = [Plain(width), Plain(width)]
    for step in range(1, steps + 1):
        there = [k for k in (0, 1) if k != absent or not gone < step <= back]
        batch = rows[(step - 1) * BATCH % 64 :][:BATCH].chunk(2)
        for k in there:
            islands[k].step(batch[k])
        if step % EVERY == 0:
            met = [k for k in there if k != absent or not gone < step]
            if absent in there and step > back:
                met = there
            mean = torch.stack([flat(islands[k].model) for k in met]).mean(0)
            for k in met:
                put(islands[k].model, mean)
        if step == back:
            other = islands[1 - absent]
            put(islands[absent].model, flat(other.model))
            islands[absent].optimizer.load_state_dict(deepcopy(other.optimizer.state_dict()))
            islands[absent].scheduler.load_state_dict(other.scheduler.state_dict())
    return flat(islands[0].model)


@pytest.mark.parametrize(
    ("rank", "row", "also"),
    [
        pytest.param(0, "0", [], marks=pytest.mark.full),
        (0, "2", ["--common", "--share"]),
        pytest.param(2, "1", ["--common"], marks=pytest.mark.full),
        pytest.param(1, "3", [], marks=pytest.mark.full),
    ],
)
def test_a_rank_is_killed(shardwise: Launcher, rank: int, row: str, also: list[str]) -> None:
    """The others continue, the island returns, and all is as in the plain loop without it. In one
    case all ranks draw the same numbers in each step, and use a value that rank 0 broadcasts."""
    folder, island = shardwise.folder / "ck", rank // 2
    folder.mkdir()
    more = ["--restarts", "1", "--zero", row, script("island_dies"), "ck", *also]
    ran = shardwise.run(*words(*more, "--die", f"{rank}:6", "--hold", "14"))
    assert ran.code == 0, ran.err
    assert (
        f"shardwise: island {island} has ended at step 6 (rank {rank} of 4 was ended: SIGKILL). "
        f"Island {1 - island} continues without it from the next boundary on. Restarting it (1 "
        "of 1).\n"
    ) in ran.err
    back = back_at(ran, island)
    assert back in (16, 20)
    assert torch.allclose(ends(folder), plain(24, 4, back, island), rtol=1e-8, atol=1e-8)
    assert [f"[{r}] start {back}" in ran.out for r in range(4)] == [
        r // 2 == island for r in range(4)
    ]
    assert shardwise.wait_until_gone() == []
    assert shardwise.folders_left() == []


@pytest.mark.full
def test_a_rank_is_killed_in_a_save(shardwise: Launcher) -> None:
    """The others repeat the save, and any number of islands resumes from it."""
    folder = shardwise.folder / "ck"
    folder.mkdir()
    more = [script("island_dies"), "ck", "--die", "2:6", "--in-save", "--save", "6", "--epochs"]
    ran = shardwise.run(*words(*more, "1"))
    assert ran.code == 0, ran.err
    assert "island 1 has ended at step 6 (rank 2 of 4 was ended: SIGKILL)" in ran.err
    assert "does not return, because --restarts 0 allows no more restarts." in ran.err
    assert [found.step for found in complete(folder)] == [6]
    ran = shardwise.run(*words(*more, "1"))
    assert ran.code == 0, ran.err
    assert ran.out.count("start 6") == 4
    ends(folder)


@pytest.mark.full
def test_hanging_island(shardwise: Launcher) -> None:
    """Its own watchdog ends it. The others wait for that, and continue."""
    (shardwise.folder / "ck").mkdir()
    more = ["--restarts", "1", "--timeout", "5", script("island_dies"), "ck", "--hold", "14"]
    stop = ["--die", "3:6", "--signal", str(int(signal.SIGSTOP))]
    ran = shardwise.run(*words(*more, *stop))
    assert ran.code == 0, ran.err
    assert "island 1 has ended at step 6 (rank 3 of 4 did not arrive: " in ran.err
    assert back_at(ran, 1) in (16, 20)
    ends(shardwise.folder / "ck")
    assert shardwise.wait_until_gone() == []


@pytest.mark.full
def test_hanging_island_of_one_rank(shardwise: Launcher) -> None:
    """No rank next to it can end it, so the run ends with the report, as without the flag."""
    (shardwise.folder / "ck").mkdir()
    stop = ["--die", "1:6", "--signal", str(int(signal.SIGSTOP))]
    more = ["--timeout", "3", script("island_dies"), "ck", *stop]
    ran = shardwise.run(*words(*more, size=2))
    assert ran.code == 1
    assert "shardwise: island 0 has waited 3 s in the boundary after step 8 for rank 1." in ran.err
    assert (
        "Rank 0 has waited 6 s in the boundary after step 8 for rank 1 of another island" in ran.err
    )
    assert "rank 1 of 2 did not arrive" in ran.err
    assert shardwise.wait_until_gone() == []


@pytest.mark.full
@pytest.mark.parametrize("moment", ["2:0", "all"])
def test_other_failures_end_the_run(shardwise: Launcher, moment: str) -> None:
    """Failures before all islands have begun, or of the last island, cause the usual report and
    --restarts."""
    folder = shardwise.folder / "ck"
    folder.mkdir()
    if moment == "2:0":
        ran = shardwise.run(*words("--restarts", "1", script("island_dies"), "ck", "--die", moment))
        assert ran.code == 0, ran.err
        assert ran.out.count("start 0") == 8
        assert "rank 2 of 4 was ended before the first step (SIGKILL). Restart " in ran.err
        ends(folder)
        return
    more = [script("island_dies"), "ck", "--die", "2:6", "--pause", "0.2"]
    run = Watched(shardwise, *words(*more))
    assert run.reach(13)
    os.kill(rank_of(shardwise, 1), signal.SIGKILL)
    ran = run.finish()
    assert ran.code == 137
    assert "rank 1 of 4" in ran.err.splitlines()[-1]
    assert shardwise.wait_until_gone() == []


@pytest.mark.full
def test_ends_on_request_while_an_island_is_away(shardwise: Launcher) -> None:
    (shardwise.folder / "ck").mkdir()
    more = ["--restarts", "1", script("island_dies"), "ck", "--epochs", "9", "--pause", "0.2"]
    run = Watched(shardwise, *words(*more, "--die", "2:6"))
    assert run.reach(9)
    run.process.send_signal(signal.SIGTERM)
    ran = run.finish()
    assert ran.code == SAVED, ran.err
    (last,) = complete(shardwise.folder / "ck")
    assert last.step % EVERY == 0
    assert shardwise.wait_until_gone() == []


@pytest.mark.full
def test_ends_on_request_while_an_island_loads(shardwise: Launcher) -> None:
    """The island was admitted but has not taken part yet. The others save without it."""
    (shardwise.folder / "ck").mkdir()
    more = ["--restarts", "1", script("island_dies"), "ck", "--epochs", "9", "--pause", "0.2"]
    run = Watched(shardwise, *words(*more, "--die", "2:6", "--slow-load", "4"))
    assert run.read("] loads\n")
    time.sleep(0.5)
    run.process.send_signal(signal.SIGTERM)
    ran = run.finish()
    assert ran.code == SAVED, ran.err
    assert complete(shardwise.folder / "ck")[0].step % EVERY == 0
    assert shardwise.wait_until_gone() == []


@pytest.mark.full
def test_restarts_counts_islands_and_runs_together(shardwise: Launcher) -> None:
    """A restarted island counts towards --restarts, together with restarts of the complete run."""
    folder = shardwise.folder / "ck"
    folder.mkdir()
    more = ["--restarts", "1", script("island_dies"), "ck", "--epochs", "8", "--pause", "0.1"]
    run = Watched(shardwise, *words(*more, "--die", "2:6", "--hold", "14"))
    assert run.reach(24)
    for rank in (0, 2):
        os.kill(rank_of(shardwise, rank), signal.SIGKILL)
    ran = run.finish()
    assert ran.code == 137, ran.err
    assert "Restarting it (1 of 1)." in ran.err
    assert "it was started again once, and no more." in ran.err
    assert shardwise.wait_until_gone() == []


STARTS_BADLY = """
import errno, sys
from itertools import count
from shardwise.cli import main as cli
from shardwise.islands.elastic.workers import IslandWorkers

plain, numbers = IslandWorkers._start, count()

def start(*given):
    if next(numbers) == 5:
        raise OSError(errno.EMFILE, "Too many open files")
    plain(*given)

IslandWorkers._start = start
sys.exit(cli.main())
"""
"""A launcher that cannot start its sixth rank."""


@pytest.mark.full
def test_island_cannot_be_started(shardwise: Launcher) -> None:
    """This counts as a failure of the island: it is tried again, and the others continue."""
    (shardwise.folder / "ck").mkdir()
    more = ["--restarts", "2", script("island_dies"), "ck", "--die", "2:6", "--hold", "14"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", STARTS_BADLY, *words(*more)]
    environ = shardwise.environ()
    process = subprocess.Popen(command, cwd=shardwise.folder, env=environ, **pipes)
    ran = shardwise.finish(process)
    assert ran.code == 0, ran.err
    assert (
        "island 1 could not start: [Errno 24] Too many open files. Restarting it (2 of 2)."
    ) in ran.err
    assert back_at(ran, 1) in (16, 20)
    ends(shardwise.folder / "ck")
    assert shardwise.wait_until_gone() == []


class Watched:
    """A run whose output is read while it runs, so that a test can act at a certain step."""

    def __init__(self, shardwise: Launcher, *given: str) -> None:
        self.process = shardwise.start(*given)
        self._lines: list[str] = []
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()
        self._errors: list[str] = []
        self._more = Thread(target=self._read_errors, daemon=True)
        self._more.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._errors.append(line)

    def reach(self, step: int) -> bool:
        """Return True when a rank has completed this number of steps, or False if the run finishes
        first.
        """
        return self.read(f"] step {step} ")

    def read(self, words: str) -> bool:
        """Return True when a rank has printed `words`, or False if the run finishes first."""
        return self._wait_for(words, self._lines)

    def says(self, words: str) -> bool:
        """Return True when stderr contains `words`, or False if the run finishes first."""
        return self._wait_for(words, self._errors)

    def _wait_for(self, words: str, lines: list[str]) -> bool:
        while not any(words in line for line in list(lines)):
            if self.process.poll() is not None:
                return False
            time.sleep(0.01)
        return True

    def finish(self) -> Ran:
        """Wait for the end."""
        self.process.wait(LIMIT)
        self._thread.join()
        self._more.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return Ran(self.process.returncode, "".join(self._lines), "".join(self._errors))


def killed(shardwise: Launcher, draw: random.Random, size: int) -> int | None:
    """Kill a random rank; return None if it does not run now."""
    rank = draw.randrange(size)
    try:
        os.kill(rank_of(shardwise, rank), draw.choice([signal.SIGKILL, signal.SIGSEGV]))
    except (StopIteration, ProcessLookupError):
        return None
    return rank


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_a_random_rank_is_killed_at_a_random_moment(shardwise: Launcher, seed: int) -> None:
    """Once or twice, in a random row. In the end all ranks agree."""
    draw, folder = random.Random(seed), shardwise.folder / "ck"
    folder.mkdir()
    islands, every = draw.choice([2, 2, 4]), draw.choice([1, 2, 4])
    more = ["--restarts", "3", "--zero", str(draw.randrange(4)), "--wire", draw.choice(WIRES)]
    more += draw.choice([[], ["--outer", "nesterov:0.7,0.9"], ["--transport", "gloo"]])
    more += [script("island_dies"), "ck", "--epochs", "8", "--pause", "0.03", "--hold", "40"]
    more += draw.choice([[], ["--measure"], ["--save", "3"], ["--measure", "--save", "5"]])
    run = Watched(shardwise, *words(*more, islands=islands, every=every))
    assert run.reach(draw.randint(1, 30))
    time.sleep(draw.random() * 0.1)
    first = killed(shardwise, draw, 4)
    if draw.random() < 0.4 and run.reach(draw.randint(41, 55)):
        time.sleep(draw.random() * 0.1)
        killed(shardwise, draw, 4)
    ran = run.finish()
    print("seed", seed, "rank", first, *(x for x in ran.err.splitlines() if "shardwise: " in x))
    assert ran.code == 0, ran.err
    assert first is not None
    size = 4 // islands
    assert f"shardwise: island {first // size} has ended at step " in ran.err
    assert f"shardwise: island {first // size} has returned, from step " in ran.err
    away = {island for island in range(islands) if is_away(ran, island)}
    assert len(away) <= 1
    ends(folder, [rank for rank in range(4) if rank // size not in away])
    assert shardwise.wait_until_gone() == []
    assert shardwise.folders_left() == []
