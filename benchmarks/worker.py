"""One rank of one contender: `python worker.py FD SPEC`, started by crew.py.

It builds, says so, and then sleeps in a read of its socket until it receives a number of steps: an
idle rank uses no processor. When the socket ends, so does the rank.
"""

import importlib
import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

import device_trace
from job import Job, Step
from residents import resident
from workloads import Setting, understood


def main(fd: int, spec: dict[str, Any]) -> None:
    """Serve the crew until it closes the socket."""
    with Connection(fd) as crew:
        try:
            _serve(crew, spec)
        except (EOFError, BrokenPipeError):
            pass  # the crew has closed its end: the run is over, and nobody reads a message
        except ModuleNotFoundError as error:
            crew.send({"missing": error.name})
        except BaseException as error:
            kind = "full" if _is_out_of_memory(error) else "error"
            crew.send({kind: traceback.format_exc()})
    # Exit at once: a peer's exit handlers may wait for ranks that have already ended.
    os._exit(0)


def _serve(crew: Connection, spec: dict[str, Any]) -> None:
    workload = understood(spec["job"].pop("workload"))
    setting = Setting(**spec["job"].pop("setting"))
    torch.set_num_threads(setting.threads)
    _choose_arithmetic(setting.precision)
    if setting.compiled:
        _let_blocks_be_compiled()
    file, _, function = spec["build"].partition(":")
    build = getattr(importlib.import_module(f"contenders.{file}"), function or "build")
    job = Job(**spec["job"], workload=workload, setting=setting)
    empty = resident()
    if job.on_gpu:
        torch.cuda.set_device(job.device)
        job.told["peak"] = torch.cuda.max_memory_allocated
    step = build(job, **spec["options"])
    if job.on_gpu:
        torch.cuda.empty_cache()  # others may train before this rank's turn
    crew.send({"empty": empty})
    batches = cycle(job.batches())
    while True:
        asked = crew.recv()
        if asked.get("release") and job.on_gpu:
            torch.cuda.empty_cache()
        if asked.get("traced"):
            with device_trace.recorded() as seen:
                taken = _take(step, batches, asked["steps"], Clock())
            taken["seen"] = asdict(seen())
        else:
            taken = _take(step, batches, asked["steps"], DeviceClock() if job.on_gpu else Clock())
        taken["losses"] = [loss.item() for loss in taken["losses"]]
        crew.send(taken | {"told": {name: ask() for name, ask in job.told.items()}})


def _choose_arithmetic(precision: str) -> None:
    """Have a GPU multiply fp32 in fp32, or in TF32 if that is the precision.

    Of torch's switches these are the two that set all others with them. Set one by one they
    contradict each other, and reading them (the compiler does) raises an error.
    """
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def _let_blocks_be_compiled() -> None:
    """Compile each shape of a block. All blocks of a class are one function to the compiler, which
    would compile it for a few shapes and then give up, or for shapes of any size."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether the device's memory, or the host's pinned memory, is not enough."""
    words = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


class Clock:
    """The moments of the ends of steps on the host, in ns on the clock of the machine."""

    def __init__(self) -> None:
        self._ends: list[int] = []

    def step_ended(self) -> None:
        """Record a moment."""
        self._ends.append(time.monotonic_ns())

    def ends(self) -> list[int]:
        """Return all of them."""
        return self._ends


class DeviceClock:
    """The moments of the ends of steps on a GPU.

    The host reads them after the last step: in a loop that waits after each step, host and device
    would not work in parallel as in a user's loop.
    """

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        torch.cuda.synchronize()
        self.step_ended()
        self._origin = time.monotonic_ns()

    def step_ended(self) -> None:
        """Record an event behind all work that was submitted."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def ends(self) -> list[int]:
        """Wait for the last event; return all moments."""
        torch.cuda.synchronize()
        begun, *events = self._events
        return [self._origin + int(1e6 * begun.elapsed_time(event)) for event in events]


def _take(step: Step, batches: Any, steps: int, clock: Clock | DeviceClock) -> dict[str, Any]:
    """Train `steps` steps; return the losses, on the device, and the moments of their ends."""
    losses: list[Tensor] = []
    for _ in range(steps):
        loss = step(*next(batches))
        clock.step_ended()
        losses.append(loss.detach())
    return {"ends": clock.ends(), "losses": losses}


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
