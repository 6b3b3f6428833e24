"""The largest GPT that trains on one GPU, and its tokens/s: the last step of gpu_first.py.

Each size trains in a new process, so that running out of memory harms nobody else. Layers
are doubled until that fails; then the gap is halved. Each contender recomputes its blocks in
backward and computes in bf16 by autocast, with fp32 parameters under AdamW: the same 16 bytes of a
parameter, on the device or on the host. Contenders share the seconds of a budget: one that has used
up its part stops, and its size is marked as "at least".
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import machine
from contenders import Contender
from crew import Crew, CrewFailed, DoesNotFit, NotInstalled, TooLate
from figures import step_times
from workloads import Gpt, Setting

WARM_UP, TIMED = 2, 3

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "ZERO_3 + cpu": (
        "ours:build",
        {
            "zero": 3,
            "offload_params": "cpu",
            "offload_optimizer": "cpu",
            "activations": "recomputed",
            "on_meta": True,
        },
    ),
    "plain": ("torch_peers:plain", {"recomputed": True}),
}
"""The engine with all states on the host, and plain PyTorch."""

SHAPE = Gpt(name="largest", width=4096, layers=1, vocabulary=32768, sequence=1024, batch=4)


@dataclass(frozen=True)
class Run:
    """The result of one size: tokens/s and the peak of the device in bytes."""

    tokens: float
    peak: int


@dataclass
class Tried:
    """A contender's sizes in layers: the results of those that it trained, and why others failed.
    `cut`: time was over before the largest was known."""

    runs: dict[int, Run] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    cut: bool = False


def search(
    shape: Gpt, first: int, most: int, budget: float, told: Callable[[str, Tried], None]
) -> None:
    """Search the largest number of layers of each contender, from `first` to at most `most`, in
    `budget` seconds. Calls `told` after each trial: a run that is killed leaves its figures."""
    until = time.monotonic() + budget
    for number, name in enumerate(OPTIONS):
        limit = time.monotonic() + (until - time.monotonic()) / (len(OPTIONS) - number)
        _search(name, shape, first, most, limit, told)


def _search(
    name: str, shape: Gpt, first: int, most: int, until: float, told: Callable[[str, Tried], None]
) -> None:
    """Search the largest number of layers of one contender until that moment on the monotonic
    clock. Later trials count as failed, and leave their mark."""
    found = Tried()

    def attempt(layers: int) -> bool:
        left, run, why = until - time.monotonic(), None, "no time is left"
        if left > 0:
            run, why = _train(sized(shape, layers), name, left)
        if run is None:
            found.cut |= time.monotonic() >= until
            found.failed[layers] = why
        else:
            found.runs[layers] = run
        print(f"{name}, {layers} layers: {run or why}", flush=True)
        told(name, found)
        return run is not None

    largest(attempt, most, first)


def _train(workload: Gpt, name: str, limit: float) -> tuple[Run | None, str]:
    """Train a size for `limit` seconds at most; return its figures, or the reason of a failure."""
    build, options = OPTIONS[name]
    taker = Contender(key=name, label=name, build=build, options=options)
    # Some updates are made on the host: they have all of its cores.
    setting = Setting(device="cuda", precision="bf16-mixed", threads=machine.cores())
    try:
        until = time.monotonic() + limit
        with Crew(taker, workload, 1, limit, setting, until) as ranks:
            stint = ranks.take(WARM_UP + TIMED)
    except TooLate:
        return None, f"more than {limit:.0f} s"
    except NotInstalled as error:
        return None, f"not installed: {error}"
    except (DoesNotFit, CrewFailed) as error:
        return None, str(error).strip().splitlines()[-1][:200]
    seconds = sum(step_times(stint.ends)[-TIMED:]) / TIMED / 1e3
    # The simulated device of the tests takes no time.
    tokens = workload.batch * workload.sequence / max(seconds, 1e-9)
    return Run(tokens, stint.told[0]["peak"]), ""


def largest(attempt: Callable[[int], bool], most: int, first: int = 1) -> int:
    """Return the largest number up to `most` at which `attempt` succeeds; 0 if there is none.

    The first trial is `first`, which should fit.
    """
    fits, fails = 0, most + 1
    trial = min(first, most)
    while fits + 1 < fails:
        if attempt(trial):
            fits = trial
            trial = min(2 * trial, most) if fails > most else (fits + fails) // 2
        else:
            fails = trial
            trial = (fits + fails) // 2
    return fits


def sized(shape: Gpt, layers: int) -> Gpt:
    """Return the shape with so many layers, and a head per 128 of width."""
    return replace(shape, layers=layers, heads=max(1, shape.width // 128))
