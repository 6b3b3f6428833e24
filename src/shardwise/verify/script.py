"""Runs a user's script inside of a rank for `shardwise verify`:

    python -m shardwise.verify.script '{"record": ..., "alter": {...}}' train.py [its arguments]

The script runs as `python train.py` would, with what is noted about it, and with what is altered
about it where a cause is tried. Where no engine records, torch's optimizers are, from outside.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def main(arguments: list[str]) -> None:
    """Run what `arguments` name, until it ends."""
    given: dict[str, Any] = json.loads(arguments[0])
    words = arguments[1:]
    sys.argv = words
    # After sys.argv, which some libraries read when they are imported.
    from shardwise.model.precision import PRESETS
    from shardwise.verify import alterations, outside, watching

    facts = watching.Facts()
    watching.watch(facts)
    recorder = outside.Recorder(
        Path(given["record"]),
        rank=int(os.environ.get("RANK", "0")),
        stop_after=given["steps"],
        preset=PRESETS[given["precision"]],
        facts=facts,
        plain=given["plain"],
    )
    alterations.apply(given["alter"])
    try:
        if given["module"]:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            # As the interpreter does, which has put the current folder there for -m.
            sys.path[0] = str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    finally:
        recorder.leave()


if __name__ == "__main__":
    main(sys.argv[1:])
