"""Notes what a script does that may make its result depend on the placement, with its lines.

What is noted names no cause: it says which causes are worth a trial (suspects.py).
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.engine import usage_checks
from shardwise.world.world import World

OURS = tuple(f"{Path(str(each.__file__)).parent}{os.sep}" for each in (shardwise, torch))
"""Where code lies that is not the user's."""
_LIBRARY = ("runpy", "contextlib", "functools")
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
"""Libraries such as Accelerate, which ask for ranks, draw and drop on behalf of a script."""
USERS: set[str] = set()
"""Installed packages that are the user's own: what was started by -m."""

RANKS = ("rank", "local_rank", "data_rank", "is_main")
SIZES = ("size", "local_size", "data_size")
HOROVOD = {"rank": "rank", "local_rank": "rank", "size": "size", "local_size": "size"}
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "rrelu")


class Facts:
    """By name the lines of the script at which it did something, or words about the model."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, None]] = defaultdict(dict)
        self.engines: list[Any] = []
        self.models: list[nn.Module] = []

    def note(self, name: str, word: str | None) -> None:
        """Note a word once."""
        if word is not None:
            self._found[name].setdefault(word)

    def plain(self) -> dict[str, list[str]]:
        """All of it, for a file."""
        return {name: list(words) for name, words in self._found.items()}


def caller(depth: int) -> str | None:
    """FILE:LINE of the code that called, `depth` frames up; None where that is not the user's."""
    frame: FrameType | None = sys._getframe(depth + 1)
    return _line(frame) if frame is not None and _is_users(frame) else None


def is_called_by_torch(depth: int) -> bool:
    """Whether the code that called, `depth` frames up, is torch's or this library's."""
    return sys._getframe(depth + 1).f_code.co_filename.startswith(OURS)


def module_of(depth: int) -> str:
    """The name of the module that the code is of that called, `depth` frames up."""
    return str(sys._getframe(depth + 1).f_globals.get("__name__", ""))


def user_line() -> str | None:
    """FILE:LINE of the innermost code of the user's that is under way."""
    # Innermost, and not the direct caller: a library may be between (a Trainer, a wrapper).
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    return None if frame is None else _line(frame)


def _is_users(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    if path.startswith(("<", *OURS)):
        return False
    installed = _INSTALLED.search(path)
    if installed is not None and path[installed.end() :].split(os.sep)[0] not in USERS:
        return False
    return str(frame.f_globals.get("__name__", "")) not in _LIBRARY


def _line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class Noticed:
    """An attribute of World whose reads by user code are noted, and answered with `pretended` where
    that is given; the library itself always reads the true value."""

    def __init__(self, name: str, facts: Facts, plain: Any = None) -> None:
        self._name = name
        self._facts = facts
        self._plain = plain  # the property that it was
        self.pretended: Any = None

    def __get__(self, world: World | None, kind: Any = None) -> Any:
        if world is None:
            return self
        line = caller(1)
        if line is not None:
            self._facts.note("rank" if self._name in RANKS else "size", line)
            if self.pretended is not None:
                return self.pretended
        if self._plain is not None:
            return self._plain.__get__(world, kind)
        return vars(world)[self._name]

    def __set__(self, world: World, value: Any) -> None:
        vars(world)[self._name] = value


def watch(facts: Facts) -> None:
    """Note from now on, for the time of this process."""
    for name in (*RANKS, *SIZES):
        setattr(World, name, Noticed(name, facts, vars(World).get(name)))
    for name, room in (("get_rank", "rank"), ("get_world_size", "size")):
        _noted(torch.distributed, name, facts, room)
    _noted(torch.distributed, "all_reduce", facts, "sum")
    _noted(World, "sum", facts, "sum")
    _noted(World, "gather", facts, "sum")
    _noted(torch.utils.data, "random_split", facts, "split")
    _noted(torch.utils.data.DistributedSampler, "__init__", facts, "sampler")
    _noted(torch.utils.data.DataLoader, "__iter__", facts, "loader")
    for name in DROPOUTS:
        _noted_dropout(name, facts)
    _noted_attention(facts)
    _note_weights(facts)
    _follow_engines(facts)


def watch_horovod(facts: Facts) -> None:
    """The same for a script of Horovod's."""
    horovod = import_module("shardwise.horovod")
    for name, room in HOROVOD.items():
        _noted(horovod, name, facts, room)


def _noted(owner: Any, name: str, facts: Facts, room: str) -> None:
    """Note each call by user code of a function."""
    plain = getattr(owner, name)

    @wraps(plain)
    def noting(*args: Any, **kwargs: Any) -> Any:
        facts.note(room, caller(1))
        return plain(*args, **kwargs)

    setattr(owner, name, noting)


def _noted_dropout(name: str, facts: Facts) -> None:
    plain = getattr(F, name)

    @wraps(plain)
    def noting(*args: Any, **kwargs: Any) -> Any:
        chance = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", args[2] if len(args) > 2 else True)
        if training and (chance or name == "rrelu"):
            facts.note("dropout", user_line())
        return plain(*args, **kwargs)

    setattr(F, name, noting)


def _noted_attention(facts: Facts) -> None:
    plain = F.scaled_dot_product_attention

    @wraps(plain)
    def noting(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0):
            facts.note("dropout", user_line())
        return plain(*args, **kwargs)

    F.scaled_dot_product_attention = noting


def _note_weights(facts: Facts) -> None:
    """Note where losses are given a weight or a reduction, and weights that contradict graphs."""
    engine: Any = shardwise.Engine
    for name in ("backward", "forward_backward"):
        setattr(engine, name, _noting_weight(getattr(engine, name), facts))
    plain = usage_checks.other_weights

    @wraps(plain)
    def noting(losses: Sequence[Sequence[str]]) -> str:
        facts.note("losses", usage_checks.describe_losses(losses))
        return plain(losses)

    usage_checks.other_weights = noting


def _noting_weight(plain: Callable[..., Any], facts: Facts) -> Callable[..., Any]:
    @wraps(plain)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        by = "" if caller(1) is not None else " by a library"
        if kwargs.get("weight") is not None:
            facts.note(f"weight{by}", user_line())
        if (reduction := kwargs.get("reduction", "mean")) != "mean":
            facts.note(f"reduction {reduction}{by}", user_line())
        return plain(self, *args, **kwargs)

    return noting


def _follow_engines(facts: Facts) -> None:
    """Know every engine as it is made, and what is in its models."""
    engine: Any = shardwise.Engine
    plain: Callable[..., None] = engine.__init__

    @wraps(plain)
    def made(self: Any, models: Any, optimizers: Any, **kwargs: Any) -> None:
        plain(self, models, optimizers, **kwargs)
        self.verified = _several(models), _several(optimizers)
        facts.engines.append(self)
        for model in self.verified[0]:
            facts.models.append(model)
            for name, module in model.named_modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    facts.note("batch_norm", name or type(module).__name__)
                if isinstance(module, nn.RNNBase) and module.dropout:
                    facts.note("dropout", name or type(module).__name__)

    engine.__init__ = made


def _several(given: Any) -> tuple[Any, ...]:
    one = isinstance(given, nn.Module | torch.optim.Optimizer)
    return (given,) if one else tuple(given)
