"""Records ranks that a script starts itself with torch.multiprocessing.spawn.

A launcher's environment variables are not set in such ranks. The rank is the first argument of the
spawned function. In the reference, the script starts one process, and the argument that contains
the world size is replaced by 1.
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
"""The same as in recorder.py, which takes seconds to import."""

_SIZES = re.compile(r"world_?size|^world$|^size$|n_?procs|num_proc|gpus$|n_?ranks|num_ranks")
"""Matches parameter names that stand for the number of ranks."""


def follow() -> None:
    """Patch torch.multiprocessing to record spawned processes."""
    # The package also has a function with the module's name, so import it by sys.modules.
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
    """Return `arguments` with the world size replaced by 1.

    `function` is called with the rank followed by `arguments`.
    """
    names = list(inspect.signature(function).parameters)[1:]
    return tuple(
        1 if place < len(names) and _SIZES.search(names[place]) and value == ranks else value
        for place, value in enumerate(arguments)
    )


class SpawnedRank:
    """Calls a spawned rank's function and records it. `words` is the script's command line."""

    def __init__(self, function: Callable[..., Any], words: list[str]) -> None:
        self._function, self._words = function, words

    def __call__(self, rank: int, *arguments: Any) -> Any:
        if json.loads(os.environ[VARIABLE])["reference"]:
            _refuse_other_sizes()
        import_module("shardwise.tools.verify.stock.recorder").start(rank, self._words)
        return self._function(rank, *arguments)


def _refuse_other_sizes() -> None:
    """Reject process groups of several ranks, in which the single process would wait forever."""
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
