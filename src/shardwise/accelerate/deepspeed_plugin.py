"""Applies an Accelerator's DeepSpeed config: engine settings, optimizer and schedule.

    Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config="ds.json"))     # in the script
    accelerate launch --use_deepspeed --zero_stage 2 script.py                # as variables

DeepSpeed need not be installed, because the plugin is a class of Accelerate that stores the config.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from accelerate import utils
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, GradScalerKwargs
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn, optim

import shardwise as sw
from shardwise.bridging.deepspeed_json import duplicate_error, parse_for_loop, say_settings
from shardwise.bridging.trained_engine import TrainedEngine
from shardwise.config.deepspeed import DeepSpeedJob
from shardwise.deepspeed import optimizers
from shardwise.errors import ConfigError, UsageError

VARIABLE = "ACCELERATE_USE_DEEPSPEED"

ALREADY_READ: Any = object()
"""The `deepspeed_plugin` of an Accelerator whose Trainer has already read the config."""

_KEPT = "_shardwise_json"
"""Key in Accelerate's own state under which the config is stored for a second Accelerator."""

for _kind in (DummyOptim, DummyScheduler):
    # Scripts import them from accelerate.utils, which lacks them if deepspeed is not installed.
    setattr(utils, _kind.__name__, _kind)


def pop_json(given: MutableMapping[str, Any]) -> PluginJson | None:
    """Return the DeepSpeed config from the Accelerator arguments `given`, or None.

    The config may also be in the variables that `accelerate launch --use_deepspeed` sets. In
    `given`, the plugin is replaced with Accelerate arguments that have the same effect.
    """
    plugin = _plugin_of(given)
    if plugin is None:
        return None
    plugin_json = PluginJson(plugin, given)
    handlers = with_scaling(given.get("kwargs_handlers"), plugin_json.job)
    given.update(
        plugin_json.arguments | ({} if handlers is None else {"kwargs_handlers": handlers})
    )
    return plugin_json


def _plugin_of(given: MutableMapping[str, Any]) -> DeepSpeedPlugin | None:
    plugins = [given.pop(name, None) for name in ("deepspeed_plugin", "deepspeed_plugins")]
    plugin = next((each for each in plugins if each is not None), None)
    if plugin is ALREADY_READ:
        return None
    if isinstance(plugin, Mapping):
        if len(plugin) > 1:
            raise UsageError(
                f"Accelerator(deepspeed_plugins=...) has {len(plugin)} plugins, but an "
                "Accelerator trains with one. Create one Accelerator per plugin."
            )
        plugin = next(iter(plugin.values()), None)
    return _plugin_of_process(given) if plugin is None else plugin


def _plugin_of_process(given: MutableMapping[str, Any]) -> DeepSpeedPlugin | None:
    """Return the plugin of an earlier Accelerator, or else the one that the environment requests.

    Returns None if there is neither. An earlier plugin's precision becomes the default value of
    `mixed_precision` in `given`.
    """
    kept: PluginJson | None = AcceleratorState._shared_state.get(_KEPT)
    if kept is None:
        return DeepSpeedPlugin() if _is_asked() else None
    if given.get("mixed_precision") is None:
        given["mixed_precision"] = kept.mixed_precision
    return kept.plugin


def _is_asked() -> bool:
    return os.environ.get(VARIABLE, "false").lower() == "true"


@contextmanager
def without_deepspeed_variable() -> Iterator[bool]:
    """Unset the variable that requests DeepSpeed inside the block. Yield whether it was set."""
    # If it were set, Accelerate would import deepspeed.
    asked, before = _is_asked(), os.environ.pop(VARIABLE, None)
    try:
        yield asked
    finally:
        if before is not None:
            os.environ[VARIABLE] = before


