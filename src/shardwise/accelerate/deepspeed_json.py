"""A DeepSpeed JSON that an Accelerator is given: settings of its engines, and what a loop does.

    Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config="ds.json"))     # in the script
    accelerate launch --use_deepspeed --zero_stage 2 script.py                # by its variables

DeepSpeed need not be installed: the plugin is Accelerate's own class, and holds the JSON.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from accelerate import utils
from accelerate.utils import DeepSpeedPlugin, GradScalerKwargs
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn, optim

import shardwise as sw
from shardwise.config.deepspeed import Job, parse, short_lines
from shardwise.deepspeed import optimizers
from shardwise.errors import ConfigError, UsageError

VARIABLE = "ACCELERATE_USE_DEEPSPEED"

for _kind in (DummyOptim, DummyScheduler):
    # Where scripts import them from: without deepspeed Accelerate leaves them out there.
    setattr(utils, _kind.__name__, _kind)

_OF_LOADERS = ("micro_batch_size",)
"""Settings that the loaders of a script have already decided."""


def taken_from(given: MutableMapping[str, Any]) -> OfJson | None:
    """The JSON among the arguments of an Accelerator, or in the variables that `accelerate launch
    --use_deepspeed` sets; None without one. Its plugin is taken out of `given`, and what the JSON
    says to Accelerate itself is put in."""
    plugin = _plugin_of(given)
    if plugin is None:
        return None
    found = OfJson(plugin, given)
    handlers = with_scaling(given.get("kwargs_handlers"), found.job)
    given.update(found.arguments | ({} if handlers is None else {"kwargs_handlers": handlers}))
    return found


def _plugin_of(given: MutableMapping[str, Any]) -> DeepSpeedPlugin | None:
    found = [given.pop(name, None) for name in ("deepspeed_plugin", "deepspeed_plugins")]
    plugin = next((each for each in found if each is not None), None)
    if isinstance(plugin, Mapping):
        if len(plugin) > 1:
            raise UsageError(
                f"Accelerator(deepspeed_plugins=...) has {len(plugin)} of them: one Accelerator "
                "trains with one. Make an Accelerator for each."
            )
        plugin = next(iter(plugin.values()), None)
    # Accelerate would import deepspeed where it sees the switch.
    asked = os.environ.pop(VARIABLE, "false").lower() == "true"
    return DeepSpeedPlugin() if plugin is None and asked else plugin


class OfJson:
    """What the JSON of `plugin` means for an Accelerator with the arguments `given`.

    Raises ConfigError as `config.deepspeed.parse` does, and where an argument contradicts a key.
    """

    def __init__(self, plugin: DeepSpeedPlugin, given: Mapping[str, Any]) -> None:
        self._tree = dict(plugin.deepspeed_config)
        self._tree.pop("steps_per_print", None)  # infinite: Accelerate's way to say none
        self._auto = _auto_of(given)
        for word in ("bf16", "fp16"):
            if self._auto[f"{word}.enabled"]:
                self._tree.setdefault(word, {"enabled": True})
        self._made: dict[int, tuple[DummyOptim, optim.Optimizer]] = {}
        self.job: Job = self._parsed({})
        self._check(given)

    def _parsed(self, more: Mapping[str, Any]) -> Job:
        return parse(self._tree, {**self._auto, **more})

    def _check(self, given: Mapping[str, Any]) -> None:
        """Raise ConfigError where an argument of the Accelerator says another thing."""
        steps = given.get("gradient_accumulation_steps", 1)
        of_json = self.job.document.get("gradient_accumulation_steps", steps)
        if steps not in (1, of_json):
            raise ConfigError(
                f"{self.job.document.name} has gradient_accumulation_steps {of_json}, and "
                f'Accelerator {steps}: write "auto" into the JSON.'
            )
        precision, wanted = given.get("mixed_precision"), self.mixed_precision
        if precision not in (None, "no", wanted):
            raise ConfigError(
                f"{self.job.document.name} computes in {self.job.precision}, and Accelerator has "
                f'mixed_precision={precision!r}: write "auto" as {precision}.enabled.'
            )

    @property
    def max_norm(self) -> float:
        """What each step clips to, 0 for nothing."""
        return self.job.clipping

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of Shardwise that come of it."""
        return settings_of(self.job)

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

    def say(self, world: sw.World) -> None:
        """Print once what came of it."""
        say(world, self.job)
        clips = f"each step clips to {self.max_norm:g}" if self.max_norm else "nothing is clipped"
        world.say_once(f"{self.job.document.name}: {clips}")

    # -- optimizers and schedules of the JSON ------------------------------------------------

    def replaced(self, objects: tuple[Any, ...], accelerator: Any) -> tuple[Any, ...]:
        """`objects` to prepare, with the JSON's optimizer and schedule in the place of dummies."""
        models = [each for each in objects if isinstance(each, nn.Module)]
        for each in objects:
            if isinstance(each, DummyOptim):
                self._made[id(each)] = each, self._optimizer(each, models)
        return tuple(
            SteppedSchedule(self._schedule(each), accelerator)
            if isinstance(each, DummyScheduler)
            else self._in_place_of(each)
            for each in objects
        )

    def _in_place_of(self, given: Any) -> Any:
        """The optimizer that was made for a dummy; anything else as it is."""
        return self._made[id(given)][1] if id(given) in self._made else given

    def _optimizer(self, dummy: DummyOptim, models: list[nn.Module]) -> optim.Optimizer:
        params = "optimizer.params"
        auto = {f"{params}.lr": dummy.lr, f"{params}.weight_decay": dummy.weight_decay}
        self._auto |= auto | {f"{params}.{name}": value for name, value in dummy.kwargs.items()}
        self.job = self._parsed({})
        if self.job.optimizer is None:
            raise ConfigError(
                "DummyOptim stands for the optimizer of a DeepSpeed JSON without one."
            )
        return one_optimizer(self.job, list(dummy.params), models)

    def _schedule(self, given: DummyScheduler) -> Any:
        optimizer = self._in_place_of(given.optimizer)
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


