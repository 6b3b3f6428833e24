"""Records the lines of a script that may make its result depend on the placement.

These lines are only facts. suspects.py uses them to decide which possible causes to test.
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.data.source import MicroBatch
from shardwise.data.steps import LoaderPass
from shardwise.engine import usage_checks
from shardwise.world.world import World, current, has_joined

OURS = tuple(f"{Path(str(each.__file__)).parent}{os.sep}" for each in (shardwise, torch))
"""Folders of Shardwise and torch, whose code is not user code."""
_LIBRARY = ("runpy", "contextlib", "functools")
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
"""Matches the folder of installed libraries, such as Accelerate, whose code is not user code."""
USERS: set[str] = set()
"""Installed packages that count as user code because they were started with -m."""

RANKS = ("rank", "local_rank", "data_rank", "is_main")
SIZES = ("size", "local_size", "data_size")
HOROVOD = {"rank": "rank", "local_rank": "rank", "size": "size", "local_size": "size"}
NOISE = ("rand", "randn", "randint", "rand_like", "randn_like", "randint_like")
"""Functions of torch that draw random tensors of a given shape."""
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "rrelu")


class Facts:
    """Facts about a script: lines of code or names of layers, by topic."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, None]] = defaultdict(dict)
        self.engines: list[Any] = []
        self.models: list[nn.Module] = []

    def note(self, name: str, word: str | None) -> None:
        """Add `word` to topic `name`. Duplicates and None are ignored."""
        if word is not None:
            self._found[name].setdefault(word)

    def plain(self) -> dict[str, list[str]]:
        """Return all facts as values that JSON can represent: one list per topic."""
        return {name: list(words) for name, words in self._found.items()}


def caller(depth: int) -> str | None:
    """Return FILE:LINE of the caller `depth` frames up, or None if it is not user code."""
    # +1 for the frame of this function.
    frame: FrameType | None = sys._getframe(depth + 1)
    return _line(frame) if frame is not None and _is_users(frame) else None


def is_called_by_torch(depth: int) -> bool:
    """Return whether the caller `depth` frames up is code of torch or Shardwise."""
    frame = sys._getframe(depth + 1)
    # A function mode, such as that of --context's trial, only passes the call of others on.
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(OURS)


def module_of(depth: int) -> str:
    """Return the module name of the caller `depth` frames up."""
    return str(sys._getframe(depth + 1).f_globals.get("__name__", ""))


def user_line() -> str | None:
    """Return FILE:LINE of the innermost frame of user code, or None if there is none."""
    # Search all frames, because a library (a Trainer, for example) may be in between.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    return None if frame is None else _line(frame)


