"""The run as one process sees it: its rank, its groups of ranks, and calls that all ranks make.

initialize.py        joins the ranks of a run: sw.init
world.py             World: rank, size, sums and broadcasts; mesh.py: ranks along the axes
batch_rows.py        cuts a total batch into the rows of each rank; current_batch.py: its weight
randomness.py        seeds, and random streams; common_random_stream.py: the stream of all ranks
common_calls.py      counts calls that all ranks must make, to find a rank that made others
preemption.py        saves and ends a run when the scheduler asks for it
step_log.py, tensor_log.py, timeline_control.py   records for `bench`, `verify` and `timeline`
loop_checks.py       warns of training loops that never call the engine
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Module(ModuleType):
    """The type of this package, which makes it callable: `shardwise.world()` is the world."""

    def __call__(self) -> Any:
        """See `shardwise.world.world.current`."""
        # Imported late: importing a part of this package must not import all of it.
        return import_module("shardwise.world.world").current()


sys.modules[__name__].__class__ = _Module
