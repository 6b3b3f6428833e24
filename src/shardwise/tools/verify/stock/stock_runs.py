"""Runs and records the ranks of a stock script, and its reference."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rich.progress import Progress

import shardwise
from shardwise.errors import LaunchError
from shardwise.launch.orphan_reaper import OrphanReaper, end_within
from shardwise.messages.printable import printable
from shardwise.net.python_command import python_words
from shardwise.tools.verify import records
from shardwise.tools.verify.records import RecordedTraining
from shardwise.tools.verify.runs import RunFailed, environment
from shardwise.tools.verify.stock import recorder, warm_rank
from shardwise.tools.verify.stock.own_files import make_view
from shardwise.tools.verify.stock.recorder import CLAIM, STACK, VARIABLE
from shardwise.tools.warm.fork_server import STOCK_PACKAGES
from shardwise.tools.warm.warm_ranks import WarmRanks

START = Path(__file__).parent / "start"
TORCHRUN = "torch.distributed.run"
RANK_VARIABLES = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "0",
    "ROLE_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
}
"""Environment variables that tell the reference that it is the only rank, whichever launcher
started the ranks."""

OTHER_LAUNCHERS = {
    **dict.fromkeys(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), "0"),
    **dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), "1"),
    **dict.fromkeys(("PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID"), "0"),
    **dict.fromkeys(("PMI_SIZE", "MPI_LOCALNRANKS"), "1"),
    **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0"),
    **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_STEP_NUM_TASKS"), "1"),
}
"""The corresponding variables of other launchers. Only those that a rank had are replaced."""

INHERITED = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"}
INHERITED |= RANK_VARIABLES.keys() - {"MASTER_ADDR"}
"""Variables of an outer launcher, such as a batch script's. They would make a launcher look like a
rank."""

DROPPED = ("TORCHELASTIC_ERROR_FILE",)
"""Variables that name files of a rank's launcher, which has already deleted them."""

GRACE = 5.0
"""Seconds in which a command must stop its ranks after SIGINT, and again after SIGTERM."""

ENDING = 40.0
"""Seconds in which a command must exit after all its ranks received SIGTERM. torchrun waits for
them for 30 seconds."""

STARTING = 120.0
"""Minimum of the time limit before any rank has imported torch, which depends on the machine and
not on the script."""

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_INSTALLED = re.compile(r"[/\\](site-packages|dist-packages|lib[/\\]python[\d.]+)[/\\]|^<")


@dataclass(frozen=True, kw_only=True)
class StockCommand:
    """A command that starts the ranks: a launcher's command line, a script and its arguments."""

    words: Sequence[str]
    size: int | None = None
    """Number of ranks if the command is only a script, which torchrun then starts."""
    alone: Sequence[str] = ()
    """Arguments to add for one process, so that it uses the total batch (`--total-batch`)."""

    def start_words(self, logs: Path, warm: WarmRanks | None = None) -> list[str]:
        """Return the full command line, with torchrun before a script that has no launcher.

        torchrun creates a log folder in `logs`. By default, it would leave one in the temporary
        folder. If `warm` is set, torchrun and the ranks are forked from its processes.
        """
        if self.size is None:
            return list(self.words)
        flags = ["--standalone", "--log-dir", str(logs), "--nproc-per-node", str(self.size)]
        if warm is None:
            return [*python_words(TORCHRUN), *flags, *self.words]
        ranks = ["--no-python", sys.executable, *warm.words(0, self.words)]
        return [sys.executable, *warm.words(0, [*flags, *ranks], module=TORCHRUN)]

    def __str__(self) -> str:
        return " ".join(self.words) + (f" on {self.size} ranks" if self.size else "")


@dataclass(frozen=True)
class StockRecords:
    """The record of one run: its training, and each rank's facts."""

    training: RecordedTraining
    ranks: Sequence[dict[str, Any]]
    steps: Sequence[Sequence[dict[str, Any]]] = field(default=())
    """The figures in the steps' files, such as losses and their terms, by rank and step."""


