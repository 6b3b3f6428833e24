"""Runs a script once, with or without `shardwise run`, and reads the record of its ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.launch import allocations, program
from shardwise.launch.orphan_reaper import LAST_WAIT, end_within
from shardwise.launch.resources import usable_cores
from shardwise.net.python_command import python_words
from shardwise.tools.report.output import last_words
from shardwise.tools.verify import rank_client, records
from shardwise.tools.verify.fork_server import PACKAGES
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
"""Packages that are slow to import and independent of a rank's environment variables."""

_SETS_VARIABLES = re.compile(r"environ|putenv|dotenv")

RECORDS = "record-"
"""Prefix of the folders for the records of runs."""

OnStep = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class ScriptCommand:
    """The program to run.

    `words` are the script and its arguments. If `module` is true, the first word is a module name.
    `adopting` is the command line of the module that runs the program with --adopt.
    """

    words: tuple[str, ...]
    module: bool = False
    adopting: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a script.

    Attributes:
        script: The script to run.
        placement: The placement, or None to run without a launcher.
        steps: Number of steps after which to stop.
        alter: Values of alterations by name (see alterations.py).
        values: Names of the tensors whose values to record, or None for all small tensors.
        environ: Additional environment variables.
    """

    script: ScriptCommand
    placement: RunPlacement | None
    steps: int
    alter: Mapping[str, Any] = field(default_factory=dict)
    values: Sequence[str] | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    precision: str = "fp32"
    """Precision of a script that trains without an engine."""
    max_size: int = 1
    """Largest number of ranks of any run. It determines the number of threads per rank."""
    server: int = 0
    """Number of the fork server for rank 0. Each server has a different hash seed."""


class RunFailed(Exception):
    """Raised if a run exits with a nonzero exit code. `output` is the run's full output."""

    def __init__(self, name: str, code: int, output: str) -> None:
        super().__init__(f"{name} ended with exit code {code}: {last_words(output)}")
        self.code = code
        self.output = output


def make(
    run: Run, name: str, log: Path, on_step: OnStep, warm: WarmRanks | None = None
) -> RecordedTraining:
    """Execute a run with its output in `log`, and return its record.

    Ranks are forked from `warm` processes if possible. On Ctrl-C, the ranks are stopped first. The
    files of the record are always removed. Raises RunFailed, with `name` in the message, if the run
    exits with an error.
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
        # Remove the record even after an error, because records of large models fill a disk
        # quickly.
        shutil.rmtree(folder, ignore_errors=True)


def command(run: Run, folder: Path, warm: WarmRanks | None = None) -> list[str]:
    """Return the command line of a run that writes its record to `folder`."""
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
    # Fork from a warm process, unless the run sets variables that the interpreter reads at startup
    # (PYTHONHASHSEED), or may have ranks on other hosts, which have no warm process.
    if (
        warm is not None
        and warm.are_running
        and not run.environ
        and not (run.placement and run.placement.launcher)
    ):
        shim = warm.words(run.server, arguments)
    if run.placement is None:
        # -P prevents modules in the current folder from shadowing Shardwise's. rank_client.py does
        # not need it, because it imports none of them.
        return [sys.executable, *(["-P"] if shim[0] == "-m" else []), *shim]
    # With --trial, the run does not resume, save or export anything.
    flags = [*run.placement.words, "--trial", "--stop-after", str(run.steps)]
    flags += ["--record-tensors", where]
    return [*python_words("shardwise"), "run", *flags, *shim]


def environment(max_size: int) -> dict[str, str]:
    """Return the environment variables of a run.

    The number of threads per rank depends only on `max_size`, so that it is the same in all runs.
    The variables of a batch job are left out, so that the run stays on this host: other hosts might
    not see the folder of the records.
    """
    # Use the number of threads of the largest run. Kernels split sums among threads, so a smaller
    # run with more threads per rank would differ by rounding for that reason alone.
    threads = str(max(1, usable_cores() // max_size))
    kept = {n: value for n, value in os.environ.items() if n not in allocations.VARIABLES}
    return {"OMP_NUM_THREADS": threads, **kept}


class WarmRanks:
    """Context manager for the warm processes that fork ranks (see fork_server.py).

    Args:
        script: The script of the ranks. The processes import the LARGE_PACKAGES that it imports.
        max_size: Largest number of ranks of any run.
        module: Module whose `main` runs a rank.
        packages: Modules to import. Default: PACKAGES, and the script's.
    """

    def __init__(
        self,
        script: ScriptCommand,
        max_size: int,
        module: str = RANK_SCRIPT,
        packages: Sequence[str] | None = None,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="shardwise-warm-"))
        self._module = module
        if packages is None:
            packages = (*PACKAGES, *large_imports(script))
        self._processes = [
            self._start(server, " ".join(packages), max_size)
            for server in range(SERVERS if sys.platform == "linux" else 0)
        ]

    def _start(self, server: int, packages: str, max_size: int) -> subprocess.Popen[bytes]:
        # Listen before the process exists, so that a rank that connects while torch is still being
        # imported waits in the backlog.
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(socket_path(str(self._folder), server))
            listener.listen(64)
            return subprocess.Popen(
                [*python_words(SERVER), str(listener.fileno()), self._module, packages],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C reaches only the runs
                env=environment(max_size),
                pass_fds=[listener.fileno()],
            )

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    @property
    def are_running(self) -> bool:
        """Whether there are warm processes. They exist only on Linux."""
        return bool(self._processes)

    def words(self, server: int, arguments: Sequence[str]) -> list[str]:
        """Return the command line that starts a rank: the script, then `arguments`."""
        return [str(CLIENT), str(self._folder), str(server), self._module, *arguments]

    def __enter__(self) -> WarmRanks:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        # Standard input of all processes is closed first, so that they exit in parallel.
        for process in self._processes:
            end_within(process, LAST_WAIT)
        shutil.rmtree(self._folder, ignore_errors=True)


def large_imports(script: ScriptCommand) -> list[str]:
    """Return those LARGE_PACKAGES that the script imports and that can be imported in advance.

    Packages read environment variables such as HF_HOME on import. The result is therefore empty if
    the script, or a module in its folder, sets environment variables. A package is left out if the
    folder contains a module with the same name, because the script would import that module.
    """
    name = next((word for word in script.words if program.is_script(word)), "")
    packages: set[str] = set()
    for text in own_sources(name):
        # The variables may affect any package, so import nothing in advance.
        if _SETS_VARIABLES.search(text):
            return []
        packages |= {each for each in LARGE_PACKAGES if program.imports(text, each)}
    return sorted(packages - _modules_beside(name).keys())


def own_sources(name: str) -> Iterator[str]:
    """Yield the source of the script `name`, and of each module in its folder that it imports."""
    beside, texts = _modules_beside(name), [program.text_of(name)]
    while texts:
        text = texts.pop()
        yield text
        for each in [each for each in beside if program.imports(text, each)]:
            path = beside.pop(each)
            files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
            texts.append("\n".join(program.text_of(str(file)) for file in files))


def _modules_beside(name: str) -> dict[str, Path]:
    """Return the modules and packages in the folder of a script, and in the current folder."""
    paths = (path for folder in (Path(name).parent, Path()) for path in folder.iterdir())
    return {path.stem: path for path in paths if path.stem.isidentifier()}
