"""Warns about steps that a Horovod script omits, and about operations that stall.

Each warning is printed once. Warnings are based on comparisons rather than guesses: ranks compare
weights and data when they reduce their first gradients, and file paths when they save.
"""

from __future__ import annotations

import gc
import hashlib
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import data
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shardwise import config
from shardwise.horovod.coordinator import OperationRequest
from shardwise.watch.status_server import StatusServer
from shardwise.watch.wait_graph import RankStatus, named

BROADCAST = (
    "the parameters differ between ranks when training starts, and will stay different. After "
    "building the model, write hvd.broadcast_parameters(model.state_dict(), root_rank=0)."
)
BROADCAST_STATE = (
    "the optimizer's state differs between ranks when training starts. Before training, write "
    "hvd.broadcast_optimizer_state(optimizer, root_rank=0)."
)
SHARD = (
    "all ranks read the same samples: the DataLoader does not shard its dataset. Write sampler = "
    "torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), "
    "rank=hvd.rank()), and DataLoader(dataset, sampler=sampler, ...)."
)
SCALE = (
    "the learning rate has not been scaled by the number of ranks, because hvd.size() was never "
    "called. Gradients are averaged over a batch that is hvd.size() times as large. Write "
    "lr=args.lr * hvd.size(), and warm up."
)
WRAP = (
    "an optimizer steps on gradients that are not averaged over the ranks. Write optimizer = "
    "hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())."
)
PIN = (
    "several ranks of a host train on one GPU. After hvd.init(), write "
    "torch.cuda.set_device(hvd.local_rank())."
)

Note = Mapping[str, str]


_SHARED_SETTINGS = {"bucket_mb", "quiet"}
"""Engine settings that also affect Horovod scripts."""

_ENGINE_ONLY = (config.OF_THE_ENGINE - _SHARED_SETTINGS) | {
    "tensor",
    "pipeline",
    "expert",
    "context",
    "exact",
    "islands",
    "behind",
}


def idle_settings_line(given: Mapping[str, tuple[Any, str]]) -> str:
    """Return a warning about settings in `given` that affect only `sw.Engine`, or "".

    `given` contains each setting's value and source. Default values cause no warning.
    """
    same = {name: config.FIELDS[name].default for name in _ENGINE_ONLY} | {"zero": 0}
    idle = [
        config.as_given(name, value, source)
        for name, (value, source) in given.items()
        if name in _ENGINE_ONLY and value != same[name]
    ]
    if not idle:
        return ""
    has, it = ("has", "it") if len(idle) == 1 else ("have", "them")
    return (
        f"{', '.join(idle)} {has} no effect on what hvd.DistributedOptimizer trains: only "
        f"sw.Engine uses {it}. Leave {it} out, or train with sw.Engine: docs/from_horovod.md."
    )


def write_warning(line: str) -> None:
    """Write a warning to stderr."""
    if sys.__stderr__ is not None:
        sys.__stderr__.write(f"shardwise: {line}\n")
        sys.__stderr__.flush()


class ScriptComparison:
    """Compares all ranks' reports on rank 0, and yields each warning once."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._saved: dict[tuple[str, str], set[int]] = {}

    def compare(self, notes: Mapping[int, Note]) -> Iterator[str]:
        """Compare the notes that ranks send with their first gradients, and yield warnings."""
        if len(notes) < 2:
            return
        said = {key: [note.get(key, "") for note in notes.values()] for key in _KEYS}
        if len(set(said["weights"])) > 1:
            yield from self._once(BROADCAST)
        if len(set(said["state"])) > 1:
            yield from self._once(BROADCAST_STATE)
        if len(set(said["samples"])) == 1 and said["samples"][0]:
            yield from self._once(SHARD)
        if "unscaled" in said["rate"]:
            yield from self._once(SCALE)
        devices = [device for device in said["device"] if device]
        if len(set(devices)) < len(devices):
            yield from self._once(PIN)

    def compare_save(self, rank: int, what: list[str]) -> Iterator[str]:
        """Yield a warning if several ranks save to the same file.

        `what` contains the host, the path and the calling line.
        """
        host, path, line = what
        ranks = self._saved.setdefault((host, path), set())
        ranks.add(rank)
        if len(ranks) > 1:
            yield from self._once(
                f"{named(ranks)} all write {path} ({line}), so they overwrite or damage each "
                "other's file. Write if hvd.rank() == 0: before it.",
                "save",
            )

    def _once(self, line: str, about: str = "") -> Iterator[str]:
        if (about or line) not in self._said:
            self._said.add(about or line)
            yield line


_KEYS = ("weights", "state", "samples", "rate", "device")


# -- reports of each rank -------------------------------------------------------------------------


def describe_rank(
    optimizer: optim.Optimizer, *, averages: bool, asked_size: bool
) -> dict[str, str]:
    """Return this rank's note for `ScriptComparison`, which is sent with its first gradients."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    device = params[0].device
    return {
        "weights": _digest(params),
        "state": str(len(optimizer.state)),
        "samples": _sample_digest(),
        "rate": "unscaled" if averages and not asked_size else "",
        "device": f"{socket.gethostname()} {device}" if device.type != "cpu" else "",
    }