class StockRuns:
    """Context manager that executes a verification's runs in a temporary folder.

    Args:
        command: The command that starts the ranks.
        steps: Number of steps after which a run is stopped.
        logs: Folder for the output of each run.
        progress: Display of the current run.
        limit: Seconds without a step or a batch after which a run is stopped.
    """

    def __init__(
        self, command: StockCommand, steps: int, logs: Path, progress: Progress, limit: float
    ) -> None:
        self.command = command
        self._steps, self._logs, self._limit = steps, logs, limit
        self._progress = progress
        self._task = progress.add_task("", total=None)
        self._folder = Path(tempfile.mkdtemp(prefix="shardwise-stock-")).resolve()
        self._made = 0
        self._ranks = self._folder
        """Records of the ranks' last run. A reference replays that run's batches, because a script
        draws different numbers in fp64 and in fp32."""
        self._warm: WarmRanks | None = None

    def __enter__(self) -> StockRuns:
        self._reaper = OrphanReaper(self._folder).__enter__()
        command = self.command
        if command.size is not None and warm_rank.can_be_forked(command.words):
            environ = environment(command.size)
            packages = (*STOCK_PACKAGES, TORCHRUN, recorder.__name__)
            warm = WarmRanks(command.words, warm_rank.__name__, environ, packages=packages)
            self._warm = warm if warm.are_running else None
        return self

    def __exit__(self, *error: Any) -> None:
        if self._warm is not None:
            self._warm.__exit__(*error)
        self._reaper.__exit__(*error)
        shutil.rmtree(self._folder, ignore_errors=True)

    def ranks(
        self, words: str, *, wide: str | None = None, alter: Mapping[str, Any] | None = None
    ) -> StockRecords:
        """Run the script on its ranks. Raises RunFailed if it exits with an error."""
        made, folder = self._run(
            self.command.start_words(self._folder, self._warm), words, {}, wide=wide, alter=alter
        )
        self._ranks = folder
        return made

    def stopped_ranks(self, words: str, step: int, view: Path) -> StockRecords:
        """Run the script in `view` until step `step`, then send SIGTERM to each rank."""
        made, _ = self._run(
            self.command.start_words(self._folder, self._warm),
            words,
            {},
            stop_at=step,
            view=view,
        )
        return made

    def resumed_ranks(self, words: str, command: StockCommand, view: Path) -> StockRecords:
        """Run `command` in a stopped run's view. Raises RunFailed if it exits with an error."""
        warm = self._warm if warm_rank.can_be_forked(command.words) else None
        return self._run(command.start_words(self._folder, warm), words, {}, view=view)[0]

    def new_view(self) -> Path:
        """Return the folder for a view that several runs can share."""
        return self._folder / "view-shared"

    def reference(
        self,
        words: str,
        *,
        wide: str | None = None,
        alter: Mapping[str, Any] | None = None,
        notes_draws: bool = False,
    ) -> StockRecords:
        """Run the script in one process, on the union of the ranks' batches.

        With `--total-batch`, the process reads its own batches instead. If `notes_draws` is True,
        the facts list the operations that draw random numbers. Raises RunFailed if the script exits
        with an error.
        """
        facts = json.loads((self._ranks / "rank-0" / "stock.facts").read_text())
        known = {n: v for n, v in facts["environment"].items() if n not in DROPPED}
        variables = dict(known)
        if not facts["spawned"]:  # a script that spawns its ranks must not look like a rank
            variables |= RANK_VARIABLES | {"MASTER_PORT": str(_free_port())}
        variables |= {n: v for n, v in OTHER_LAUNCHERS.items() if n in variables}
        script = [*facts["argv"], *self.command.alone]
        if self._warm is not None:
            script = self._warm.words(0, script)
        command = [facts["executable"], *script]
        replay = None if self.command.alone else self._ranks
        made, _ = self._run(
            command,
            words,
            variables,
            wide=wide,
            alter=alter,
            replay=replay,
            reference_of=facts,
            notes_draws=notes_draws,
        )
        return made

    def _run(
        self,
        command: Sequence[str],
        words: str,
        variables: Mapping[str, str],
        *,
        wide: str | None = None,
        alter: Mapping[str, Any] | None = None,
        replay: Path | None = None,
        reference_of: Mapping[str, Any] | None = None,
        notes_draws: bool = False,
        stop_at: int | None = None,
        view: Path | None = None,
    ) -> tuple[StockRecords, Path]:
        self._made += 1
        self._progress.update(
            self._task, description=printable(f"run {self._made} · {words} · {self.command}")
        )
        folder = self._folder / f"run-{self._made}"
        folder.mkdir()
        current = Path.cwd().resolve()
        view = view or self._folder / f"view-{self._made}"
        if view.exists():  # a resumed run uses the stopped run's view
            place = view.joinpath(*current.relative_to(current.anchor).parts)
        else:
            place = make_view(view, current, hidden=self._folder)
        if reference_of is not None and reference_of["folder"].startswith(reference_of["view"]):
            # A launcher may change to another folder before it starts the ranks.
            place = view / os.path.relpath(reference_of["folder"], reference_of["view"])
            place.mkdir(parents=True, exist_ok=True)
        request = {
            "record": str(folder),
            "view": str(view),
            "steps": self._steps,
            "stop_at": stop_at,
            "reference": reference_of is not None,
            "replay": None if replay is None else str(replay),
            "wide": wide,
            "draws": notes_draws,
            "alter": dict(alter or {}),
        }
        log = self._logs / f"{self._made:02d}.txt"
        package = str(Path(shardwise.__file__).parents[1])
        environ = environment(self.command.size or 2)
        environ = {n: v for n, v in environ.items() if n not in INHERITED} | dict(variables)
        kept = environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [str(START), package, *(path for path in kept if path != str(START))]
        environ |= {
            VARIABLE: json.dumps(request),
            "PYTHONPATH": os.pathsep.join(filter(None, dict.fromkeys(paths))),
            "PWD": str(place),
        }
        if wide:
            # Compiled code is not widened, and a compiler changes only rounding.
            environ["TORCHDYNAMO_DISABLE"] = "1"
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    list(command),
                    cwd=place,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environ,
                    start_new_session=True,  # so that Ctrl-C reaches the ranks only through us
                )
        except (FileNotFoundError, PermissionError) as error:
            raise LaunchError(
                f"There is no program {command[0]!r} to start the ranks with: {error.strerror}."
            ) from None
        groups = {process.pid}
        try:
            code = self._wait(process, folder, words, groups, is_stopped=stop_at is not None)
        finally:
            end(process, folder)
            for group in groups:  # later, another process may have this id
                self._reaper.ended(group)
        if code and stop_at is None:
            raise RunFailed(words, code, log.read_text(errors="replace"))
        return read(folder, words), folder

    def _wait(
        self,
        process: subprocess.Popen[bytes],
        folder: Path,
        words: str,
        groups: set[int],
        *,
        is_stopped: bool,
    ) -> int:
        """Wait until a run exits, and return its exit code.

        Adds the ranks' process groups to `groups`. Raises LaunchError if there is no new step or
        batch within the time limit.
        """
        self._reaper.started(process.pid)
        files, since = -1, time.monotonic()
        while True:
            try:
                return process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                pass
            claimed = list(_claimed(folder))
            for pid in claimed:
                # torchrun starts each rank in a separate process group.
                group = _group(pid)
                if group is not None and group not in groups and group != os.getpgid(0):
                    groups.add(group)
                    self._reaper.started(group)
            if (count := sum(1 for _ in folder.glob("rank-*/*.pt"))) != files:
                files, since = count, time.monotonic()
            limit = self._limit if claimed else max(self._limit, STARTING)
            if is_stopped and _all_left(folder):
                limit = ENDING
            if time.monotonic() - since > limit:
                if is_stopped and _all_left(folder):
                    return 1  # a script that ignores SIGTERM, or its launcher
                raise LaunchError(describe_stall(folder, words, limit))


