"""Compares the peak memory that `shardwise plan` predicts with what real runs on this machine take.

    python benchmarks/plan.py                  # all models of plan_models.py, ZERO_0 on one rank
    python benchmarks/plan.py mlp gpt2

Predicted: the step is observed without memory in one process. Measured: another process trains
for two steps; its peak is VmHWM from before sw.Engine on, without what it had then beside the
model, and without pages of files (code that a kernel's first call loads). Both processes are forks
of this one, which has imported the libraries. With KEEP=DIR in the environment the records stay.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import runpy
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import plan_models
from shardwise.placement import Placement
from shardwise.planning import observer
from shardwise.planning.choice import Choice
from shardwise.planning.memory import Hardware, MemoryPlan, predict
from shardwise.planning.record import StepRecord
from shardwise.tiers.host_memory import MMAP_THRESHOLD

SCRIPT = Path(plan_models.__file__)
STEPS = 2
GOAL, LOW = 0.03, -0.02
"""A prediction is good within 3 %, and no more than 2 % too low."""


def main() -> None:
    """Print a line for each model, and how many are within the goal."""
    names = sys.argv[1:] or [each.__name__ for each in plan_models.MODELS]
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one rank, ZERO_0"
    )
    print("live: without gaps of the heap; kept: with them, where the plan has a band")
    print(f"{'model':<9}{'live plan':>11}{'measured':>10}{'error':>8}", end="")
    print(f"{'kept plan':>16}{'measured':>10}  MB", flush=True)
    errors, inside = [], 0
    warm_up()
    with tempfile.TemporaryDirectory() as temporary:
        folder = os.environ.get("KEEP") or temporary
        for name in names:
            found = compare(name, Path(folder))
            if found is None:
                continue
            plan, live, kept = found
            planned = int(plan.curve.max())
            errors.append(planned / live - 1)
            inside += plan.low * (1 + LOW) <= kept <= plan.peak * (1 - LOW)
            band = f"{plan.low / 1e6:.1f}-{plan.peak / 1e6:.1f}"
            print(f"{name:<9}{planned / 1e6:>11.1f}{live / 1e6:>10.1f}{errors[-1]:>8.1%}", end="")
            print(f"{band:>16}{kept / 1e6:>10.1f}  {plan.where}", flush=True)
    good = sum(LOW <= error <= GOAL for error in errors)
    print(f"live: {good} of {len(names)} at most {GOAL:.0%} too high or {-LOW:.0%} too low")
    print(f"kept: {inside} of {len(names)} in the band, which is {-LOW:.0%} wider on both sides")


def compare(name: str, folder: Path) -> tuple[MemoryPlan, int, int] | None:
    """The prediction for a model, and the bytes that it takes live and kept; None where one of them
    failed."""
    record, size = folder / f"{name}.json", folder / f"{name}.size"
    live = folder / f"{name}.live"
    words = [str(SCRIPT), name]
    _in_fork(lambda: observer.main([str(record), "0", "1", *words]), folder / f"{name}.log")
    _in_fork(lambda: measure(size, words), folder / f"{name}.measured.log")
    _in_fork(lambda: measure(live, words, returns=True), folder / f"{name}.measured.log")
    if not record.exists() or not size.exists() or not live.exists():
        failed = "observed" if not record.exists() else "measured"
        log = folder / (f"{name}.log" if failed == "observed" else f"{name}.measured.log")
        print(f"{name:<10} not {failed}: {log.read_text().strip()[-400:]}")
        return None
    step = StepRecord.read(record)
    choice = Choice(row=Placement.zero(0), data=1, micro_batch=step.batch_size)
    plan = predict(
        step, choice, Hardware(apart=False, shares=True, threads=torch.get_num_threads())
    )
    return plan, json.loads(live.read_text()), json.loads(size.read_text())


def warm_up() -> None:
    """Load what the first update loads, once for all forks: it is no memory of a model."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    torch.optim.AdamW([parameter]).step()


def _in_fork(work: Callable[[], Any], log: Path) -> None:
    """Run `work` in a process of its own, what it prints in `log`."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            work()
        except SystemExit:
            pass  # the script is stopped this way once it has been measured
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def measure(path: Path, words: list[str], *, returns: bool = False) -> None:
    """Train for two steps with an engine that notes what memory it takes, in `path`. `returns`:
    every block from 64 kB on is a mapping, which goes back to the system when it is freed."""
    import shardwise.engine

    if returns:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)  # so that sw.init leaves it so
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 16)

    ended = 0

    class MeasuredEngine(shardwise.engine.Engine):
        made = 0

        def __init__(self, models: Any, *args: Any, **options: Any) -> None:
            if not MeasuredEngine.made:
                status = memory_status()
                own = [p for p in torch_parameters() if p.device.type == "cpu"]
                # Other engines' models are there by now too: they are part of the training.
                held = sum(p.numel() * p.element_size() for p in own)
                MeasuredEngine.before = status["RssAnon"] - held
                Path("/proc/self/clear_refs").write_text("5")
            MeasuredEngine.made += 1
            super().__init__(models, *args, **options)

        def step(self, *args: Any, **options: Any) -> Any:
            nonlocal ended
            stats = super().step(*args, **options)
            ended += 1
            if ended == STEPS * MeasuredEngine.made:
                status = memory_status()
                peak = status["VmHWM"] - status["RssFile"] - MeasuredEngine.before
                path.write_text(json.dumps(peak))
                raise SystemExit(0)
            return stats

        before = 0

    shardwise.engine.Engine = MeasuredEngine  # type: ignore[misc]
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def torch_parameters() -> list[torch.nn.Parameter]:
    """All parameters of this process."""
    import gc

    return [each for each in gc.get_objects() if type(each) is torch.nn.Parameter]


def memory_status() -> dict[str, int]:
    """Bytes by name, of /proc/self/status."""
    rows = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[-1:] == ["kB"]}


if __name__ == "__main__":
    if any(name in sys.argv for name in ("gpt2", "llama", "t5", "mixtral")) or not sys.argv[1:]:
        import transformers  # noqa: F401 (once, for all forks)
    main()
