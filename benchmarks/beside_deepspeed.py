"""Runs the same training through the real DeepSpeed and through shardwise.deepspeed: the driver of
deepspeed_parity.py and deepspeed_pipeline.py.

Each library trains all cases in one start of torchrun, on the CPU; a rank runs the same script
with --worker. What a case does is the script's, as is what is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

LIMIT = 900
"""Seconds in which one library has trained all cases."""

Rows = list[list[float]]
"""What was seen of each step."""


def parser(doc: str, sizes: str) -> argparse.ArgumentParser:
    """The flags of both scripts; `sizes` is what a table is made for each of."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument(f"--{sizes}", dest="sizes", type=int, nargs="+", default=[1, 2])
    made.add_argument("--only", default="", help="cases whose names have this in them")
    for hidden in ("--worker", "--out", "--names"):
        made.add_argument(hidden, help=argparse.SUPPRESS)
    return made


def drive(
    given: argparse.Namespace,
    names: Sequence[str],
    steps: int,
    train: Callable[[Any, str], Rows],
    compare: Callable[[int, list[str]], None],
) -> None:
    """On a rank `train` the cases that are asked for; else `compare` each size, which prints."""
    if given.worker:
        _work(given.worker, json.loads(given.names), given.out, train)
        return
    import torch

    torch.set_num_threads(1)  # as each rank has
    print(f"torch {torch.__version__}, {steps} steps, largest relative differences")
    for size in given.sizes:
        compare(size, [name for name in names if given.only in name])


def _work(library: str, names: list[str], out: str, train: Callable[[Any, str], Rows]) -> None:
    """Run the cases called `names` on this rank, and write what they did."""
    deepspeed = import_module(library)
    deepspeed.init_distributed()
    found = {name: train(deepspeed, name) for name in names}
    if deepspeed.comm.get_rank() == 0:
        Path(out).write_text(json.dumps(found))


def both(script: str, ranks: int, names: list[str]) -> tuple[dict[str, Rows], dict[str, Rows]]:
    """What ours and DeepSpeed's did in each case of `script`."""
    with tempfile.TemporaryDirectory() as folder:
        theirs = _start("deepspeed", script, ranks, names, folder)
        return _start("shardwise.deepspeed", script, ranks, names, folder), theirs


def _start(library: str, script: str, ranks: int, names: list[str], folder: str) -> dict[str, Rows]:
    out = Path(folder) / f"{library}-{ranks}.json"
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    mine = [script, "--worker", library, "--out", str(out), "--names", json.dumps(names)]
    environ = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "SHARDWISE_QUIET": "on"}
    _run([sys.executable, *words, *mine], environ, library)
    return json.loads(out.read_text())


def _run(command: list[str], environ: dict[str, str], library: str) -> None:
    """Run `command`; SystemExit with what it wrote where it fails, or does not end: DeepSpeed
    compiles at first, and waits forever for a compiler that was killed."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True) as ranks:
        try:
            wrote, why = ranks.communicate(timeout=LIMIT), f"failed with {ranks.returncode}"
        except subprocess.TimeoutExpired:
            ranks.terminate()  # torchrun ends its workers
            wrote, why = ranks.communicate(), f"did not end in {LIMIT} s"
    if ranks.returncode:
        raise SystemExit("\n".join([f"{library} {why}:", *(text[-4000:] for text in wrote)]))


def difference(ours: Rows, theirs: Rows, column: int) -> float:
    """The largest relative difference in a column; NaN where DeepSpeed has no figure."""
    pairs = [(a[column], b[column]) for a, b in zip(ours, theirs, strict=True)]
    return max((abs(a - b) / max(abs(b), 1e-12) if a != b else 0.0) for a, b in pairs)


def shown(values: Sequence[float]) -> str:
    """The cells of a row; a dash for NaN."""
    return " | ".join("-" if value != value else f"{value:.1e}" for value in values)
