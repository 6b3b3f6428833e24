"""Builds the command line that runs a Python module."""

import sys


def python_words(module: str, python: str = sys.executable) -> tuple[str, ...]:
    """Return the command line that runs `module` with `python -m`."""
    # For our modules and torch's, -P keeps the working directory off sys.path. In a shared
    # directory, somebody else may have created a shardwise.py or torch.py, which would run as this
    # user. User modules are run without -P, because they may be in the working directory.
    return (python, "-P", "-m", module) if is_own(module) else (python, "-m", module)


def is_own(module: str) -> bool:
    """Return whether `module` belongs to Shardwise or torch, rather than to the user."""
    return module.partition(".")[0] in ("shardwise", "torch")
