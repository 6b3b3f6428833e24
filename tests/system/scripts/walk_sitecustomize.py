"""Writes the walk of this process into the folder of this file, at each process that it starts."""

import os
import sys
from pathlib import Path

from tests.system.walk_tracer import Walk

if "SHARDWISE_RANK" not in os.environ:
    walk = Walk()

    def on_event(event: str, _: object) -> None:
        """An audit hook of Python."""
        if event in ("subprocess.Popen", "os.fork"):
            walk.note()
            if walk.lines:
                walk.write(Path(__file__).parent / f"{os.getpid()}.walk")

    sys.addaudithook(on_event)