class SteppedSchedule:
    """A schedule of a JSON in a loop of Accelerate: it steps once with each update, as inside of
    DeepSpeed's engine, however often the loop calls `step`."""

    def __init__(self, schedule: Any, accelerator: Any) -> None:
        self.scheduler = schedule
        self._accelerator = accelerator
        accelerator._schedulers.append(self)  # so that save_state has it

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def step(self, *arguments: Any, **keywords: Any) -> None:
        """Step where the last micro-batch of a step has updated something."""
        accelerator = self._accelerator
        skipped = any(each.step_was_skipped for each in accelerator._optimizers)
        if accelerator.sync_gradients and not skipped:
            self.scheduler.step(*arguments, **keywords)

    def state_dict(self) -> Any:
        """The schedule's."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Go on from the schedule's `state`."""
        self.scheduler.load_state_dict(state)


def settings_of(job: Job) -> dict[str, Any]:
    """Settings of Shardwise that come of a JSON."""
    return {name: value for name, value in job.settings.items() if name not in _OF_LOADERS}


def say(world: sw.World, job: Job) -> None:
    """Print once which settings come of a JSON, "auto" with what it became, what is ignored."""
    settings = " ".join(f"{name}={value}" for name, value in settings_of(job).items())
    world.say_once(f"{job.document.name} is taken as {settings or 'no settings'}")
    for line in short_lines(job, of_loop=False):
        world.say_once(f"{job.document.name}: {line}")


def with_scaling(given: list[Any] | None, job: Job) -> list[Any] | None:
    """`kwargs_handlers` with the loss scale of a JSON's fp16, unless there is one. Raises
    ConfigError for a scale that stays."""
    several = list(given or [])
    known = any(isinstance(each, GradScalerKwargs) for each in several)
    if not job.precision.startswith("fp16") or known:
        return given
    if job.scaling.static:
        raise ConfigError(
            f"{job.document.name} has fp16.loss_scale {job.scaling.static:g}, and here the scale "
            "follows overflows: write 0 there, or leave it out."
        )
    scale, window = float(2**job.scaling.power), job.scaling.window
    return [*several, GradScalerKwargs(init_scale=scale, growth_interval=window)]


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
