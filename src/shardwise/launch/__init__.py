"""Starts the ranks of a run and watches them until they exit.

start.py             interprets the command line, and chooses the program that starts the ranks
run_spec.py          describes a run; the description is sent to each host
one_host.py, ssh/    start the ranks on this host, or on several hosts over ssh
elastic.py           starts torch's elastic agent
allocations.py       finds the hosts that a scheduler has allocated to this job
supervisor.py        watches the ranks, and stops all of them if one fails
failure_report.py    finds the rank that failed first, and writes the report
function.py          implements sw.launch; function_rank.py and function_fork.py run its ranks
deepspeed_flags.py   translates command lines of DeepSpeed's launcher
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Module(ModuleType):
    """Makes this package callable, so that `shardwise.launch(function)` starts ranks."""

    def __call__(self, *args: Any, **keywords: Any) -> list[Any]:
        """See `shardwise.launch.function.launch`."""
        values: list[Any] = import_module("shardwise.launch.function").launch(*args, **keywords)
        return values


sys.modules[__name__].__class__ = _Module