class PluginJson:
    """The DeepSpeed config of `plugin`, for an Accelerator with the arguments `given`.

    Raises ConfigError if the config is invalid, or if an argument contradicts one of its keys.
    """

    def __init__(self, plugin: DeepSpeedPlugin, given: Mapping[str, Any]) -> None:
        self.plugin = plugin
        self._accumulation = given.get("gradient_accumulation_plugin")
        self._tree = dict(plugin.deepspeed_config)
        self._tree.pop("steps_per_print", None)  # Accelerate writes infinity for "never"
        self._auto = _auto_of(given)
        for word in ("bf16", "fp16"):
            if self._auto[f"{word}.enabled"]:
                self._tree.setdefault(word, {"enabled": True})
        self._created: dict[int, tuple[DummyOptim, optim.Optimizer]] = {}
        self.job = parse_for_loop(self._tree, self._auto)
        self._check(given)

    def _check(self, given: Mapping[str, Any]) -> None:
        """Raise ConfigError if an argument of the Accelerator contradicts the config."""
        steps = _steps_of(given)
        of_json = self.job.document.get("gradient_accumulation_steps", steps)
        if steps not in (1, of_json):
            raise ConfigError(
                f"{self.job.document.name} has gradient_accumulation_steps {of_json}, but "
                f'Accelerator has {steps}: write "auto" in the JSON.'
            )
        precision, wanted = given.get("mixed_precision"), self.mixed_precision
        if precision not in (None, "no", wanted):
            raise ConfigError(
                f"{self.job.document.name} computes in {self.job.precision}, but Accelerator has "
                f'mixed_precision={precision!r}: set {precision}.enabled to "auto" in the JSON.'
            )

    @property
    def mixed_precision(self) -> str:
        """The precision in Accelerate's terms, such as "no" for fp32."""
        return {"fp32": "no", "bf16": "bf16", "bf16-mixed": "bf16"}.get(self.job.precision, "fp16")

    @property
    def arguments(self) -> dict[str, Any]:
        """The Accelerate arguments that the config determines."""
        arguments: dict[str, Any] = {"mixed_precision": self.mixed_precision}
        steps = self.job.document.get("gradient_accumulation_steps")
        if steps is None:
            return arguments
        if self._accumulation is None:
            return arguments | {"gradient_accumulation_steps": steps}
        plugin = replace(self._accumulation, num_steps=steps)
        return arguments | {"gradient_accumulation_plugin": plugin}

    def keep(self) -> None:
        """Store the config in Accelerate's own state, for later Accelerators."""
        AcceleratorState._shared_state[_KEPT] = self

    def say(self, world: sw.World) -> None:
        """Print the settings of the config, once."""
        say_settings(world, self.job)
        norm = self.job.clipping
        clips = f"each step clips to {norm:g}" if norm else "nothing is clipped"
        world.say_once(f"{self.job.document.name}: {clips}")

    # -- optimizers and schedules of the config ----------------------------------------------

    def replace_dummies(self, objects: tuple[Any, ...], accelerator: Any) -> tuple[Any, ...]:
        """Return `objects`, with dummies replaced by the config's optimizer and schedule.

        Raises ConfigError if both the script and the config define an optimizer or a schedule.
        """
        self._check_own(objects)
        models = [each for each in objects if isinstance(each, nn.Module)]
        # Create optimizers first, because a dummy schedule may precede its dummy optimizer in the
        # call.
        for each in objects:
            if isinstance(each, DummyOptim):
                self._created[id(each)] = each, self._optimizer(each, models)
        prepared = []
        for each in objects:
            if isinstance(each, DummyScheduler):
                optimizer = self._in_place_of(each.optimizer)
                each = SteppedSchedule(self._schedule(each, optimizer), optimizer, accelerator)
            prepared.append(self._in_place_of(each))
        return tuple(prepared)

    def _check_own(self, objects: tuple[Any, ...]) -> None:
        for each in objects:
            if getattr(each, "_is_accelerate_prepared", False):
                continue
            if self.job.optimizer is not None and isinstance(each, optim.Optimizer):
                raise duplicate_error(self.job, "optimizer", "prepare()", "DummyOptim")
            if self.job.schedule is not None and isinstance(each, optim.lr_scheduler.LRScheduler):
                raise duplicate_error(self.job, "scheduler", "prepare()", "DummyScheduler")

    def _in_place_of(self, given: Any) -> Any:
        """Return the optimizer that replaces `given`, or `given` itself if it is not a dummy."""
        return self._created[id(given)][1] if id(given) in self._created else given

    def _optimizer(self, dummy: DummyOptim, models: list[nn.Module]) -> optim.Optimizer:
        params = "optimizer.params"
        auto = {f"{params}.lr": dummy.lr, f"{params}.weight_decay": dummy.weight_decay}
        self._auto |= auto | {f"{params}.{name}": value for name, value in dummy.kwargs.items()}
        self.job = parse_for_loop(self._tree, self._auto)
        if self.job.optimizer is None:
            raise ConfigError(
                "DummyOptim was prepared, but the DeepSpeed JSON has no optimizer: add one to the "
                "JSON, or prepare a real optimizer."
            )
        return optimizers.one_of_json(self.job, list(dummy.params), models)

    def _schedule(self, given: DummyScheduler, optimizer: Any) -> Any:
        if given.lr_scheduler_callable is not None:
            return given.lr_scheduler_callable(optimizer)
        params = "scheduler.params"
        self._auto |= {
            f"{params}.total_num_steps": given.total_num_steps,
            f"{params}.warmup_num_steps": max(1, given.warmup_num_steps),
            f"{params}.warmup_min_lr": 0,
            f"{params}.warmup_max_lr": optimizer.param_groups[0]["lr"],
        }
        self.job = parse_for_loop(self._tree, self._auto)
        if self.job.schedule is None:
            raise ConfigError(
                "DummyScheduler was prepared, but the DeepSpeed JSON has no scheduler: add one to "
                "the JSON, or prepare a real scheduler."
            )
        return optimizers.schedule_of_json(self.job.schedule, optimizer, self.job.document.name)


