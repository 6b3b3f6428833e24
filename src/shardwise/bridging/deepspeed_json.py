"""Applies a DeepSpeed config when another library runs the training loop, and prints the result.

config/deepspeed/               parses the config
accelerate/deepspeed_plugin.py  the plugin of an Accelerator, `accelerate launch --use_deepspeed`
transformers/deepspeed_argument.py  TrainingArguments(deepspeed=...)
deepspeed/initialize.py         deepspeed.initialize(config=...)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import shardwise as sw
from shardwise.config.deepspeed import DeepSpeedJob, parse, short_lines
from shardwise.errors import ConfigError

_INTERVAL = "pipeline.activation_checkpoint_interval"


def parse_for_loop(tree: Any, auto: Mapping[str, Any]) -> DeepSpeedJob:
    """Parse the DeepSpeed config `tree` for a training loop of Accelerate or Trainer.

    Raises ConfigError if `config.deepspeed.parse` does, or if the config sums gradients, because
    these loops average them.
    """
    job = parse(tree, auto)
    if not job.averages:
        raise ConfigError(
            f"{job.document.name} has gradient_allreduce_op sum, but this loop averages the losses "
            "of the workers. Leave the key out, and multiply the loss by the number of workers."
        )
    return job


def duplicate_error(job: DeepSpeedJob, what: str, where: str, dummy: str = "") -> ConfigError:
    """Return the error for an optimizer or scheduler that both the config and the script define."""
    instead = f", or pass accelerate.utils.{dummy} instead of it" if dummy else ""
    return ConfigError(
        f"{job.document.name} has {what}.type, and the script passes its own {what} to {where}. "
        f"Remove it from the JSON, or do not pass one in the script{instead}."
    )


def settings_of(job: DeepSpeedJob) -> dict[str, Any]:
    """Return the config's Shardwise settings, for a training loop with its own data loaders."""
    # Leave out the micro-batch size, because the library's data loaders define it.
    return {name: value for name, value in job.settings.items() if name != "micro_batch_size"}


def say_lines(world: sw.World, job: DeepSpeedJob) -> None:
    """Print a config's ignored keys and the values that replaced "auto", at most once."""
    for line in short_lines(job, of_loop=False):
        world.say_once(f"{job.document.name}: {line}")


def say_settings(world: sw.World, job: DeepSpeedJob) -> None:
    """Print a config's settings and ignored keys, and the values of "auto", at most once."""
    settings = " ".join(f"{name}={value}" for name, value in settings_of(job).items())
    world.say_once(f"{job.document.name} is taken as {settings or 'no settings'}")
    say_lines(world, job)
    if left := without_effect(job):
        world.say_once(f"{job.document.name}: ignored, because this library does it itself: {left}")


def without_effect(job: DeepSpeedJob) -> str:
    """Describe the enabled keys of a config that have an effect only in `deepspeed.initialize`."""
    keys = {
        "managed_gradient_accumulation": not job.manages_accumulation,
        "dataloader_drop_last": job.drop_last,
        "tensorboard": job.tensorboard is not None,
        "csv_monitor": job.csv is not None,
        "checkpoint.tag_validation": "checkpoint.tag_validation" in job.document.values,
        _INTERVAL: job.document.get(_INTERVAL, 0) > 0,
    }
    return ", ".join(key for key, is_on in keys.items() if is_on)
