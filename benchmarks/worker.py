"""One rank of one contender: `python worker.py FD SPEC`, started by crew.py.

It builds, says so, and then sleeps in a read of its socket until it is told to take some steps:
an idle rank uses no processor. Messages are lines of JSON. When the socket ends, so does the rank.
"""

import importlib
import json
import os
import socket
import sys
import time
import traceback
from dataclasses import asdict
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

import device_trace
from job import Job, Step
from residents import resident
from workloads import Setting, understood


def main(fd: int, spec: dict[str, Any]) -> None:
    """Serve the crew until it hangs up."""
    with socket.socket(fileno=fd) as connection, connection.makefile("rw") as channel:
        try:
            _serve(channel, spec)
        except BrokenPipeError:
            pass  # the crew has hung up: that is the end of the run, and nobody is left to tell
        except ModuleNotFoundError as error:
            _say(channel, missing=error.name)
        except BaseException as error:
            kind = "full" if _is_of_memory(error) else "error"
            _say(channel, **{kind: traceback.format_exc()})
    # Without ceremony: a peer's exit handlers may wait for ranks that have already gone.
    os._exit(0)


def _serve(channel: Any, spec: dict[str, Any]) -> None:
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
    _say(channel, ready=True, empty=empty)
    batches = cycle(job.batches())
    for line in channel:
        asked = json.loads(line)
        if asked.get("release") and job.on_gpu:
            torch.cuda.empty_cache()
        if asked.get("traced"):
            with device_trace.recorded() as seen:
                taken = _take(step, batches, asked["steps"], Clock())
            taken["seen"] = asdict(seen())
        else:
            taken = _take(step, batches, asked["steps"], DeviceClock() if job.on_gpu else Clock())
        taken["losses"] = [loss.item() for loss in taken["losses"]]
        told = {name: ask() for name, ask in job.told.items()}
        _say(channel, **taken, told=told)


def _choose_arithmetic(precision: str) -> None:
    """Have a GPU multiply fp32 in fp32, or in TF32 where that is the precision.

    Of torch's switches these are the two that set all others with them: set one by one they
    contradict each other, and whoever reads those (the compiler does) gets an error.
    """
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def _let_blocks_be_compiled() -> None:
    """Blocks of one class are one function to the compiler, which compiles it for a few shapes and
    then gives up, or for shapes of any size; here each shape gets its own graph."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False


def _is_of_memory(error: BaseException) -> bool:
    """Whether it says that a device's memory, or what is pinned of the host's, is not enough."""
    words = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


class Clock:
    """The moments (ns, alike on all processes of a host) at which the host has ended steps."""

    def __init__(self) -> None:
        self._ends: list[int] = []

    def step_ended(self) -> None:
        """Take down a moment."""
        self._ends.append(time.monotonic_ns())

    def ends(self) -> list[int]:
        """All of them."""
        return self._ends


class DeviceClock:
    """The moments at which a GPU has ended steps. The host asks when all are over: in a loop that
    waits after each step, host and device would not work beside each other as a user's do."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        torch.cuda.synchronize()
        self._begun = self._mark()
        self._origin = time.monotonic_ns()

    def step_ended(self) -> None:
        """Mark the end of what the device was asked for."""
        self._events.append(self._mark())

    def ends(self) -> list[int]:
        """All moments, when the device has come to the last."""
        torch.cuda.synchronize()
        after = (self._begun.elapsed_time(event) for event in self._events)
        return [self._origin + int(1e6 * ms) for ms in after]

    @staticmethod
    def _mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _take(step: Step, batches: Any, steps: int, clock: Clock | DeviceClock) -> dict[str, Any]:
    """Train `steps` steps; the losses, on the device, and the moments that the steps ended at."""
    losses: list[Tensor] = []
    for _ in range(steps):
        loss = step(*next(batches))
        clock.step_ended()
        losses.append(loss.detach())
    return {"ends": clock.ends(), "losses": losses}


def _say(channel: Any, **message: Any) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
