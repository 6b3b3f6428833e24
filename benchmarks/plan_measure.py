"""Trains a model of plan_models.py for some steps, and records its peak memory of tensors.

    shardwise run -n 2 --zero 2 benchmarks/plan_measure.py FILE gpt2 [--save FOLDER]

Each rank writes FILE.RANK: {"private": ..., "shared": ...}, in bytes. The measurement starts before
sw.Engine. Of the tensors that exist then, it counts only the parameters, and not the dataset.
Private is the peak of living tensors that operators have made, plus the buffers for files. Shared
is this rank's part (Pss) of memory that several ranks map.

It does not use the resident set, which also contains Python, libraries, workspaces of kernels and
free blocks of the C library.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import runpy
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise.engine
from shardwise.tiers import staging

MODELS = Path(__file__).with_name("plan_models.py")
TRANSFORMERS = ("gpt2", "llama", "t5", "mixtral", "vit", "whisper", "bert")


class TensorBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators make, from their birth to their death.

    torch's profiler would count temporaries inside of operators too, but it reports no memory that
    another thread frees, as the thread of a collective does with gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and add its new tensors."""
        out = func(*args, **(kwargs or {}))
        # Operators do not allocate the memory that several ranks map. It only appears as the input
        # of views, so do not count outputs that share memory with an input.
        inputs = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            key = storage._cdata
            has_memory = storage.device.type != "meta"
            if has_memory and key not in self._alive and key not in inputs:
                self._alive[key] = weakref.ref(storage, lambda _, k=key: self._alive.pop(k))
        self.peak = max(self.peak, self.current)
        return out

    @property
    def current(self) -> int:
        """Bytes of all living storages. Asked each time, because the engine resizes some."""
        alive = [reference() for reference in list(self._alive.values())]
        return sum(storage.nbytes() for storage in alive if storage is not None)


def _storages(nest: Any) -> list[torch.UntypedStorage]:
    leaves = pytree.tree_leaves(nest)
    return [each.untyped_storage() for each in leaves if isinstance(each, torch.Tensor)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the model that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("model")
    parser.add_argument("--save", type=Path, help="save a checkpoint there, in each step")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args(arguments)
    measure(options.file, options.model, save=options.save, steps=options.steps)


def warm_up(models: Sequence[str]) -> None:
    """Import the modules that the models and the first update need, so that forks have them."""
    if set(models) & set(TRANSFORMERS):
        import transformers  # noqa: F401
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    torch.optim.AdamW([parameter]).step()


def measure(file: Path, model: str, *, save: Path | None = None, steps: int = 2) -> None:
    """Train `model` with an engine that writes `file` and then ends the script."""
    with TensorBytes() as tensors:
        shardwise.engine.Engine = _measured(file, save, steps, tensors)  # type: ignore[misc]
        sys.argv = [str(MODELS), model]
        runpy.run_path(str(MODELS), run_name="__main__")


def _measured(file: Path, save: Path | None, steps: int, tensors: TensorBytes) -> Any:
    """Return an engine's class that writes `file` after `steps` steps of each engine, and ends."""
    for_files = _count_buffers()

    class MeasuredEngine(shardwise.engine.Engine):
        made = ended = before = 0

        def __init__(self, *args: Any, **options: Any) -> None:
            if not MeasuredEngine.made:
                # Other engines' models exist by now too: they are part of the training.
                own = [each for each in gc.get_objects() if type(each) is torch.nn.Parameter]
                held = sum(p.numel() * p.element_size() for p in own)
                tensors.peak = tensors.current
                MeasuredEngine.before = tensors.current - held
            MeasuredEngine.made += 1
            super().__init__(*args, **options)

        def step(self, *args: Any, **options: Any) -> Any:
            stats = super().step(*args, **options)
            MeasuredEngine.ended += 1
            if save is not None:
                self.save(save)
            if MeasuredEngine.ended == steps * MeasuredEngine.made:
                private = tensors.peak - MeasuredEngine.before + sum(for_files)
                found = {"private": private, "shared": part_of_shared()}
                rank = os.environ.get("RANK", "0")
                Path(f"{file}.{rank}").write_text(json.dumps(found))
                raise SystemExit(0)
            return stats

    return MeasuredEngine


def _count_buffers() -> list[int]:
    """Return a list that grows by the bytes of each buffer for files, which all stay to the end."""
    found: list[int] = []
    mapped = staging.mapped

    def counted(nbytes: int, **options: Any) -> torch.Tensor:
        found.append(nbytes)
        return mapped(nbytes, **options)

    staging.mapped = counted
    return found


def part_of_shared() -> int:
    """Return this process's part of the memory that several processes map."""
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("Pss_Shmem"))


if __name__ == "__main__":
    main()
