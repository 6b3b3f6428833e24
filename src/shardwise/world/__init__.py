"""Represents the run as one process sees it: its rank, process groups and common calls.

initialize.py        joins the ranks of a run: sw.init
world.py             World: rank, size, sums and broadcasts; mesh.py: ranks along the axes
batch_rows.py        splits a global batch into each rank's rows; current_batch.py: its weight
randomness.py        seeds and random streams; common_random_stream.py: the stream of all ranks
common_calls.py      counts the calls that all ranks must make, to detect differences
preemption.py        saves and stops a run when the scheduler requests it
step_log.py, tensor_log.py, timeline_control.py   records for `bench`, `verify` and `timeline`
loop_checks.py       warns about training loops that never call the engine
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Module(ModuleType):
    """Makes this package callable: `shardwise.world()` returns the current world."""

    def __call__(self) -> Any:
        # Import late, because importing a module of this package must not import all of it.
        return import_module("shardwise.world.world").current()


sys.modules[__name__].__class__ = _Module
