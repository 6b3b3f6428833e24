"""Builds the command line of a Python module."""

import sys


def python_words(module: str, python: str = sys.executable) -> tuple[str, ...]:
    """Return the command that runs `module` as `python -m` does."""
    # For our modules and torch's, -P keeps the working directory off sys.path: in a shared
    # directory somebody else may have put a shardwise.py or torch.py, which would run as this user.
    # Modules of the user are expected in the working directory, so they get no -P.
    return (python, "-P", "-m", module) if is_own(module) else (python, "-m", module)


def is_own(module: str) -> bool:
    """Return whether `module` belongs to Shardwise or torch, rather than to the user."""
    return module.partition(".")[0] in ("shardwise", "torch")