def _is_users(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    if path.startswith(("<", *OURS)):
        # Generated code ("<string>", "<frozen ...>") has no line that the user could change.
        return False
    # An installed package counts as user code only if it was started with -m.
    installed = _INSTALLED.search(path)
    if installed is not None and path[installed.end() :].split(os.sep)[0] not in USERS:
        return False
    return str(frame.f_globals.get("__name__", "")) not in _LIBRARY


def _line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class WatchedAttribute:
    """Replaces an attribute of World, and records the lines of user code that read it.

    If `pretended` is set, user code reads this value. The library always reads the true value.
    """

    def __init__(self, name: str, facts: Facts, plain: Any = None) -> None:
        self._name = name
        self._facts = facts
        self._plain = plain  # the property that it replaces, or None for a plain attribute
        self.pretended: Any = None

    def __get__(self, world: World | None, kind: Any = None) -> Any:
        if world is None:
            return self
        line = caller(1)
        if line is not None:
            # RANKS includes is_main, because it depends on the rank.
            self._facts.note("rank" if self._name in RANKS else "size", line)
            if self.pretended is not None:
                return self.pretended
        if self._plain is not None:
            return self._plain.__get__(world, kind)
        return vars(world)[self._name]

    def __set__(self, world: World, value: Any) -> None:
        vars(world)[self._name] = value


def watch(facts: Facts) -> None:
    """Start recording facts about the script, for the lifetime of this process."""
    for name in (*RANKS, *SIZES):
        setattr(World, name, WatchedAttribute(name, facts, vars(World).get(name)))
    for name, topic in (("get_rank", "rank"), ("get_world_size", "size")):
        _watch_calls(torch.distributed, name, facts, topic)
    _watch_calls(torch.distributed, "all_reduce", facts, "sum")
    _watch_calls(World, "sum", facts, "sum")
    _watch_calls(World, "gather", facts, "sum")
    _watch_calls(torch.utils.data, "random_split", facts, "split")
    _watch_calls(torch.utils.data.DistributedSampler, "__init__", facts, "sampler")
    _watch_calls(torch.utils.data.DataLoader, "__iter__", facts, "loader")
    for name in DROPOUTS:
        _watch_dropout(name, facts)
    for name in NOISE:
        _watch_noise(name, facts)
    _watch_collate(facts)
    _watch_attention(facts)
    _note_weights(facts)
    _follow_engines(facts)


def watch_horovod(facts: Facts) -> None:
    """Start recording the calls of a Horovod script that depend on the rank or size."""
    horovod = import_module("shardwise.horovod")
    for name, topic in HOROVOD.items():
        _watch_calls(horovod, name, facts, topic)


def _watch_calls(owner: Any, name: str, facts: Facts, topic: str) -> None:
    plain = getattr(owner, name)

    @wraps(plain)
    def noting(*args: Any, **kwargs: Any) -> Any:
        facts.note(topic, caller(1))
        return plain(*args, **kwargs)

    setattr(owner, name, noting)


def _watch_dropout(name: str, facts: Facts) -> None:
    plain = getattr(F, name)

    @wraps(plain)
    def noting(*args: Any, **kwargs: Any) -> Any:
        # As in the signature torch.nn.functional.dropout(input, p=0.5, training=True).
        chance = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", args[2] if len(args) > 2 else True)
        if training and (chance or name == "rrelu"):
            facts.note("dropout", user_line())
        return plain(*args, **kwargs)

    setattr(F, name, noting)


def _watch_noise(name: str, facts: Facts) -> None:
    plain = getattr(torch, name)

    @wraps(plain)
    def noting(*args: Any, **kwargs: Any) -> Any:
        drawn = plain(*args, **kwargs)
        line = caller(1)
        if line is not None and has_rows_of_batch(drawn, kwargs):
            facts.note("noise", line)
        return drawn

    setattr(torch, name, noting)


def _watch_collate(facts: Facts) -> None:
    plain = LoaderPass.report_collate_draws

    @wraps(plain)
    def noting(self: LoaderPass, micro: MicroBatch) -> None:
        facts.note("collate", self.stream.name)
        plain(self, micro)

    LoaderPass.report_collate_draws = noting  # type: ignore[method-assign]


def has_rows_of_batch(drawn: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Return whether `drawn` has one row for each of this rank's rows of the training batch.

    `kwargs` are the keyword arguments of the call that drew it. If they contain a `generator`, the
    result is False, because the script may have seeded its generator in any way.
    """
    batch = current().current_batch.batch if has_joined() else None
    if batch is None or batch.rows is None or kwargs.get("generator") is not None:
        return False
    # A rank without samples gets a stand-in of one row.
    rows = max(1, batch.rows[1] - batch.rows[0])
    return torch.is_grad_enabled() and drawn.ndim > 0 and drawn.size(0) == rows


def _watch_attention(facts: Facts) -> None:
    plain = F.scaled_dot_product_attention

    @wraps(plain)
    def noting(*args: Any, **kwargs: Any) -> Any:
        # The signature is scaled_dot_product_attention(query, key, value, attn_mask, dropout_p).
        if kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0):
            facts.note("dropout", user_line())
        return plain(*args, **kwargs)

    F.scaled_dot_product_attention = noting


def _note_weights(facts: Facts) -> None:
    """Record uses of `weight=` and `reduction=`, and weights that contradict the losses' graphs."""
    engine: Any = shardwise.Engine
    for name in ("backward", "forward_backward"):
        setattr(engine, name, _watch_weight(getattr(engine, name), facts))
    plain = usage_checks.other_weights

    @wraps(plain)
    def noting(losses: Sequence[Sequence[str]]) -> str:
        facts.note("losses", usage_checks.describe_losses(losses))
        return plain(losses)

    usage_checks.other_weights = noting


def _watch_weight(plain: Callable[..., Any], facts: Facts) -> Callable[..., Any]:
    @wraps(plain)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Distinguish a library's reduction from the user's own, because their messages differ.
        by = "" if caller(1) is not None else " by a library"
        if kwargs.get("weight") is not None:
            facts.note(f"weight{by}", user_line())
        if (reduction := kwargs.get("reduction", "mean")) != "mean":
            facts.note(f"reduction {reduction}{by}", user_line())
        return plain(self, *args, **kwargs)

    return noting


def _follow_engines(facts: Facts) -> None:
    """Record every new engine, and the BatchNorm and dropout layers of its models."""
    engine: Any = shardwise.Engine
    plain: Callable[..., None] = engine.__init__

    @wraps(plain)
    def made(self: Any, models: Any, optimizers: Any, **kwargs: Any) -> None:
        plain(self, models, optimizers, **kwargs)
        # Alterations need the models and optimizers in each step.
        self.verified = _several(models), _several(optimizers)
        facts.engines.append(self)
        for model in self.verified[0]:
            facts.models.append(model)
            for name, module in model.named_modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    facts.note("batch_norm", name or type(module).__name__)
                # RNN kernels apply dropout internally, without calling F.dropout.
                if isinstance(module, nn.RNNBase) and module.dropout:
                    facts.note("dropout", name or type(module).__name__)

    engine.__init__ = made


def _several(value: Any) -> tuple[Any, ...]:
    one = isinstance(value, nn.Module | torch.optim.Optimizer)
    return (value,) if one else tuple(value)
