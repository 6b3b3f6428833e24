"""How processes are started, and how a started process learns who it is."""

from collections.abc import Mapping

from shardwise.launch import alone, own, torchrun
from shardwise.launch.identity import Identity


def detect(environ: Mapping[str, str]) -> Identity:
    """Who this process is; where launchers are nested, the innermost wins. Pure."""
    return own.detect(environ) or torchrun.detect(environ) or alone.detect(environ)
