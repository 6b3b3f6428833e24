"""How long each layer of a model takes, for who wants to share them out alike."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.errors import ConfigError
from shardwise.model.module_hooks import attach
from shardwise.parallel.pipeline import partition


class LayerTimes:
    """Times the layers of `model` while it trains, and writes them to `path` after each step.

    Raises ConfigError where `path` cannot be written.

    {"layers": [{"name", "parameters", "forward", "backward", "bytes", "fresh"}, ...], "steps": N}

    Seconds of a step, medians over the steps but the first two; `bytes` are what a layer gives to
    the next one in a step. What comes between two layers, and after the last (a loss), is of the
    one before. A backward lasts from the arrival of the gradient of what a layer gave to that of
    the layer's before; for the first one, to the end of all.
    """

    def __init__(self, model: nn.Module, patterns: Sequence[str] | None, path: Path) -> None:
        self._atoms, _, _ = partition.find(model, patterns)
        self._path = path
        self._write([], 0)
        self._steps: list[list[_Times]] = []
        self._now = [_Times() for _ in self._atoms]
        self._last: tuple[int, float] | None = None
        """The layer that forward has come to, and since when."""
        self._backward_began = 0.0
        self._arrivals: list[tuple[float, int]] = []
        self._handles = [
            handle
            for number, atom in enumerate(self._atoms)
            for handle in (
                attach(atom.module.register_forward_pre_hook, partial(self._enter, number)),
                attach(atom.module.register_forward_hook, partial(self._leave, number)),
            )
        ]

    def _enter(self, number: int, module: nn.Module, args: Any) -> None:
        del module, args
        self._forward_goes_on(number)

    def _leave(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        times = self._now[number]
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        times.nbytes += sum(leaf.nbytes for leaf in tensors if leaf.requires_grad)
        for leaf in tensors[:1]:
            if leaf.requires_grad:
                leaf.register_hook(partial(self._arrive, number))  # type: ignore[no-untyped-call]

    def _arrive(self, number: int, grad: Tensor) -> None:
        del grad
        self._arrivals.append((_clock(), number))

    def _forward_goes_on(self, number: int | None) -> None:
        now = _clock()
        if self._last is not None:
            self._now[self._last[0]].forward += now - self._last[1]
        self._last = None if number is None else (number, now)

    def backward_begins(self) -> None:
        """A forward is over."""
        self._forward_goes_on(None)
        self._backward_began = _clock()

    def backward_ended(self) -> None:
        """A backward is over."""
        ends = [when for when, _ in self._arrivals[1:]] + [_clock()]
        if self._arrivals:
            when, number = self._arrivals[0]
            self._now[number].backward += when - self._backward_began
        for (when, number), end in zip(self._arrivals, ends, strict=True):
            self._now[number].backward += end - when
        self._arrivals.clear()

    def stepped(self) -> None:
        """A step is over: write what is known."""
        self._steps.append(self._now)
        self._now = [_Times() for _ in self._atoms]
        taken = self._steps[2:] or self._steps
        rows: dict[int, list[_Times]] = defaultdict(list)
        for step in taken:
            for number, times in enumerate(step):
                rows[number].append(times)
        layers = [
            {
                "name": atom.name,
                "parameters": atom.size,
                "forward": median(times.forward for times in rows[number]),
                "backward": median(times.backward for times in rows[number]),
                "bytes": median(times.nbytes for times in rows[number]),
                "fresh": fresh,
            }
            for number, (atom, fresh) in enumerate(
                zip(self._atoms, partition.fresh_in(self._atoms), strict=True)
            )
        ]
        self._write(layers, len(taken))

    def _write(self, layers: Sequence[dict[str, Any]], steps: int) -> None:
        """Write what is known, whole or not at all. Raises ConfigError where that cannot be."""
        aside = self._path.with_name(f".{self._path.name}.part")
        try:
            aside.write_text(json.dumps({"layers": layers, "steps": steps}))
            aside.replace(self._path)
        except OSError as error:
            raise ConfigError(
                f"--time-layers {self._path} cannot be written: {error.strerror or error}. Name a "
                "file in a folder that exists, on a disk with room."
            ) from error

    def close(self) -> None:
        """Time no longer."""
        for handle in self._handles:
            handle.remove()


class _Times:
    def __init__(self) -> None:
        self.forward = self.backward = 0.0
        self.nbytes = 0


def _clock() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()
