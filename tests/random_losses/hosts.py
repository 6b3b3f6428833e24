"""Lose ranks, hosts and cables at random moments of a run on three hosts, over real ssh.

python -m tests.random_losses.hosts --losses 100        seeds 1 to 100
python -m tests.random_losses.hosts --loss 17           only seed 17, with its whole output
"""

from __future__ import annotations

import os
import re
import statistics
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

from tests.random_losses.drawing import GATHERS, LATER, MOMENTS, PUBLISHES, SAVES, Loss, Run
from tests.random_losses.judging import COMMAND as OF_ONE_HOST
from tests.random_losses.judging import TIMEOUT, Runner
from tests.random_losses.reference import STEPS
from tests.seeded import console
from tests.system.lab import PORT, Lab, lab
from tests.system.launcher import Launcher, Ran, script
from tests.system.warm import WarmPython, start_quickly

COMMAND = replace(
    OF_ONE_HOST,
    name="random_losses.hosts",
    about="Lose ranks, hosts and cables at random moments of a run on several hosts.",
)
WHERE = [
    {1: [0, 1], 2: [2, 3]},
    {1: [0], 2: [1], 3: [2]},
    {2: [0, 1], 3: [2, 3]},
    {3: [0], 1: [1, 2], 2: [3]},
    {2: [0, 1], 1: [2]},
]
"""The ranks of each node, in the order of the nodes. The launcher is on node 1."""

PASSED_ON = ("PYTHONPATH", "TESTS_WARM")


def draw(seed: int) -> tuple[Run, dict[int, list[int]]]:
    """Draw the run of `seed`, and the ranks of each node."""
    rng = Random(seed)
    where = rng.choice(WHERE)
    size, zero = sum(map(len, where.values())), rng.choice([0, 1, 2, 2, 3, 3])
    rank = rng.randrange(size)
    is_on_first = rank in where.get(1, [])
    names = ["KILL", "TERM", "STOP"] if is_on_first else ["KILL", "HOST", "CUT", "TERM", "STOP"]
    weights = [80, 15, 5] if is_on_first else [35, 35, 18, 8, 4]
    moment = rng.choice([*MOMENTS, *(GATHERS if zero == 3 else PUBLISHES), *SAVES])
    at = rng.choice([4, 8, 12]) if moment in SAVES else rng.randrange(STEPS)
    name = rng.choices(names, weights)[0]
    seconds = rng.random() * LATER if name != "CUT" and rng.random() < 0.4 else 0.0
    loss = Loss(rank=rank, moment=moment, at=at, name=name, seconds=seconds)
    run = Run(
        size=size,
        most=1,
        zero=zero,
        offload=rng.choice([(), (), ("optimizer",)][: 3 if zero else 1]),
        transport=rng.choice(["auto", "auto", "gloo"]),
        loop=rng.choice(["steps", "plain"]),
        kind=rng.choice(["sgd", "adamw"]),
        losses=(loss,),
    )
    return replace(run, spares=rng.choice([0, 0, 1])), where


class HostRunner(Runner):
    """Tries losses on the hosts of `of`, in `folder`. `environ` starts the programs warm."""

    def __init__(self, folder: Path, environ: Mapping[str, str], of: Lab) -> None:
        super().__init__(folder, environ)
        self._lab = of
        self._cut_off: list[str] = []
        """Processes that a host without a network has left behind."""

    def draw(self, seed: int) -> Run:
        run, self._where = draw(seed)
        return run

    def launcher(self, folder: Path) -> Launcher:
        return Launcher(folder, self._lab.nodes[0].enter(folder))

    def left(self, launcher: Launcher) -> list[str]:
        if self._is_killed:
            self._lab.clear()
        return [*super().left(launcher), *self._cut_off, *self._lab.left()]

    def run(self, run: Run, launcher: Launcher) -> Ran:
        (loss,), self._cut_off = run.losses, []
        self._is_killed = loss.name == "HOST"
        node = next(node for node, ranks in self._where.items() if loss.rank in ranks)
        slots = {each: len(ranks) for each, ranks in self._where.items()}
        slots[list(slots)[-1]] += run.spares  # earlier hosts are filled first
        hosts = ",".join(f"node{each}:{count}" for each, count in slots.items())
        environ = {name: value for name, value in os.environ.items() if name in PASSED_ON}
        slow = {"TESTS_RANKS": str(run.size)} if run.spares else {}
        passed = [word for name in environ | self._environ | slow for word in ("-x", name)]
        flags = ["--ssh", self._lab.ssh, "--ssh-port", str(PORT), *passed, "-H", hosts]
        flags += ["-n", str(run.size), "--spares", str(run.spares)] if run.spares else []
        flags += ["--survive", "1", "--host-timeout", "3", *run.placement]
        flags += ["--transport", run.transport, "--timeout", str(TIMEOUT), "--device", "cpu"]
        words = ["run", *flags, script("survives"), run.loop, run.kind, "out", loss.word]
        is_over = threading.Event()
        cutter = threading.Thread(target=self._cut, args=(launcher.folder, node, is_over))
        cutter.start()
        try:
            return launcher.finish(launcher.start(*words, env=self._environ | slow), limit=150)
        finally:
            is_over.set()
            cutter.join()

    def _cut(self, folder: Path, node: int, is_over: threading.Event) -> None:
        """Cut the cable of `node` once a rank asks for it, until the run is over."""
        while not (folder / "cut").exists():
            if is_over.wait(0.01):
                return
        self._lab.cut(node)
        (folder / "is-cut").touch()
        is_over.wait()
        # The host must have ended its ranks without the launcher.
        self._cut_off = self._lab.left()
        self._lab.mend(node)

    def lost_ranks(self, err: str) -> set[int]:
        """Return the ranks that the launcher has named, or whose host it has named."""
        nodes = {int(node) for node in re.findall(r"shardwise: node(\d) \(ranks? .*is lost", err)}
        return super().lost_ranks(err) | {rank for node in nodes for rank in self._where[node]}

    def is_pair(self, run: Run) -> bool:
        """Return whether a host with more than half of the ranks may have been lost."""
        (loss,) = run.losses
        ranks = next(ranks for ranks in self._where.values() if loss.rank in ranks)
        return loss.name in ("HOST", "CUT") and 2 * len(ranks) > run.size


@contextmanager
def prepared() -> Iterator[HostRunner]:
    """Yield the runner of losses."""
    start_quickly(os.environ)
    with ExitStack() as stack:
        warm = WarmPython()
        stack.callback(warm.close)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loss")))
        (folder / "lab").mkdir()
        (folder / "hidden").mkdir()
        of = stack.enter_context(lab(folder / "lab", 3, folder / "hidden"))
        runner = HostRunner(folder, warm.environ(), of)
        yield runner
        if found := runner.continued:
            console.print(
                f"{len(found)} times the others continued, after {statistics.median(found):.2f} s "
                f"(median) to {max(found):.2f} s"
            )


if __name__ == "__main__":
    COMMAND.run(prepared)
