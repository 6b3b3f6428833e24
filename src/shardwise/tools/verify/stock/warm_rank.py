"""Runs a stock script in a process that has already imported torch.

    python -m shardwise.tools.verify.stock.warm_rank train.py [ARGS]

A rank started by a launcher takes seconds to import torch, and verifying a correct script takes six
such ranks. Therefore, the reference, torchrun and its ranks are forked (see fork_server.py).
torchrun still starts and watches one process per rank: rank_client.py.

The script sees the same arguments, path and environment as under `python train.py`. However, torch
is already imported when the script sets an environment variable, so `can_be_forked` is false for a
script that sets one.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from shardwise.launch import program
from shardwise.tools.warm.warm_ranks import own_sources

_SETS_VARIABLES = re.compile(
    r"environ(?!\.get\(|\[\s*[\"']\w+[\"']\s*\](?!\s*=[^=]))|putenv|dotenv"
)
"""Matches any use of `environ` that does more than read a variable."""


def can_be_forked(words: Sequence[str]) -> bool:
    """Return whether a command is a script that sets no environment variables."""
    # A module may be anywhere on the path, so its source is not known.
    is_script = bool(words) and program.is_script(words[0]) and Path(words[0]).is_file()
    return is_script and not any(map(_SETS_VARIABLES.search, own_sources(words[0])))


def main(arguments: list[str]) -> None:
    """Run a script to its end. `arguments` are the script and its arguments."""
    sys.argv = list(arguments)
    sys.orig_argv = [sys.executable, *arguments]
    for stream in (sys.stdout, sys.stderr):
        # torchrun starts Python with -u, so that no output of a killed rank is lost.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    from torch._dynamo import config

    from shardwise.tools.verify.stock import recorder

    # torch reads this variable when it is imported.
    config.disable = os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    recorder.start()
    program.put_first_on_path(str(Path(arguments[0]).resolve().parent))
    runpy.run_path(os.path.abspath(arguments[0]), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
