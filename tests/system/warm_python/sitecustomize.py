"""Lets a warm process (server.py) run the Python program for which an interpreter was started.

Python imports this file at startup if its folder is in PYTHONPATH. It hands over a script, a module
of ours that runs a script, or a command of ours that imports torch, with its arguments, environment
and open files. This process then stands in for the program: it forwards signals, and exits with the
same status. Everything else starts as usual.
"""

import os
import sys

_MODULES = (
    *("shardwise.adopt", "shardwise.tools.plan.observer", "shardwise.tools.verify.fork_server"),
    "shardwise.tools.doctor",
)
"""Modules of ours that run scripts, or are ranks."""

_COMMANDS = ("plan", "pipeline-plan", "verify")
"""Commands of ours that import torch."""

_LIGHT = "rank_client.py"
"""A script that imports nothing."""


def _program(words: list[str]) -> list[str]:
    """The script, or module of ours that runs one, that an interpreter with these arguments is
    started for, and its own arguments; nothing for all else."""
    match words:
        case ["-u", *rest]:
            os.environ["PYTHONUNBUFFERED"] = "1"
            return _program(rest)
        case ["-P", *rest]:
            return _program(rest)
        case ["-m", module, *_] if module in _MODULES:
            return words
        case ["-m", "shardwise", command, *_] if command in _COMMANDS:
            return words
        case [path, *_] if path.endswith(".py") and not path.endswith(_LIGHT):
            return words
    return []


if "TESTS_WARM" in os.environ and (_words := _program(sys.orig_argv[1:])):
    from shardwise.tools.verify import rank_client

    os._exit(rank_client.main(os.environ["TESTS_WARM"], "0", *_words))
