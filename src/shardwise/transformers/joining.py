"""Joins the run when TrainingArguments ask for their rank, before there is a Trainer."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from transformers import TrainingArguments

from shardwise.bridging.joining import join
from shardwise.errors import UsageError

_NAME = "_setup_devices"
"""The property of TrainingArguments that finds out device, rank and size, once."""
_MARK = "_joins_the_run"
"""The attribute that marks our function."""


def join_with_arguments() -> None:
    """Make TrainingArguments join the run when they look for their device. A second call does
    nothing.

    On the CPU, and under srun or mpirun, they would treat each rank as a separate run.
    """
    stock: Any = getattr(TrainingArguments, _NAME)
    if hasattr(stock.func, _MARK):
        return

    def setup_devices(arguments: Any) -> Any:
        join({"device": "cpu"} if arguments.use_cpu else {}, "TrainingArguments")
        return stock.func(arguments)

    setattr(setup_devices, _MARK, True)
    joining = cached_property(setup_devices)
    joining.__set_name__(TrainingArguments, _NAME)
    setattr(TrainingArguments, _NAME, joining)


def check_arguments(arguments: Any, workers: int) -> None:
    """Raise UsageError for arguments that a Trainer over engines cannot follow."""
    if arguments.n_gpu > 1:
        raise UsageError(
            f"This process sees {arguments.n_gpu} GPUs and is alone, where Trainer would take "
            f"nn.DataParallel. Start one worker for each: shardwise run -n {arguments.n_gpu} "
            "script.py; or show it one: CUDA_VISIBLE_DEVICES=0."
        )
    if arguments.auto_find_batch_size and workers > 1:
        raise UsageError(
            "auto_find_batch_size on several workers: one that runs out of memory alone would "
            "leave the others waiting in its collectives. Find the size with one worker, and "
            "write per_device_train_batch_size."
        )
