"""Measures the time of each layer of a model, so that stages can be balanced by time."""

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
    """Measures the layers of `model` during training, and writes the times to `path` at every step.

    The file contains medians over all steps except the first two:

        {"layers": [{"name", "parameters", "forward", "backward", "bytes", "adds_parameters"}, ...],
         "steps": N}

    `forward` and `backward` are seconds per step. `bytes` is the size of the tensors that the layer
    passes to the next layer in a step. Work between two layers, and after the last layer (a loss),
    counts towards the preceding layer. A layer's backward time runs from the arrival of its
    output's gradient to the arrival of the preceding layer's. For the first layer, it ends with the
    backward pass.

    Raises ConfigError if `path` cannot be written.
    """

    def __init__(self, model: nn.Module, patterns: Sequence[str] | None, path: Path) -> None:
        self._layers, _, _ = partition.find_layers(model, patterns)
        self._path = path
        # Write once now, to fail at the start rather than after the first step.
        self._write([], 0)
        self._steps: list[list[_Times]] = []
        self._now = [_Times() for _ in self._layers]
        self._current: tuple[int, float] | None = None
        """The index of the layer that is running in the forward pass, and its start time."""
        self._backward_began = 0.0
        # (time, layer index) of each gradient, in the order of arrival.
        self._arrivals: list[tuple[float, int]] = []
        self._handles = [
            handle
            for number, layer in enumerate(self._layers)
            for handle in (
                attach(layer.module.register_forward_pre_hook, partial(self._enter, number)),
                attach(layer.module.register_forward_hook, partial(self._leave, number)),
            )
        ]

    def _enter(self, number: int, module: nn.Module, args: Any) -> None:
        del module, args
        self._switch_layer(number)

    def _leave(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        times = self._now[number]
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        times.nbytes += sum(leaf.nbytes for leaf in tensors if leaf.requires_grad)
        for leaf in tensors[:1]:
            if leaf.requires_grad:
                # `append` returns None, so the hook leaves the gradient unchanged.
                leaf.register_hook(  # type: ignore[no-untyped-call]
                    lambda grad: self._arrivals.append((_clock(), number))
                )

    def _switch_layer(self, number: int | None) -> None:
        now = _clock()
        if self._current is not None:
            self._now[self._current[0]].forward += now - self._current[1]
        self._current = None if number is None else (number, now)

    def backward_begins(self) -> None:
        """Stop timing the forward pass, and start timing the backward pass."""
        self._switch_layer(None)
        self._backward_began = _clock()

    def backward_ended(self) -> None:
        """Attribute the time of the completed backward pass to individual layers."""
        ends = [when for when, _ in self._arrivals[1:]] + [_clock()]
        if self._arrivals:
            when, number = self._arrivals[0]
            # Work before the first arrival (the loss) counts towards the last layer.
            self._now[number].backward += when - self._backward_began
        for (when, number), end in zip(self._arrivals, ends, strict=True):
            self._now[number].backward += end - when
        self._arrivals.clear()

    def stepped(self) -> None:
        """Finish a step, and write the medians of the steps so far."""
        self._steps.append(self._now)
        self._now = [_Times() for _ in self._layers]
        measured_steps = (
            self._steps[2:] or self._steps
        )  # the first steps allocate memory and compile
        rows: dict[int, list[_Times]] = defaultdict(list)
        for step in measured_steps:
            for number, times in enumerate(step):
                rows[number].append(times)
        layers = [
            {
                "name": layer.name,
                "parameters": layer.size,
                "forward": median(times.forward for times in rows[number]),
                "backward": median(times.backward for times in rows[number]),
                "bytes": median(times.nbytes for times in rows[number]),
                "adds_parameters": adds,
            }
            for number, (layer, adds) in enumerate(
                zip(self._layers, partition.adds_parameters(self._layers), strict=True)
            )
        ]
        self._write(layers, len(measured_steps))

    def _write(self, layers: Sequence[dict[str, Any]], steps: int) -> None:
        """Write the file atomically. Raises ConfigError if it cannot be written."""
        aside = self._path.with_name(f".{self._path.name}.part")
        try:
            aside.write_text(json.dumps({"layers": layers, "steps": steps}))
            # A reader sees either the old file or the new one, never an incomplete file.
            aside.replace(self._path)
        except OSError as error:
            raise ConfigError(
                f"--time-layers {self._path} cannot be written: {error.strerror or error}. Name a "
                "file in an existing folder, on a disk with free space."
            ) from error

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Times:
    def __init__(self) -> None:
        self.forward = self.backward = 0.0
        self.nbytes = 0


def _clock() -> float:
    if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
        module: Any = torch.get_device_module(device)
        # Synchronise only if the rank already uses the accelerator, because synchronize() would
        # initialise it.
        if getattr(module, "is_initialized", lambda: True)():
            module.synchronize()
    return time.perf_counter()
