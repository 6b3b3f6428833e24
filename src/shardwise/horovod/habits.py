"""The steps that a Horovod script has, and what is said, once each, of one that is left out.

What can be known is looked at, nothing is guessed: weights and data are compared over the ranks
when the first gradients travel, files when they are saved.
"""

from __future__ import annotations

import gc
import hashlib
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import data
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shardwise import config
from shardwise.watch.wait_graph import named

BROADCAST = (
    "the parameters differ between ranks when training starts, and will go on doing so. After the "
    "model is built, write hvd.broadcast_parameters(model.state_dict(), root_rank=0)."
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
    "the learning rate cannot have been scaled, for hvd.size() was never asked for: gradients are "
    "averaged over a batch as many times as large. Write lr=args.lr * hvd.size(), and warm up."
)
WRAP = (
    "an optimizer steps on gradients that are not averaged over the ranks. Write optimizer = "
    "hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())."
)
PIN = (
    "several ranks of a host train on one GPU. After hvd.init() write "
    "torch.cuda.set_device(hvd.local_rank())."
)

Note = Mapping[str, str]


_ACT_HERE_TOO = {"bucket_mb", "quiet"}
"""Settings of the engine that a script in Horovod's style heeds as well."""

_IDLE = (config.OF_THE_ENGINE - _ACT_HERE_TOO) | {"tensor", "pipeline", "exact"}


def without_effect(given: Mapping[str, tuple[Any, str]]) -> str:
    """What is said of settings that only `sw.Engine` acts upon, "" where there are none.

    `given` has values and sources by name; what is the same without an engine is left out.
    """
    same = {name: config.FIELDS[name].default for name in _IDLE} | {"zero": 0}
    idle = [
        config.as_given(name, value, source)
        for name, (value, source) in given.items()
        if name in _IDLE and value != same[name]
    ]
    if not idle:
        return ""
    has, it = ("has", "it") if len(idle) == 1 else ("have", "them")
    return (
        f"{', '.join(idle)} {has} no effect on what hvd.DistributedOptimizer trains: only "
        f"sw.Engine acts upon {it}. Leave {it} out, or train with sw.Engine: docs/from_horovod.md."
    )


def warn(line: str) -> None:
    """Say it, on stderr."""
    if sys.__stderr__ is not None:
        sys.__stderr__.write(f"shardwise: {line}\n")
        sys.__stderr__.flush()


class Comparison:
    """What ranks tell of themselves, compared on rank 0; each finding is told once."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._saved: dict[tuple[str, str], set[int]] = {}

    def compare(self, notes: Mapping[int, Note]) -> Iterator[str]:
        """What the notes of several ranks show, made when their first gradients travel."""
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

    def see(self, rank: int, what: list[str]) -> Iterator[str]:
        """What it shows that `rank` saves a file: its host and its path."""
        host, path, line = what
        ranks = self._saved.setdefault((host, path), set())
        ranks.add(rank)
        if len(ranks) > 1:
            yield from self._once(
                f"{named(ranks)} all write {path} ({line}): the last one wins, or none. Write if "
                "hvd.rank() == 0: before it.",
                "save",
            )

    def _once(self, line: str, about: str = "") -> Iterator[str]:
        if (about or line) not in self._said:
            self._said.add(about or line)
            yield line


_KEYS = ("weights", "state", "samples", "rate", "device")


# -- on each rank ---------------------------------------------------------------------------------


def note(optimizer: optim.Optimizer, *, averages: bool, asked_size: bool) -> dict[str, str]:
    """What this rank tells of itself with its first gradients."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    device = params[0].device
    return {
        "weights": _digest(params),
        "state": str(len(optimizer.state)),
        "samples": _samples(),
        "rate": "unscaled" if averages and not asked_size else "",
        "device": f"{socket.gethostname()} {device}" if device.type == "cuda" else "",
    }


def _digest(tensors: list[Tensor]) -> str:
    """Of a few elements of each tensor."""
    found = hashlib.sha256()
    for tensor in tensors:
        few = tensor.detach().reshape(-1)
        few = few[:: max(1, few.numel() // 64)].to("cpu", torch.float64)
        found.update(few.numpy().tobytes())
    return found.hexdigest()[:16]


def _samples() -> str:
    """Of the first and the last sample of the tensors that are read now without a sampler that
    shards; "" where that is not known."""
    for one in gc.get_objects():
        if type(one).__mro__[-2:-1] == (_BaseDataLoaderIter,):
            sampler = getattr(getattr(one, "_index_sampler", None), "sampler", None)
            dataset = getattr(one, "_dataset", None)
            if isinstance(sampler, data.RandomSampler | data.SequentialSampler):
                return _ends(dataset)
    return ""


def _ends(dataset: Any) -> str:
    """Only of tensors: to read a dataset of the user's own is to run the user's code."""
    tensors = dataset.tensors if type(dataset) is data.TensorDataset else (dataset,)
    if any(type(tensor) is not Tensor or tensor.layout != torch.strided for tensor in tensors):
        return ""
    length = len(tensors[0])
    ends = [_contents(tensor[index]) for index in (0, length - 1) for tensor in tensors]
    return hashlib.sha256(b"|".join([str(length).encode(), *ends])).hexdigest()[:16]


def _contents(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class Eyes:
    """What is looked at while a rank runs: steps of plain optimizers, and torch.save.

    `told` is called with what is saved where, for rank 0; `averages` says whether this rank has
    asked for any reduction by now.
    """

    def __init__(
        self, rank: int, told: Callable[[list[str]], None], averages: Callable[[], bool]
    ) -> None:
        self._rank = rank
        self._told = told
        self._averages = averages
        self._paths: set[str] = set()
        self._steps = 0
        self._closed = False
        self._hook = register_optimizer_step_post_hook(self._stepped)
        self._save = torch.save
        torch.save = self._saving

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Inside the block, steps are not looked at: they are ours."""
        self._closed = True
        try:
            yield
        finally:
            self._closed = False

    def close(self) -> None:
        """Look no longer."""
        self._hook.remove()
        if torch.save == self._saving:
            torch.save = self._save

    def _stepped(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Two steps without any reduction: nobody averages by hand."""
        if self._closed:
            return
        self._steps += 1
        if self._steps == 2 and self._rank == 0 and not self._averages():
            warn(WRAP)

    def _saving(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, str | os.PathLike):
            path = str(Path(f).resolve())
            if path not in self._paths:
                self._paths.add(path)
                caller = traceback.extract_stack(limit=2)[0]
                self._told([socket.gethostname(), path, f"{caller.filename}:{caller.lineno}"])
        self._save(obj, f, *args, **kwargs)
