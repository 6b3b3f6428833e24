"""Lets a warm process (server.py) be the Python program that an interpreter was started for.

Python imports this file at its start where its folder is in PYTHONPATH. A script, a module of ours
that runs one, or a command of ours that imports torch, is handed over with its arguments,
environment and open files; this process stands for it, passes signals on, and ends as it ends. All
else starts as ever.
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
