"""Sends its launcher the reports of a training run, without training.

fails: rank 1 raises at step 7, `sys.argv[2]` times in all, with the text `sys.argv[3]` if given.
waits: it saves when asked to end. Its newest checkpoint is `sys.argv[2]`, if given.
"""

import os
import signal
import sys
import time
from pathlib import Path

from shardwise.net import error_file
from shardwise.net.progress import ProgressWriter
from shardwise.net.restarts import SAVED

error_file.watch_exceptions()
RANK = int(os.environ["SHARDWISE_LAUNCH_RANK"])
writer = ProgressWriter(os.environ)
writer.stepped(0, 7)


def fail(times: int) -> None:
    marks = [Path(f"failed-{number}") for number in range(times)]
    fresh = [mark for mark in marks if not mark.exists()]
    print("started", flush=True)
    if not fresh:
        return
    if RANK == 1:
        fresh[0].touch()
        raise ValueError(sys.argv[3] if len(sys.argv) > 3 else "bad sample")
    time.sleep(60)


def leave(*_: object) -> None:
    time.sleep(0.3)
    writer.ended()
    sys.exit(SAVED)


def wait() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, leave)
    writer.saves_when_asked(saves=True)
    if len(sys.argv) > 2 and RANK == 0:
        path = Path(sys.argv[2])
        writer.kept(0, int(path.name.partition("-")[2]), path)
    print("up", flush=True)
    time.sleep(60)


if sys.argv[1] == "fails":
    fail(int(sys.argv[2]))
else:
    wait()
