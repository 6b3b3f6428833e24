"""A process that nothing launched: a group of one."""

from collections.abc import Mapping

from shardwise.launch.identity import Identity


def detect(environ: Mapping[str, str]) -> Identity:
    """The identity of a single process; `environ` has nothing to add to it."""
    del environ
    return Identity(launcher="python")