def _digest(tensors: list[Tensor]) -> str:
    """Return a digest of a few elements from each tensor."""
    found = hashlib.sha256()
    for tensor in tensors:
        few = tensor.detach().reshape(-1)
        few = few[:: max(1, few.numel() // 64)].to("cpu", torch.float64)
        found.update(few.numpy().tobytes())
    return found.hexdigest()[:16]


def _sample_digest() -> str:
    """Return a digest of the first and last samples that an unsharded DataLoader reads.

    Returns "" if these samples are unknown.
    """
    # The script owns the loader and nothing refers to it, so search memory for its iterator.
    for one in gc.get_objects():
        if type(one).__mro__[-2:-1] == (_BaseDataLoaderIter,):
            sampler = getattr(getattr(one, "_index_sampler", None), "sampler", None)
            dataset: Any = getattr(one, "_dataset", None)
            if isinstance(sampler, data.RandomSampler | data.SequentialSampler):
                # Only tensors, because reading the user's own dataset would run user code.
                tensors = dataset.tensors if type(dataset) is data.TensorDataset else (dataset,)
                if any(type(t) is not Tensor or t.layout != torch.strided for t in tensors):
                    return ""
                length = len(tensors[0])
                found = hashlib.sha256(str(length).encode())
                for end in (tensor[index] for index in (0, length - 1) for tensor in tensors):
                    raw = end.detach().cpu().contiguous().view(-1).view(torch.uint8)
                    found.update(b"|" + raw.numpy().tobytes())
                return found.hexdigest()[:16]
    return ""


class ScriptWatcher:
    """Watches a rank for steps of plain optimizers and for calls to torch.save.

    For each save, it calls `report_save` with the host, path and calling line, which are sent to
    rank 0. `averages` returns whether this rank has requested a reduction.
    """

    def __init__(
        self, rank: int, report_save: Callable[[list[str]], None], averages: Callable[[], bool]
    ) -> None:
        self._rank = rank
        self._report_save = report_save
        self._averages = averages
        self._paths: set[str] = set()
        self._steps = 0
        self._paused = False
        self._hook = register_optimizer_step_post_hook(self._after_step)
        self._save = torch.save
        torch.save = self._save_and_report

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore optimizer steps inside the block, because the script did not request them."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def close(self) -> None:
        """Stop watching."""
        self._hook.remove()
        if torch.save == self._save_and_report:
            torch.save = self._save

    def _after_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Warn at the second step if this rank has not reduced anything, not even manually."""
        if self._paused:
            return
        self._steps += 1
        if self._steps == 2 and self._rank == 0 and not self._averages():
            write_warning(WRAP)

    def _save_and_report(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, str | os.PathLike):
            path = str(Path(f).resolve())
            if path not in self._paths:
                self._paths.add(path)
                caller = traceback.extract_stack(limit=2)[0]
                self._report_save(
                    [socket.gethostname(), path, f"{caller.filename}:{caller.lineno}"]
                )
        self._save(obj, f, *args, **kwargs)


def warn_stalled(
    request: OperationRequest,
    missing: Sequence[int],
    seconds: float,
    timeout: float,
    status_server: StatusServer,
) -> None:
    """Write a warning about the `missing` ranks, which have not sent `request`.

    The warning includes the ranks' status.
    """
    lines = [
        f"{request.kind} {request.name!r} has waited {seconds:g} s for {named(missing)}. It will "
        f"fail after {timeout:g} s (--timeout)."
    ]
    for rank, found in sorted(status_server.ask(list(missing), stack=True).items()):
        if isinstance(found, RankStatus):
            lines.append(f"  rank {rank} is {found.place}")
            lines += [f"    {frame}" for frame in found.stack]
        else:
            lines.append(f"  rank {rank} {found}")
    write_warning("\n".join(lines))
