"""Runs of `shardwise verify` whose ranks are forked from a process that has imported torch.

They run the same script in the same rank module without a launcher, in a tenth of the time.
"""

import json
import os
import shutil
import socket
import sys
import tempfile
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shardwise import config
from shardwise.net import environment
from shardwise.tools.verify import records, script
from shardwise.tools.verify.flow import Verification
from shardwise.tools.verify.placements import RunPlacement
from shardwise.tools.verify.records import RecordedTraining
from shardwise.tools.verify.request import VerifyRequest
from shardwise.tools.verify.runs import Run, RunFailed, ScriptCommand, command
from shardwise.tools.verify.verdicts import Result
from shardwise.world import world
from tests.distributed.group import FORKED, Origin, _Rank

LIMIT = 120.0


def judged(words: tuple[str, ...], flags: RunPlacement, folder: Path, **more: Any) -> Result:
    """Return the verdict of `shardwise verify` on a script."""
    asked = VerifyRequest(script=ScriptCommand(words=words), placements=[flags], out=folder, **more)
    verification = Verification(asked, make)
    verification.check()
    return verification.judge(flags)


def make(run: Run, words: str) -> RecordedTraining:
    """Make a run like `runs.make`."""
    folder = Path(tempfile.mkdtemp(prefix="record-"))
    try:
        _run(run, words, folder)
        return records.read(folder)
    finally:
        shutil.rmtree(folder)


def _run(run: Run, words: str, folder: Path) -> None:
    size = 1 if run.placement is None else run.placement.size or 1
    arguments = command(run, folder)
    arguments = arguments[arguments.index("shardwise.tools.verify.script") + 1 :]
    settings = {"arguments": arguments, "flags": _flags(run, folder), "environ": dict(run.environ)}
    known = environment.draw_secret()
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        ranks = [
            _Rank(rank, size, listener, known, settings, Origin(FORKED, main))
            for rank in range(size)
        ]
    try:
        for rank in ranks:
            rank.process.join(LIMIT)
        codes = [rank.process.exitcode for rank in ranks]
        if any(codes):
            said = "\n".join(rank.output() for rank in ranks)
            raise RunFailed(words, 1, said)
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.reap()


def _flags(run: Run, folder: Path) -> dict[str, str]:
    if run.placement is None:
        return {}
    more = {"trial": "on", "stop_after": str(run.steps), "record_tensors": str(folder)}
    return {**run.placement.settings, **more}


def main(
    connection: Connection, printed: int, environ: Mapping[str, str], settings: dict[str, Any]
) -> None:
    """Run as a rank."""
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.environ.clear()
    os.environ.update(environ)
    os.environ.update(settings["environ"])
    os.environ[config.FLAGS_VARIABLE] = json.dumps(settings["flags"])
    # Other tests import it in the process that this one is forked from. A script that uses it
    # imports it again; one that does not must not count as a DeepSpeed script.
    sys.modules.pop("shardwise.deepspeed", None)
    code = 0
    try:
        script.main(settings["arguments"])
    except SystemExit as left:
        code = int(left.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    world.leave()
    sys.stdout.flush()
    os._exit(code)
