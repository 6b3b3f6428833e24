"""Gives an invalid input to the real command line.

It runs in a forked process, which has imported torch already, or in a new process, as for a user.
"""

from __future__ import annotations

import os
import resource
import runpy
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.bad_input.drawing import SCRIPT, Input
from tests.distributed.group import FORKED, session_environment

LIMIT = 120.0
"""Seconds that a refusal may take on a busy machine."""

TRAINS = """
import torch, shardwise as sw
world = sw.init(seed=0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(2):
    engine.backward(model(torch.ones(4, 4)).sum())
    engine.step()
"""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The result of a command: its exit code (None if it did not end), output and leftovers."""

    code: int | None
    out: str
    err: str
    seconds: float
    left: tuple[str, ...]


def try_input(given: Input, folder: Path, *, real: bool) -> Seen:
    """Run the command line with an input, in the new `folder`, which is removed afterwards."""
    _prepare(given, folder)
    environ = session_environment() | given.environ | {"TMPDIR": str(folder / "temporary")}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    began = time.monotonic()
    try:
        run = _started if real and given.target == "command" else _forked
        code = run(given, folder, environ)
        seconds = time.monotonic() - began
        names = (each.name for each in (folder / "temporary").iterdir())
        left = tuple(sorted(name for name in names if not name.startswith("torchinductor_")))
        said = [(folder / name).read_text(errors="replace") for name in ("out", "err")]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Seen(code=code, out=said[0], err=said[1], seconds=seconds, left=left)


def _prepare(given: Input, folder: Path) -> None:
    work = folder / "work"
    for each in (folder, work, folder / "temporary", folder / "reports"):
        each.mkdir()
    (work / SCRIPT).write_text(TRAINS)
    (work / "plain").write_text("x")
    (work / "empty").touch()
    (folder / "out").touch()
    (folder / "err").touch()
    (work / "notutf").write_bytes(b"\xff\xfe = 1")
    os.mkfifo(work / "fifo")
    (work / "says").write_text("#!/bin/sh\ncat said\nsleep 0.2\n")
    (work / "says").chmod(0o755)
    for name, data in given.files.items():
        (work / name).write_bytes(data)
    (folder / "in").write_bytes(given.stdin)


def _started(given: Input, folder: Path, environ: Mapping[str, str]) -> int | None:
    with (folder / "in").open("rb") as text:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardwise", *given.words],
            cwd=folder / "work",
            env=environ,
            stdin=text,
            start_new_session=True,
            preexec_fn=lambda: _surround(given.around, folder),
        )
    try:
        return process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return None


def _forked(given: Input, folder: Path, environ: dict[str, str]) -> int | None:
    process = FORKED.Process(target=_serve, args=(given, folder, environ))
    process.start()
    process.join(LIMIT)
    code = process.exitcode
    if code is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.kill()  # it may not lead a group yet
        process.join()
    process.close()
    return code


def _surround(around: str, folder: Path) -> None:
    """Put this process into the surroundings `around`."""
    full = around == "stdout full"
    out = os.open("/dev/full" if full else folder / "out", os.O_WRONLY | os.O_CREAT, 0o600)
    err = os.open(folder / "err", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(out, 1)
    os.dup2(err, 2)
    if around == "no folder":
        shutil.rmtree(folder / "work")
    elif around == "no files":
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, 2**14))
    elif around == "stdout closed":
        os.close(1)
    elif around == "all closed":
        os.close(0)
        os.close(1)


def _serve(given: Input, folder: Path, environ: dict[str, str]) -> NoReturn:
    """Run the target in the forked process."""
    os.setsid()
    os.chdir(folder / "work")
    ours, theirs = os.pipe()  # a pipe, because epoll does not accept files
    os.write(theirs, given.stdin)
    os.close(theirs)
    os.dup2(ours, 0)
    os.environ.clear()
    os.environ.update(environ)
    _surround(given.around, folder)
    try:
        code = _TARGETS[given.target](given)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
        if isinstance(left.code, str):
            os.write(2, f"{left.code}\n".encode())
    except BaseException:
        os.write(2, traceback.format_exc().encode(errors="replace"))
        code = 1
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(code)


def _command(given: Input) -> int:
    from shardwise.cli import main as cli
    from shardwise.launch import one_host

    one_host._once = _be_rank
    return cli.main(list(given.words))


def _be_rank(job: Any, command: Any, console: Any, *rest: Any) -> Any:
    """Become the only rank instead of starting it."""
    from shardwise.launch.run_spec import Meeting, rank_environment
    from shardwise.net import network
    from shardwise.net.identity import Identity
    from shardwise.net.restarts import Ending

    del command, rest
    job.outputs(console)
    if job.interface is not None:
        network.address_of_interface(job.interface)
    if job.size > 1 or not job.is_python or job.module:
        return Ending(code=0)
    me = Identity(launcher="shardwise run", address="127.0.0.1", port=1)
    meeting = Meeting(address="127.0.0.1", port=1, master_port=1)
    reports = Path("..", "reports").resolve()
    told = rank_environment(job, me, meeting, os.environ, reports=reports, cores=1)
    os.environ.clear()
    os.environ.update(told)
    return Ending(code=_script(None))


def _script(given: Input | None) -> int:
    del given
    sys.argv = [SCRIPT]
    try:
        runpy.run_path(SCRIPT, run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def _agent(given: Input) -> int:
    del given
    from shardwise.launch.ssh import agent

    agent.main()
    return 0


_TARGETS = {"command": _command, "script": _script, "agent": _agent}
