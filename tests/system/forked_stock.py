"""Runs of `shardwise verify --stock` whose processes are forks of one that has imported torch.

Most of the time of a small verification is the import of torch, by each rank of each run. A fork
runs the same recorder and the same script. test_verify_stock.py has the command itself.

    echo '{"script": "train.py", "words": [], "size": 2}' | python -m tests.system.forked_stock
"""

import atexit
import json
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.tools.verify.runs import RunFailed
from shardwise.tools.verify.stock import recorder, stock_flow, stock_runs
from shardwise.tools.verify.stock.stock_command import sentences
from shardwise.tools.verify.stock.stock_runs import StockRecords

LIMIT = 60.0
"""Seconds that one run may take."""


class ForkedRuns:
    """Makes the runs that `StockRuns` makes, as forks of this process."""

    def __init__(self, script: Path, words: Sequence[str], size: int, steps: int) -> None:
        self._script, self._words, self._size, self._steps = script, list(words), size, steps
        self._folder = tempfile.TemporaryDirectory(prefix="tests-stock-")
        self._made = 0
        self._ranks = Path()
        self.names: list[str] = []

    def __enter__(self) -> "ForkedRuns":
        return self

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()

    def ranks(
        self, words: str, *, wide: str | None = None, alter: Mapping[str, Any] | None = None
    ) -> StockRecords:
        self._ranks = self._run(words, wide, alter, self._size, None)
        return stock_runs.read(self._ranks, words)

    def reference(
        self,
        words: str,
        *,
        wide: str | None = None,
        alter: Mapping[str, Any] | None = None,
        notes_draws: bool = False,
    ) -> StockRecords:
        folder = self._run(words, wide, alter, 1, self._ranks, notes_draws=notes_draws)
        return stock_runs.read(folder, words)

    def _run(
        self,
        words: str,
        wide: str | None,
        alter: Mapping[str, Any] | None,
        size: int,
        replay: Path | None,
        *,
        notes_draws: bool = False,
    ) -> Path:
        self._made += 1
        self.names.append(words)
        folder = Path(self._folder.name) / f"run-{self._made}"
        folder.mkdir()
        request = {
            "record": str(folder),
            "view": None,
            "stop_at": None,
            "draws": notes_draws,
            "steps": self._steps,
            "reference": replay is not None,
            "replay": None if replay is None else str(replay),
            "wide": wide,
            "alter": dict(alter or {}),
        }
        port = stock_runs._free_port()
        logs = [folder / f"output-{rank}.txt" for rank in range(size)]
        children = {self._fork(request, rank, size, port, logs[rank]): rank for rank in range(size)}
        code, end = 0, time.monotonic() + LIMIT
        while children and time.monotonic() < end:
            pid, status = os.waitpid(-1, os.WNOHANG) if children else (0, 0)
            if pid in children:
                del children[pid]
                code = code or os.waitstatus_to_exitcode(status)
                if code:
                    break  # the other ranks may wait for this one
            else:
                time.sleep(0.01)
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if children or code:
            output = "\n".join(log.read_text(errors="replace") for log in logs)
            raise RunFailed(words, code or 124, output)
        return folder

    def _fork(self, request: dict[str, Any], rank: int, size: int, port: int, log: Path) -> int:
        if pid := os.fork():
            return pid
        code = 1
        try:
            with log.open("wb") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            os.environ |= {name: str(value) for name, value in ranks.items()}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ[recorder.VARIABLE] = json.dumps(request)
            sys.argv = sys.orig_argv = [str(self._script), *self._words]
            sys.path.insert(0, str(self._script.parent))
            sys.stdout = os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            atexit._clear()  # handlers of the test's process
            torch.set_num_threads(1)
            recorder.start()
            runpy.run_path(str(self._script), run_name="__main__")
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)


def warm_up() -> None:
    """Import what a first step imports, so that forks need not."""
    import torch.distributed.fsdp
    import torch.distributed.optim
    import torch.distributed.tensor.parallel

    weight = torch.nn.Parameter(torch.ones(2))
    weight.sum().backward()
    torch.optim.AdamW([weight], lr=0.0).step()


def verify(script: Path, words: Sequence[str], size: int) -> dict[str, Any]:
    """Verify a script, and return the names of its causes, the verdict and what is said of it."""
    with ForkedRuns(script, words, size, 20) as runs:
        try:
            result = stock_flow.verify(runs)  # type: ignore[arg-type]
        except RunFailed as error:
            return {"names": [], "verdict": "failed", "words": error.output, "runs": runs.names}
    cause = [result.cause] if result.cause is not None else []
    return {
        "names": [each.name for each in (*result.findings, *cause)],
        "verdict": result.verdict.name.lower(),
        "words": sentences(result),
        "runs": runs.names,
        "losses": [list(each) for each in result.losses],
    }


def main() -> None:
    """Verify what each line of stdin asks for, and answer in a line."""
    warm_up()
    for line in sys.stdin:
        request = json.loads(line)
        found = verify(Path(request["script"]), request["words"], request["size"])
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
