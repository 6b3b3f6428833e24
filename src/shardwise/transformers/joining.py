"""Makes TrainingArguments join the run, because they look up their rank before a Trainer exists."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from transformers import TrainingArguments

import shardwise as sw
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
        settings = {"device": "cpu"} if arguments.use_cpu else {}
        join(settings, "TrainingArguments", splits_sequences=True)
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


def context_size(arguments: Any) -> int:
    """Return the number of ranks per context group, after joining the run."""
    assert arguments.device is not None  # joins the run
    return sw.world().context_size


def trl_classes(trainer: Any) -> list[str]:
    """Return the names of the classes of TRL that `trainer` derives from, the nearest first."""
    return [kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")]


def check_loss(trainer: Any) -> None:
    """Raise UsageError with `--context` if the Trainer computes a loss outside of the model."""
    size = context_size(trainer.args)
    kinds = trl_classes(trainer)
    if kinds and size > 1 and kinds[0] != "SFTTrainer":
        raise UsageError(
            f"{kinds[0]} of TRL cannot be combined with --context {size}: its loss compares whole "
            "sequences. Of TRL, only SFTTrainer itself can be combined with it."
        )
    outside = {
        "label_smoothing_factor": trainer.args.label_smoothing_factor != 0,
        "compute_loss_func": trainer.compute_loss_func is not None,
    }
    of_whole = {
        "compute_metrics": trainer.compute_metrics is not None,
        "router_aux_loss_coef": getattr(trainer, "aux_loss_enabled", False),
    }
    for name in (name for name, is_set in of_whole.items() if is_set and kinds and size > 1):
        raise UsageError(
            f"{name} of {kinds[0]} cannot be combined with --context {size}: it takes the logits "
            "or tokens of whole sequences. Leave it out, or train with transformers.Trainer."
        )
    for name in (name for name, is_set in outside.items() if is_set and size > 1):
        raise UsageError(
            f"{name} cannot be combined with --context {size}: it shifts labels outside of the "
            "model, where the next worker's first label is missing. Leave it out, or write the "
            "loop with sw.Engine and shift the labels before world.share."
        )