def _all_left(folder: Path) -> bool:
    ranks = list(folder.glob("rank-*"))
    return bool(ranks) and all((rank / "stock.facts").exists() for rank in ranks)


def _claimed(folder: Path) -> Iterator[int]:
    """Yield the pids of the ranks that are recorded in `folder`."""
    for claim in folder.glob(f"rank-*/{CLAIM}"):
        if text := claim.read_text():
            yield int(text)


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Stop a run's command, and kill all processes that it leaves behind."""
    has_ended = process.poll() is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        if process.poll() is None:
            process.send_signal(number)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                continue
    end_within(process, 0.0)
    if has_ended and not _has_proc():
        return  # other processes may have its ranks' ids by now
    for pid in _left(folder):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _left(folder: Path) -> list[int]:
    """Return the running processes of a run: its ranks, and processes that they started."""
    if not _has_proc():
        return list(_claimed(folder))
    # Programs have the request in their environment. A forked rank shows that of its fork server.
    mark = os.fsencode(json.dumps(str(folder)))
    found = [pid for pid in _claimed(folder) if _has_open(pid, folder)]
    for each in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in each.read_bytes():
                found.append(int(each.parent.name))
        except OSError:  # the process has exited, or belongs to another user
            continue
    return found


def _has_open(pid: int, folder: Path) -> bool:
    """Return whether a process has a file in `folder` open. Each rank does (`STACK`)."""
    try:
        return any(
            os.path.realpath(file).startswith(f"{folder}{os.sep}")
            for file in Path(f"/proc/{pid}/fd").iterdir()
        )
    except OSError:  # it has exited
        return False


