"""A DeepSpeed JSON that an Accelerator is given: settings of its engines, and what a loop does.

    Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config="ds.json"))     # in the script
    accelerate launch --use_deepspeed --zero_stage 2 script.py                # by its variables

DeepSpeed need not be installed: the plugin is Accelerate's own class, and holds the JSON.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler, GradScalerKwargs
from torch import nn, optim

import shardwise as sw
from shardwise.config.deepspeed import Job, parse, short_lines
from shardwise.deepspeed import optimizers
from shardwise.errors import ConfigError, UsageError

VARIABLE = "ACCELERATE_USE_DEEPSPEED"

_OF_LOADERS = ("micro_batch_size",)
"""Settings that the loaders of a script have already decided."""


def plugin_of(given: MutableMapping[str, Any]) -> DeepSpeedPlugin | None:
    """The plugin among the arguments of an Accelerator, taken out of them; or that of the variables
    which `accelerate launch --use_deepspeed` sets, of which the switch is taken out."""
    found = [given.pop(name, None) for name in ("deepspeed_plugin", "deepspeed_plugins")]
    plugin = next((each for each in found if each is not None), None)
    if isinstance(plugin, Mapping):
        if len(plugin) > 1:
            raise UsageError(
                f"Accelerator(deepspeed_plugins=...) has {len(plugin)} of them: one Accelerator "
                "trains with one. Make an Accelerator for each."
            )
        plugin = next(iter(plugin.values()), None)
    asked = os.environ.pop(VARIABLE, "false").lower() == "true"  # Accelerate would import deepspeed
    return DeepSpeedPlugin() if plugin is None and asked else plugin


class OfJson:
    """What the JSON of `plugin` means for an Accelerator with the arguments `given`.

    Raises ConfigError as `config.deepspeed.parse` does, and where an argument contradicts a key.
    """

    def __init__(self, plugin: DeepSpeedPlugin, given: Mapping[str, Any]) -> None:
        self._tree = dict(plugin.deepspeed_config)
        self._tree.pop("steps_per_print", None)  # infinite: Accelerate's way to say none
        self._auto = _auto_of(given)
        self.job: Job = self._parsed({})
        self._check(given)

    def _parsed(self, more: Mapping[str, Any]) -> Job:
        return parse(self._tree, self._auto | more)

    def _check(self, given: Mapping[str, Any]) -> None:
        """Raise ConfigError where an argument of the Accelerator says another thing."""
        pairs = (
            ("gradient_accumulation_steps", given.get("gradient_accumulation_steps", 1), 1),
            ("mixed_precision", given.get("mixed_precision"), None),
        )
        (_, steps, default), (_, precision, _) = pairs
        of_json = self.job.document.get("gradient_accumulation_steps", steps)
        if steps not in (default, of_json):
            raise ConfigError(
                f"The DeepSpeed JSON has gradient_accumulation_steps {of_json}, and Accelerator "
                f'{steps}: write "auto" into the JSON.'
            )
        wanted = self.mixed_precision
        if precision not in (None, "no", wanted):
            raise ConfigError(
                f"The DeepSpeed JSON computes in {wanted or 'fp32'}, and Accelerator has "
                f'mixed_precision={precision!r}: write "auto" as {precision}.enabled.'
            )

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of Shardwise that come of it."""
        found = self.job.settings.items()
        return {name: value for name, value in found if name not in _OF_LOADERS}

    @property
    def mixed_precision(self) -> str:
        """In which dtype it computes, as Accelerate calls it: "no" for fp32."""
        return {"fp32": "no", "bf16": "bf16", "bf16-mixed": "bf16"}.get(self.job.precision, "fp16")

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of an Accelerator that come of it."""
        found: dict[str, Any] = {"mixed_precision": self.mixed_precision}
        steps = self.job.document.get("gradient_accumulation_steps")
        return found | ({} if steps is None else {"gradient_accumulation_steps": steps})

    def handlers(self, given: list[Any] | None) -> list[Any] | None:
        """`kwargs_handlers` with the loss scale of fp16, unless there is one."""
        several = list(given or [])
        if self.mixed_precision != "fp16" or any(isinstance(e, GradScalerKwargs) for e in several):
            return given
        scaling = self.job.scaling
        if scaling.static:
            raise ConfigError(
                f"The DeepSpeed JSON has fp16.loss_scale {scaling.static:g}, and under Accelerate "
                "the scale follows overflows: write 0 there, or leave it out."
            )
        scale = float(2**scaling.power)
        return [*several, GradScalerKwargs(init_scale=scale, growth_interval=scaling.window)]

    def say(self, world: sw.World) -> None:
        """Print once what came of it, "auto" with what it became."""
        settings = " ".join(f"{name}={value}" for name, value in self.settings.items())
        world.say_once(f"the DeepSpeed JSON is taken as {settings or 'no settings'}")
        for line in short_lines(self.job, of_loop=False):
            world.say_once(f"the DeepSpeed JSON: {line}")

    # -- optimizers and schedules of the JSON ------------------------------------------------

    def replaced(self, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        """`objects` to prepare, with the JSON's optimizer and schedule in the place of dummies."""
        models = [each for each in objects if isinstance(each, nn.Module)]
        made: dict[int, optim.Optimizer] = {}
        for each in objects:
            if isinstance(each, DummyOptim):
                made[id(each)] = self._optimizer(each, models)
        return tuple(self._schedule(e, made) for e in (made.get(id(o), o) for o in objects))

    def _optimizer(self, dummy: DummyOptim, models: list[nn.Module]) -> optim.Optimizer:
        params = "optimizer.params"
        auto = {f"{params}.lr": dummy.lr, f"{params}.weight_decay": dummy.weight_decay}
        self._auto |= auto | {f"{params}.{name}": value for name, value in dummy.kwargs.items()}
        self.job = self._parsed({})
        if self.job.optimizer is None:
            raise ConfigError("DummyOptim stands for the optimizer of a DeepSpeed JSON without one.")
        return one_optimizer(self.job, list(dummy.params), models)

    def _schedule(self, given: Any, made: Mapping[int, optim.Optimizer]) -> Any:
        if not isinstance(given, DummyScheduler):
            return given
        optimizer = made.get(id(given.optimizer), given.optimizer)
        if given.lr_scheduler_callable is not None:
            return given.lr_scheduler_callable(optimizer)
        params = "scheduler.params"
        self._auto |= {
            f"{params}.total_num_steps": given.total_num_steps,
            f"{params}.warmup_num_steps": max(1, given.warmup_num_steps),
            f"{params}.warmup_min_lr": 0,
            f"{params}.warmup_max_lr": optimizer.param_groups[0]["lr"],
        }
        self.job = self._parsed({})
        if self.job.schedule is None:
            raise ConfigError(
                "DummyScheduler stands for the scheduler of a DeepSpeed JSON without one."
            )
        return optimizers.schedule_of_json(self.job.schedule, optimizer, self.job.document.name)


def one_optimizer(job: Job, parameters: list[Any], models: list[nn.Module]) -> optim.Optimizer:
    """The optimizer of the JSON over `parameters`. Raises ConfigError for one that is two."""
    assert job.optimizer is not None
    found = optimizers.of_json(job.optimizer, parameters, models, job.document.name)
    if len(found) > 1:
        raise ConfigError(
            f"{job.document.name}: {job.optimizer.name} is two optimizers here, and this library "
            "steps one: take AdamW, or make them in the script."
        )
    return found[0]


def _auto_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """What "auto" means to an Accelerator with these arguments."""
    precision = given.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return {
        "gradient_accumulation_steps": given.get("gradient_accumulation_steps", 1),
        "bf16.enabled": str(precision) == "bf16",
        "fp16.enabled": str(precision) == "fp16",
    }
