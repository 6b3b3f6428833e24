"""Runs a script once under `shardwise run` or alone, and reads what its ranks recorded."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.launch import allocations, program
from shardwise.launch.orphan_reaper import LAST_WAIT, end_within
from shardwise.launch.resources import usable_cores
from shardwise.net.python_command import python_words
from shardwise.tools.report.output import last_words
from shardwise.tools.verify import rank_client, records
from shardwise.tools.verify.placements import RunPlacement
from shardwise.tools.verify.rank_client import SERVERS, socket_path
from shardwise.tools.verify.records import RecordedTraining
from shardwise.world.tensor_log import WANTED

RANK_SCRIPT = "shardwise.tools.verify.script"
SERVER = "shardwise.tools.verify.fork_server"
CLIENT = Path(rank_client.__file__)
LARGE_PACKAGES = {
    *("accelerate", "datasets", "lightning", "matplotlib", "peft", "pytorch_lightning", "scipy"),
    *("sklearn", "torchvision", "transformers", "trl"),
}
"""Packages that take long to import and do not depend on the rank's variables."""

_SETS_VARIABLES = re.compile(r"environ|putenv|dotenv")

RECORDS = "record-"
"""Prefix of the folders that runs record into."""

OnStep = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class ScriptCommand:
    """The program to run: its words, and whether the first is a module.

    `adopting` are the words of the module that runs it in turn (--adopt).
    """

    words: tuple[str, ...]
    module: bool = False
    adopting: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of `script` under `placement`, or without a launcher if that is None.

    `alter` maps the names of alterations to their values (alterations.py). `values` names the
    tensors whose values are recorded; None records all small tensors. `environ` adds environment
    variables.
    """

    script: ScriptCommand
    placement: RunPlacement | None
    steps: int
    alter: Mapping[str, Any] = field(default_factory=dict)
    values: Sequence[str] | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    precision: str = "fp32"
    """The precision of a script that trains without an engine."""
    max_size: int = 1
    """The largest number of ranks of any run. It sets the threads per rank of all of them."""
    server: int = 0
    """The warm process that rank 0 is forked from. Each has a different hash seed."""


class RunFailed(Exception):
    """Raised if a run ends with an exit code other than 0. `output` is everything it wrote."""

    def __init__(self, name: str, code: int, output: str) -> None:
        super().__init__(f"{name} ended with exit code {code}: {last_words(output)}")
        self.code = code
        self.output = output


def make(
    run: Run, name: str, log: Path, on_step: OnStep, warm: WarmRanks | None = None
) -> RecordedTraining:
    """Make the run called `name` with its output in `log`, and return its record.

    Ranks are forked from `warm` processes if possible. Raises RunFailed. Ctrl-C ends the ranks
    first. The record's files are always removed, because those of a large model are large.
    """
    folder = Path(tempfile.mkdtemp(prefix=RECORDS, dir=log.parent))
    try:
        if run.values is not None:
            (folder / WANTED).write_text(json.dumps({"names": list(run.values)}))
        with log.open("wb") as output:
            process = subprocess.Popen(
                command(run, folder, warm),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment(run.max_size), **run.environ},
            )
            code = program.wait_for(process, lambda: on_step(records.count_steps(folder)))
        if code:
            raise RunFailed(name, code, log.read_text(errors="replace"))
        return records.read(folder)
    finally:
        # Also after an error. Values of a large model fill a disk quickly.
        shutil.rmtree(folder, ignore_errors=True)


def command(run: Run, folder: Path, warm: WarmRanks | None = None) -> list[str]:
    """Return the command line of a run that records into `folder`."""
    where = str(folder.resolve())
    options = {
        "record": where,
        "steps": run.steps,
        "module": run.script.module or bool(run.script.adopting),
        "alter": dict(run.alter),
        "plain": run.placement is None,
        "precision": run.precision,
    }
    arguments = [json.dumps(options), *(run.script.adopting or run.script.words)]
    shim = ["-m", RANK_SCRIPT, *arguments]
    # Fork from a warm process, unless the run sets variables that the interpreter reads at its
    # start (PYTHONHASHSEED), or has ranks on other hosts, which have no warm process.
    if (
        warm is not None
        and warm.are_running
        and not run.environ
        and not (run.placement and run.placement.launcher)
    ):
        shim = warm.words(run.server, arguments)
    if run.placement is None:
        # -P keeps the current folder from hiding our modules. rank_client.py imports none of them.
        return [sys.executable, *(["-P"] if shim[0] == "-m" else []), *shim]
    # --trial: the run resumes, saves and exports nothing.
    flags = [*run.placement.words, "--trial", "--stop-after", str(run.steps)]
    flags += ["--record-tensors", where]
    return [*python_words("shardwise"), "run", *flags, *shim]


def environment(max_size: int) -> dict[str, str]:
    """Return the environment of a run.

    It has the same number of threads at every world size, and no variables of a job's hosts,
    because these may not see the folder of the records.
    """
    # The number for the largest run: kernels split sums by threads, so a smaller run with more
    # threads per rank would differ by rounding for that reason alone.
    threads = str(max(1, usable_cores() // max_size))
    kept = {n: value for n, value in os.environ.items() if n not in allocations.VARIABLES}
    return {"OMP_NUM_THREADS": threads, **kept}


class WarmRanks:
    """Warm processes that ranks are forked from (fork_server.py); a context manager.

    They import the known large packages that `script` imports.
    """

    def __init__(self, script: ScriptCommand, max_size: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="shardwise-warm-"))
        modules = " ".join(large_imports(script))
        self._processes = [
            self._start(server, modules, max_size)
            for server in range(SERVERS if sys.platform == "linux" else 0)
        ]

    def _start(self, server: int, modules: str, max_size: int) -> subprocess.Popen[bytes]:
        # Listen before the process exists: a rank that connects while torch is still being imported
        # waits in the backlog.
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(socket_path(str(self._folder), server))
            listener.listen(64)
            return subprocess.Popen(
                [*python_words(SERVER), str(listener.fileno()), modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches only the runs, which end their ranks first
                env=environment(max_size),
                pass_fds=[listener.fileno()],
            )

    @property
    def pids(self) -> list[int]:
        """The process ids of the warm processes."""
        return [process.pid for process in self._processes]

    @property
    def are_running(self) -> bool:
        """Whether there are warm processes. Outside of Linux, ranks start one by one."""
        return bool(self._processes)

    def words(self, server: int, arguments: Sequence[str]) -> list[str]:
        """Return the script and arguments that make a rank with `arguments`."""
        return [str(CLIENT), str(self._folder), str(server), *arguments]

    def __enter__(self) -> WarmRanks:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        # Close all first: the processes end in parallel.
        for process in self._processes:
            end_within(process, LAST_WAIT)
        shutil.rmtree(self._folder, ignore_errors=True)


def large_imports(script: ScriptCommand) -> list[str]:
    """Return the large packages that the script imports and that can be imported before it starts.

    Packages read variables such as HF_HOME when they are imported. If the script or a module in
    its folder sets variables, the result is empty. A package is left out if the folder has a
    module of the same name, because the script would import that one.
    """
    name = next((word for word in script.words if program.is_script(word)), "")
    # Modules and packages next to the script, or in the current folder.
    paths = (path for folder in (Path(name).parent, Path()) for path in folder.iterdir())
    beside = {path.stem: path for path in paths if path.stem.isidentifier()}
    large, read, texts = set(LARGE_PACKAGES), set[str](), [program.text_of(name)]
    packages: set[str] = set()
    while texts:
        text = texts.pop()
        # The variable may matter for any import, so import nothing early.
        if _SETS_VARIABLES.search(text):
            return []
        imported = {each for each in large | beside.keys() if program.imports(text, each)}
        for path in (beside[each] for each in imported & beside.keys() - read):
            files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
            texts.append("\n".join(program.text_of(str(file)) for file in files))
        read |= imported
        packages |= imported & large
    return sorted(packages - beside.keys())
