"""Starts the ranks of a run, and watches them until they end.

start.py             reads the command line, chooses who starts the ranks
one_host.py, ssh/    start them: on this host, on several hosts over ssh
elastic.py           leave it to torch's elastic agent
allocations.py       the hosts of a batch job, for runs over ssh
supervisor.py        watches the ranks, and ends all when one fails
function_rank.py, function_fork.py  a rank that calls a function, for sw.launch
failure_report.py    says which rank failed and why
function.py          sw.launch
deepspeed_flags.py   the command line of DeepSpeed's launcher, as flags of ours
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Module(ModuleType):
    """This package, which can be called: `shardwise.launch(function)` starts ranks."""

    def __call__(self, *args: Any, **keywords: Any) -> list[Any]:
        """See `shardwise.launch.function.launch`."""
        called: list[Any] = import_module("shardwise.launch.function").launch(*args, **keywords)
        return called


sys.modules[__name__].__class__ = _Module
