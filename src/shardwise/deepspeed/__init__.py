"""DeepSpeed's API on Shardwise engines: `import shardwise.deepspeed as deepspeed`.

initialize.py       deepspeed.initialize: an engine for a model, an optimizer and a config
engine.py           the engine object: backward, step, checkpoints
configured.py       its configuration and counters
optimizers.py       optimizers and schedules by their names in the config
ops/                optimizers under the names of DeepSpeed's kernels
schedules.py        the five learning-rate schedules
loader.py           the loader of training_data
monitor.py          writes metrics to TensorBoard and CSV files
checkpoints.py      save_checkpoint and load_checkpoint
comm.py             collectives between the ranks
zero.py             unallocated models, gathered parameters
zero_to_fp32.py     full fp32 weights from a checkpoint
manual_backward.py  loss.backward() and engine.scale(loss).backward()
utils.py            full parameters, gradients and optimizer state; logging; seeds
accelerator.py      the device of this process
checkpointing.py    activation checkpointing
pipe/               PipelineModule and its layers, on Shardwise's pipeline stages
moe.py              names from DeepSpeed's mixture of experts, which is not supported
modules.py          the modules that `import deepspeed` imports with --adopt
"""

from typing import Any

from shardwise.deepspeed import (
    accelerator,
    checkpointing,
    comm,
    moe,
    ops,
    pipe,
    utils,
    zero,
)
from shardwise.deepspeed.accelerator import get_accelerator
from shardwise.deepspeed.comm import init_distributed
from shardwise.deepspeed.engine import DeepSpeedEngine
from shardwise.deepspeed.initialize import add_config_arguments, initialize
from shardwise.deepspeed.loader import DeepSpeedDataLoader
from shardwise.deepspeed.pipe import PipelineModule
from shardwise.deepspeed.pipe.engine import PipelineEngine
from shardwise.deepspeed.utils import log_dist, logger
from shardwise.errors import ConfigError as DeepSpeedConfigError

__version__ = "0.19.8"
"""The version of DeepSpeed whose API this package implements."""

__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
__git_hash__ = __git_branch__ = None

__all__ = [
    "DeepSpeedConfigError",
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "PipelineEngine",
    "PipelineModule",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "moe",
    "ops",
    "pipe",
    "utils",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(
        f"Shardwise's deepspeed has no {name!r}: docs/from_deepspeed.md lists its names."
    )