class SteppedSchedule:
    """A config's schedule in an Accelerate loop.

    As in DeepSpeed, it steps whenever its optimizer updates, not when the loop calls `step`.
    """

    def __init__(self, schedule: Any, optimizer: Any, accelerator: Any) -> None:
        self.scheduler = schedule
        plain = getattr(optimizer, "optimizer", optimizer)
        accelerator._schedulers.append(self)  # save_state saves the objects in this list

        def follow(trained: TrainedEngine) -> None:
            if any(each is plain for each in trained.optimizers):
                schedule.step()

        accelerator._trained.followers.append(follow)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def step(self, *arguments: Any, **keywords: Any) -> None:
        """No-op: the optimizer's step has already stepped the schedule."""

    def state_dict(self) -> Any:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.scheduler.load_state_dict(state)


def with_scaling(given: list[Any] | None, job: DeepSpeedJob) -> list[Any] | None:
    """Return `given` (the `kwargs_handlers`), plus the loss scale of the config's fp16 section.

    A loss scale in `given` takes precedence. Raises ConfigError for a static scale.
    """
    several = list(given or [])
    known = any(isinstance(each, GradScalerKwargs) for each in several)
    if not job.precision.startswith("fp16") or known:
        return given
    if job.scaling.static:
        raise ConfigError(
            f"{job.document.name} has fp16.loss_scale {job.scaling.static:g}, but this loop needs "
            "a dynamic scale: write 0, or leave the key out."
        )
    scale, window = float(2**job.scaling.power), job.scaling.window
    return [*several, GradScalerKwargs(init_scale=scale, growth_interval=window)]


def _steps_of(given: Mapping[str, Any]) -> int:
    """Return the number of micro-batches per step for the Accelerator arguments `given`."""
    plugin = given.get("gradient_accumulation_plugin")
    steps = given.get("gradient_accumulation_steps") if plugin is None else plugin.num_steps
    return steps or 1


def _auto_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that replace "auto", for an Accelerator with the arguments `given`."""
    precision = given.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return {
        "gradient_accumulation_steps": _steps_of(given),
        "bf16.enabled": str(precision) == "bf16",
        "fp16.enabled": str(precision) == "fp16",
    }
