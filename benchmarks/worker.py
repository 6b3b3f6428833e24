"""One rank of one contender: `python worker.py FD SPEC`, started by crew.py.

It builds, says so, and then sleeps in a read of its socket until it is told to take some steps:
an idle rank uses no processor. Messages are lines of JSON. When the socket ends, so does the rank.
"""

import importlib
import json
import os
import resource
import socket
import sys
import time
import traceback
from itertools import cycle
from typing import Any

import torch

from job import Job, Step
from residents import own_memory
from workloads import understood


def main(fd: int, spec: dict[str, Any]) -> None:
    """Serve the crew until it hangs up."""
    with socket.socket(fileno=fd) as connection, connection.makefile("rw") as channel:
        try:
            _serve(channel, spec)
        except BrokenPipeError:
            pass  # the crew has hung up: that is the end of the run, and nobody is left to tell
        except ModuleNotFoundError as error:
            _say(channel, missing=error.name)
        except BaseException:
            _say(channel, error=traceback.format_exc())
    # Without ceremony: a peer's exit handlers may wait for ranks that have already gone.
    os._exit(0)


def _serve(channel: Any, spec: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    contender = importlib.import_module(f"contenders.{spec['module']}")
    job = Job(**spec["job"] | {"workload": understood(spec["job"]["workload"])})
    empty = own_memory()
    job.told["used"] = _used
    step = contender.build(job, **spec["options"])
    _say(channel, ready=True, empty=empty)
    batches = cycle(job.batches())
    for line in channel:
        taken = _take(step, batches, json.loads(line)["steps"])
        told = {name: ask() for name, ask in job.told.items()}
        _say(channel, **taken, updates=job.updates, told=told)
        job.updates.clear()


def _used() -> dict[str, float]:
    """What this process has cost the machine so far: page faults, and ms of processors."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"faults": usage.ru_minflt, "cpu": 1e3 * (usage.ru_utime + usage.ru_stime)}


def _take(step: Step, batches: Any, steps: int) -> dict[str, Any]:
    """Train `steps` steps; the losses, and the moments (ns, alike on all ranks) they ended at."""
    losses, ends = [], []
    for _ in range(steps):
        loss = step(*next(batches))
        ends.append(time.monotonic_ns())
        losses.append(loss.item())
    return {"ends": ends, "losses": losses}


def _say(channel: Any, **message: Any) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
