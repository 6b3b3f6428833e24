"""Trains a model of plan_models.py for some steps, and notes the peak of its memory.

    shardwise run -n 2 --zero 2 benchmarks/plan_measure.py FILE gpt2 [--save FOLDER]

Each rank writes FILE.RANK: {"private": ..., "shared": ...}, bytes from before sw.Engine on, without
what the process had then beside the model, and without pages of files (code that a kernel's first
call loads). Private is VmHWM without memory that is shared; of that a rank counts its part (Pss).
Freed blocks from 64 kB on go back to the system, so that gaps of the heap are not in it: with
--keeps they stay, as sw.init has it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import shardwise.engine
from shardwise.tiers.host_memory import MMAP_THRESHOLD

MODELS = Path(__file__).with_name("plan_models.py")
RETURNED = 1 << 16
"""Bytes from which a block is a mapping of its own."""

TRANSFORMERS = ("gpt2", "llama", "t5", "mixtral", "vit", "whisper", "bert")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the model that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("model")
    parser.add_argument("--save", type=Path, help="save a checkpoint there, in each step")
    parser.add_argument("--keeps", action="store_true")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args(arguments)
    warm_up([options.model])
    measure(
        options.file, options.model, keeps=options.keeps, save=options.save, steps=options.steps
    )


def warm_up(models: Sequence[str]) -> None:
    """Load what the first update loads, and libraries: they are no memory of a model."""
    if set(models) & set(TRANSFORMERS):
        import transformers  # noqa: F401
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    torch.optim.AdamW([parameter]).step()


def measure(
    file: Path, model: str, *, keeps: bool = False, save: Path | None = None, steps: int = 2
) -> None:
    """Train `model` with an engine that notes what memory it takes."""
    if not keeps:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(RETURNED)  # so that sw.init leaves it so
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, RETURNED)
    shardwise.engine.Engine = _measured(file, save, steps)  # type: ignore[misc]
    sys.argv = [str(MODELS), model]
    runpy.run_path(str(MODELS), run_name="__main__")


def _measured(file: Path, save: Path | None, steps: int) -> Any:
    """An engine's class that writes `file` after `steps` steps of each engine, and ends."""

    class MeasuredEngine(shardwise.engine.Engine):
        made = ended = before = 0

        def __init__(self, *args: Any, **options: Any) -> None:
            if not MeasuredEngine.made:
                # Other engines' models are there by now too: they are part of the training.
                own = [each for each in gc.get_objects() if type(each) is torch.nn.Parameter]
                held = sum(p.numel() * p.element_size() for p in own)
                MeasuredEngine.before = memory_status()["RssAnon"] - held
                Path("/proc/self/clear_refs").write_text("5")
            MeasuredEngine.made += 1
            super().__init__(*args, **options)

        def step(self, *args: Any, **options: Any) -> Any:
            stats = super().step(*args, **options)
            MeasuredEngine.ended += 1
            if save is not None:
                self.save(save)
            if MeasuredEngine.ended == steps * MeasuredEngine.made:
                rank = os.environ.get("RANK", "0")
                found = _peak(MeasuredEngine.before)
                Path(f"{file}.{rank}").write_text(json.dumps(found))
                raise SystemExit(0)
            return stats

    return MeasuredEngine


def _peak(before: int) -> dict[str, int]:
    status = memory_status()
    shared = status["RssShmem"]
    private = status["VmHWM"] - status["RssFile"] - shared - before
    return {"private": private, "shared": _part_of_shared(shared)}


def _part_of_shared(resident: int) -> int:
    """This process's part of memory that several have, where the kernel tells it."""
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    found = [int(row.split()[1]) * 1024 for row in rows if row.startswith("Pss_Shmem")]
    return found[0] if found else resident


def memory_status() -> dict[str, int]:
    """Bytes by name, of /proc/self/status."""
    rows = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[-1:] == ["kB"]}


if __name__ == "__main__":
    main()
