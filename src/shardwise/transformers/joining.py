"""Makes TrainingArguments join the run, because they look up their rank before a Trainer exists."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from transformers import TrainingArguments

from shardwise.bridging.joining import join
from shardwise.errors import UsageError

_NAME = "_setup_devices"
"""The cached property of TrainingArguments that determines device, rank and world size."""
_MARK = "_joins_the_run"
"""The attribute that marks the replaced function."""


def join_with_arguments() -> None:
    """Make TrainingArguments join the run when they look up their device. Idempotent."""
    # Otherwise, on the CPU under srun or mpirun, they would treat each rank as a separate run.
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
    """Raise UsageError if an argument is not supported by a Trainer that runs on engines."""
    if arguments.n_gpu > 1:
        raise UsageError(
            f"This single process sees {arguments.n_gpu} GPUs, and Trainer would use "
            f"nn.DataParallel. Start one worker per GPU: shardwise run -n {arguments.n_gpu} "
            "script.py; or make only one visible: CUDA_VISIBLE_DEVICES=0."
        )
    if arguments.auto_find_batch_size and workers > 1:
        raise UsageError(
            "auto_find_batch_size is not supported on several workers: if one ran out of memory, "
            "the others would wait for it in a collective. Find the batch size with one worker, "
            "and write per_device_train_batch_size."
        )
