"""Runs the ranks of a stock script, and its reference, recorded."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress

import shardwise
from shardwise.errors import LaunchError
from shardwise.launch import program
from shardwise.tools.verify import records
from shardwise.tools.verify.records import RecordedTraining
from shardwise.tools.verify.runs import RunFailed, environment
from shardwise.tools.verify.stock.recorder import VARIABLE

START = Path(__file__).parent / "start"
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
"""What tells the reference that it is the only rank, whichever launcher started the ranks."""


@dataclass(frozen=True, kw_only=True)
class StockCommand:
    """A command that starts the ranks: the words of a launcher, a script and its arguments."""

    words: Sequence[str]
    size: int | None = None
    """Number of ranks if the words are those of a script alone; torchrun starts it then."""

    @property
    def full_words(self) -> list[str]:
        """The words to start, with torchrun in front of a script."""
        if self.size is None:
            return list(self.words)
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        return [sys.executable, *torchrun, "--nproc-per-node", str(self.size), *self.words]

    def __str__(self) -> str:
        return " ".join(self.words) + (f" on {self.size} ranks" if self.size else "")


@dataclass(frozen=True)
class StockRecords:
    """What one run recorded: its training, and the facts of each rank."""

    training: RecordedTraining
    ranks: Sequence[dict[str, Any]]
    steps: Sequence[Sequence[dict[str, Any]]] = field(default=())
    """By rank and step, what stands beside tensors in a step's file: losses and their terms."""


class StockRuns:
    """Makes the runs of one verification, in a folder that is removed at the end. A context."""

    def __init__(self, command: StockCommand, steps: int, logs: Path, progress: Progress) -> None:
        self._command, self._steps, self._logs = command, steps, logs
        self._progress = progress
        self._task = progress.add_task("", total=None)
        self._folder = Path(tempfile.mkdtemp(prefix="shardwise-stock-"))
        self._made = 0
        self._ranks = self._folder
        """What the ranks recorded last: a reference gets the batches of that run, since data that
        a script draws in fp64 are other numbers than those in fp32."""

    def __enter__(self) -> StockRuns:
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def ranks(
        self, words: str, *, wide: bool = False, alter: Mapping[str, Any] | None = None
    ) -> StockRecords:
        """Run the script on its ranks. Raises RunFailed."""
        made, folder = self._run(self._command.full_words, words, {}, wide=wide, alter=alter)
        self._ranks = folder
        return made

    def reference(
        self, words: str, *, wide: bool = False, alter: Mapping[str, Any] | None = None
    ) -> StockRecords:
        """Run the script in one process, on the union of the batches that the ranks were given.

        Raises RunFailed.
        """
        facts = json.loads((self._ranks / "rank-0" / "stock.facts").read_text())
        variables = {**facts["environment"], **RANK_VARIABLES, "MASTER_PORT": str(_free_port())}
        for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"):
            if name in variables:
                variables[name] = "1" if name.endswith("SIZE") else "0"
        command = [sys.executable, *facts["argv"]]
        made, _ = self._run(command, words, variables, wide=wide, alter=alter, replay=self._ranks)
        return made

    def _run(
        self,
        command: Sequence[str],
        words: str,
        variables: Mapping[str, str],
        *,
        wide: bool,
        alter: Mapping[str, Any] | None,
        replay: Path | None = None,
    ) -> tuple[StockRecords, Path]:
        self._made += 1
        self._progress.update(self._task, description=f"run {self._made} · {words}")
        folder = self._folder / f"run-{self._made}"
        folder.mkdir()
        request = {
            "record": str(folder),
            "steps": self._steps,
            "reference": replay is not None,
            "replay": None if replay is None else str(replay),
            "wide": wide,
            "alter": dict(alter or {}),
        }
        log = self._logs / f"{self._made:02d}.txt"
        package = str(Path(shardwise.__file__).parents[1])
        paths = [str(START), package, os.environ.get("PYTHONPATH", "")]
        environ = environment(self._command.size or 2) | dict(variables)
        environ |= {
            VARIABLE: json.dumps(request),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environ,
                )
                code = program.wait_for(process, lambda: None)
        except FileNotFoundError:
            raise LaunchError(
                f"There is no program {command[0]!r} to start the ranks with."
            ) from None
        if code:
            raise RunFailed(words, code, log.read_text(errors="replace"))
        return read(folder), folder


def read(folder: Path) -> StockRecords:
    """Read what all ranks of one run recorded."""
    import torch

    ranks = sorted(folder.glob("rank-*"), key=lambda path: int(path.name[5:]))
    facts = [json.loads((rank / "stock.facts").read_text()) for rank in ranks]
    steps = []
    for rank in ranks:
        paths = sorted(rank.glob("engine-0-step-*.pt"), key=lambda path: int(path.stem[14:]))
        rows = [torch.load(path, weights_only=True) for path in paths[1:]]
        steps.append([{k: v for k, v in row.items() if k != "tensors"} for row in rows])
    training = records.read(folder)
    return StockRecords(training, facts, steps)


def _free_port() -> int:
    """Return a port that is free now. torch's own store takes it a moment later."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
