"""Builds the command line of a Python module."""

import sys


def python_words(module: str, python: str = sys.executable) -> tuple[str, ...]:
    """Return the words that run `module` as `python -m` does.

    For a module of Shardwise, or of torch, `-P` keeps the working directory off the path of
    modules: somebody else may have put a `shardwise.py` or `torch.py` into a shared directory, and
    it would run as the user. A module of the user's own is found there.
    """
    return (python, "-P", "-m", module) if is_own(module) else (python, "-m", module)


def is_own(module: str) -> bool:
    """Whether the launcher starts this module itself: one of Shardwise or of torch."""
    return module.partition(".")[0] in ("shardwise", "torch")