def _has_proc() -> bool:
    """Return whether other processes' environments can be read, which is impossible on macOS."""
    return Path("/proc/self/environ").exists()


def describe_stall(folder: Path, words: str, limit: float) -> str:
    """Describe a run that makes no progress: each rank's last step and current line."""
    ranks = sorted(folder.glob("rank-*"), key=lambda path: int(path.name[5:]))
    if not ranks:
        return (
            f"Run of {words} stopped: no rank has imported torch in {limit:g} s. Raise "
            "--time-limit if it needs longer to start."
        )
    for pid in {*_claimed(folder)} & {*_left(folder)}:
        try:
            os.kill(pid, signal.SIGUSR2)  # writes the stack to STACK
        except OSError:
            continue
    time.sleep(0.5)
    said = []
    for rank in ranks:
        steps = max((int(p.stem[14:]) for p in rank.glob("engine-0-step-*.pt")), default=0)
        done = f"after {steps} step{'s' * (steps != 1)}" if steps else "before its first step"
        stack = rank / STACK
        line = users_line(stack.read_text()) if stack.exists() else None
        ended = " (it has ended)" if (rank / "stock.facts").exists() else ""
        said.append(f"Rank {rank.name[5:]} is {done}{ended}{f' in {line}' if line else ''}.")
    return (
        f"Run of {words} stopped: no step and no batch in {limit:g} s. {' '.join(said)} Raise "
        "--time-limit if a step takes longer."
    )


def users_line(stack: str) -> str | None:
    """Return FILE:LINE (FUNCTION) of the innermost frame of `stack` that is not library code."""
    for match in _FRAME.finditer(stack):  # faulthandler writes the innermost frame first
        if not _INSTALLED.search(match["file"]) and str(START.parents[2]) not in match["file"]:
            function = match["function"]
            where = "" if function.startswith("<") else f" ({function})"
            return f"{Path(match['file']).name}:{match['line']}{where}"
    return None


def read(folder: Path, words: str) -> StockRecords:
    """Read the records of a run's ranks. Raises LaunchError if a record is incomplete."""
    ranks = sorted(folder.glob("rank-*"), key=lambda path: int(path.name[5:]))
    if missing := [rank.name[5:] for rank in ranks if not (rank / "stock.facts").exists()]:
        raise LaunchError(
            f"Run of {words}: rank {missing[0]} was killed, so its record is not complete."
        )
    facts = [json.loads((rank / "stock.facts").read_text()) for rank in ranks]
    load = cache(records.load_step)  # loading takes most of the time of a small comparison
    steps = []
    for rank in ranks:
        paths = sorted(rank.glob("engine-0-step-*.pt"), key=lambda path: int(path.stem[14:]))
        rows = map(load, paths[1:])
        steps.append([{k: v for k, v in row.items() if k != "tensors"} for row in rows])
    training = records.read(folder, load)
    return StockRecords(training, facts, steps)


def _free_port() -> int:
    """Return a port that is free now. torch's store binds it a moment later."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
