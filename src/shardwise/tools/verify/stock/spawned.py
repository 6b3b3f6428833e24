"""Records ranks that a script starts itself, by torch.multiprocessing.spawn.

Such ranks have no variables of a launcher: their number is the first argument of the function that
they run. In the reference, the script starts one process, and the argument that says how many there
are becomes 1.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import torch

VARIABLE = "SHARDWISE_VERIFY_STOCK"
"""As in recorder.py, which only ranks import: that takes seconds."""

_SIZES = re.compile(r"world_?size|^world$|^size$|n_?procs|num_proc|gpus$|n_?ranks|num_ranks")
"""Names of parameters for the number of ranks."""


def follow() -> None:
    """Record the processes that this process spawns from now on."""
    # The package has a function of the module's name.
    module: Any = sys.modules["torch.multiprocessing.spawn"]
    plain: Callable[..., Any] = module.start_processes

    @wraps(plain)
    def started(fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **options: Any) -> Any:
        count, given = nprocs, tuple(args)
        if json.loads(os.environ[VARIABLE])["reference"]:
            count, given = 1, with_one_rank(fn, given, nprocs)
        return plain(SpawnedRank(fn, sys.orig_argv[1:]), given, count, *more, **options)

    module.start_processes = vars(torch.multiprocessing)["start_processes"] = started


def with_one_rank(function: Callable[..., Any], arguments: Any, ranks: int) -> tuple[Any, ...]:
    """Return the arguments of a rank's function, with 1 for the number of ranks.

    The first parameter of `function` is the rank, and `arguments` are the others.
    """
    names = list(inspect.signature(function).parameters)[1:]
    return tuple(
        1 if place < len(names) and _SIZES.search(names[place]) and value == ranks else value
        for place, value in enumerate(arguments)
    )


class SpawnedRank:
    """Calls a rank's function, recorded. `words` started the script that spawns the ranks."""

    def __init__(self, function: Callable[..., Any], words: list[str]) -> None:
        self._function, self._words = function, words

    def __call__(self, rank: int, *arguments: Any) -> Any:
        """Start recording, and call the function."""
        if json.loads(os.environ[VARIABLE])["reference"]:
            _refuse_other_sizes()
        import_module("shardwise.tools.verify.stock.recorder").start(rank, self._words)
        return self._function(rank, *arguments)


def _refuse_other_sizes() -> None:
    """Refuse a process group of several ranks, which one process would wait for."""
    plain: Callable[..., Any] = torch.distributed.init_process_group

    @wraps(plain)
    def joined(*args: Any, **kwargs: Any) -> Any:
        size = inspect.signature(plain).bind(*args, **kwargs).arguments.get("world_size", 1)
        if size > 1:
            raise import_module("shardwise.tools.verify.stock.batches").UnjoinableBatches(
                f"the script starts {size} ranks also as one process. Start them by torchrun, or "
                "call the parameter for their number world_size."
            )
        return plain(*args, **kwargs)

    torch.distributed.init_process_group = joined
