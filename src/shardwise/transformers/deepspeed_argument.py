"""Applies the DeepSpeed config in TrainingArguments.

    TrainingArguments(deepspeed="ds.json", ...)     # DeepSpeed need not be installed

In the config, "auto" stands for the value of another argument. The config is hidden from
transformers, which would otherwise pass it to DeepSpeed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import Any

from accelerate.utils import DeepSpeedPlugin
from torch import optim
from transformers import TrainingArguments

from shardwise.accelerate.deepspeed_plugin import without_deepspeed_variable
from shardwise.bridging.deepspeed_json import duplicate_error, parse_for_loop
from shardwise.config.deepspeed import DeepSpeedJob
from shardwise.deepspeed import optimizers
from shardwise.errors import ConfigError, UsageError

_KEPT = "_shardwise_deepspeed"
"""Attribute of TrainingArguments that stores the config, or the `accelerate launch` plugin.
"""
_MARK = "_keeps_deepspeed_json"
"""The attribute that marks the replaced `__post_init__`."""


def take_json() -> None:
    """Make TrainingArguments hide `deepspeed` from transformers. Idempotent."""
    theirs = TrainingArguments.__post_init__
    if not hasattr(theirs, _MARK):
        TrainingArguments.__post_init__ = _wrap_post_init(theirs)


def _wrap_post_init(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(theirs)
    def post_init(arguments: Any) -> None:
        given, arguments.deepspeed = _as_object(arguments.deepspeed), None
        with without_deepspeed_variable() as asked:
            theirs(arguments)
            if given or asked:
                setattr(arguments, _KEPT, given or DeepSpeedPlugin().deepspeed_config)
        arguments.deepspeed = given  # visible again, for copies of the arguments and for users

    setattr(post_init, _MARK, True)
    return post_init


def _as_object(given: Any) -> Any:
    """Return `given`, parsed if it is JSON text. Raises ConfigError if the text is invalid."""
    if not (isinstance(given, str) and given.lstrip().startswith("{")):
        return given
    try:
        return json.loads(given)
    except ValueError as error:
        raise ConfigError(
            f"TrainingArguments(deepspeed={given[:60]!r}) is not valid JSON: {error}. Correct it, "
            "or pass the path of a file."
        ) from None


def check_plugin(plugin: Any) -> None:
    """Raise UsageError if TrainingArguments have a DeepSpeed plugin that transformers created."""
    if plugin is not None:
        raise UsageError(
            "TrainingArguments have a deepspeed_plugin, so DeepSpeed would train. Import "
            "shardwise.transformers before making them, and pass the JSON as deepspeed=."
        )


def json_of(arguments: Any) -> Any:
    """Return the DeepSpeed config of `arguments` (a path or a dict), or None."""
    return getattr(arguments, _KEPT, None)


def job_of(arguments: Any, steps: int | None = None) -> DeepSpeedJob | None:
    """Parse the DeepSpeed config of `arguments` for a run of `steps` steps.

    "auto" is replaced by the values of `arguments`. Returns None if there is no config. Raises
    ConfigError if a key contradicts an argument.
    """
    source = json_of(arguments)
    if source is None:
        return None
    tree = dict(source) | {"steps_per_print": None} if isinstance(source, dict) else source
    auto = _auto_of(arguments, steps)
    job = parse_for_loop(tree, auto)
    for key, argument in _SAME.items():
        found = _value(job, key)
        if found is not None and key in auto and found != auto[key]:
            raise ConfigError(
                f"{job.document.name} has {key} {found}, but TrainingArguments({argument}=...) "
                f'has {auto[key]}: write "auto" in the JSON, or the same value.'
            )
    return job


def _value(job: DeepSpeedJob, key: str) -> Any:
    """Return the config's value of `key`, or None if it is missing."""
    section, _, name = key.rpartition(".")
    if section.endswith(".params"):
        found = job.document.get(section, {}).get(name)
    else:
        found = job.document.get(key)
    return list(found) if isinstance(found, tuple) else found


_SAME = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_batch_size": "per_device_train_batch_size",
    "gradient_clipping": "max_grad_norm",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "adam_beta1=..., adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
}
"""Keys that must match an argument of TrainingArguments, unless they are "auto"."""


def _auto_of(arguments: Any, steps: int | None) -> dict[str, Any]:
    micro, accumulation = (
        arguments.per_device_train_batch_size,
        arguments.gradient_accumulation_steps,
    )
    found = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro * accumulation * arguments.world_size,
        "gradient_clipping": arguments.max_grad_norm,
        "fp16.enabled": bool(arguments.fp16 or arguments.fp16_full_eval),
        "bf16.enabled": bool(arguments.bf16 or arguments.bf16_full_eval),
        "optimizer.params.lr": arguments.learning_rate,
        "optimizer.params.betas": [arguments.adam_beta1, arguments.adam_beta2],
        "optimizer.params.eps": arguments.adam_epsilon,
        "optimizer.params.weight_decay": arguments.weight_decay,
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": arguments.learning_rate,
    }
    if steps is not None:
        found["scheduler.params.total_num_steps"] = steps
        found["scheduler.params.warmup_num_steps"] = max(1, arguments.get_warmup_steps(steps))
    return found


class OptimizersOfJson:
    """Mixin for a Trainer that creates the optimizer and schedule from its DeepSpeed config."""

    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    _created_lr_scheduler: bool

    def check_optimizers(self) -> None:
        """Raise ConfigError if an optimizer or a schedule is defined in both script and config."""
        job = job_of(self.args)
        if job is None:
            return
        kinds = getattr(self, "optimizer_cls_and_kwargs", None)
        if job.optimizer is not None and not (self.optimizer is None and kinds is None):
            raise duplicate_error(job, "optimizer", "the Trainer")
        if job.schedule is not None and self.lr_scheduler is not None:
            raise duplicate_error(job, "scheduler", "the Trainer")

    def create_optimizer(self, model: Any = None) -> optim.Optimizer:
        """Return the config's optimizer over all trained parameters, or the trainer's own."""
        job = job_of(self.args)
        if self.optimizer is None and job is not None and job.optimizer is not None:
            trained = self.model if model is None else model
            parameters = [p for p in trained.parameters() if p.requires_grad]
            self.optimizer = made = optimizers.one_of_json(job, parameters, [trained])
            return made
        return super().create_optimizer(model)  # type: ignore[misc, no-any-return]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the config's schedule, which advances once per update, or the trainer's own."""
        job = job_of(self.args, num_training_steps)
        if self.lr_scheduler is None and job is not None and job.schedule is not None:
            face = self.optimizer if optimizer is None else optimizer
            made = optimizers.schedule_of_json(job.schedule, face, job.document.name)
            self.lr_scheduler, self._created_lr_scheduler = made, True
            return made
        return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]
