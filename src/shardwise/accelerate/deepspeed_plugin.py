"""The DeepSpeed JSON of an Accelerator: settings of its engines, and a loop's optimizers.

    Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config="ds.json"))     # in the script
    accelerate launch --use_deepspeed --zero_stage 2 script.py                # by its variables

DeepSpeed need not be installed: the plugin is Accelerate's own class, and holds the JSON.
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
from shardwise.bridging.deepspeed_json import made_twice, parse_for_loop, say_settings
from shardwise.bridging.trained_engine import TrainedEngine
from shardwise.config.deepspeed import DeepSpeedJob
from shardwise.deepspeed import optimizers
from shardwise.errors import ConfigError, UsageError

VARIABLE = "ACCELERATE_USE_DEEPSPEED"

TAKEN: Any = object()
"""The `deepspeed_plugin` of an Accelerator whose Trainer has read the JSON already."""

_KEPT = "_shardwise_json"
"""The entry of Accelerate's own state with the JSON, for a second Accelerator."""

for _kind in (DummyOptim, DummyScheduler):
    # Where scripts import them from: without deepspeed Accelerate leaves them out there.
    setattr(utils, _kind.__name__, _kind)


def taken_from(given: MutableMapping[str, Any]) -> PluginJson | None:
    """Return the JSON among the arguments of an Accelerator, or in the variables that `accelerate
    launch --use_deepspeed` sets; None without one. Replaces its plugin in `given` by Accelerate's
    own arguments."""
    plugin = _plugin_of(given)
    if plugin is None:
        return None
    found = PluginJson(plugin, given)
    handlers = with_scaling(given.get("kwargs_handlers"), found.job)
    given.update(found.arguments | ({} if handlers is None else {"kwargs_handlers": handlers}))
    return found


def _plugin_of(given: MutableMapping[str, Any]) -> DeepSpeedPlugin | None:
    found = [given.pop(name, None) for name in ("deepspeed_plugin", "deepspeed_plugins")]
    plugin = next((each for each in found if each is not None), None)
    if plugin is TAKEN:
        return None
    if isinstance(plugin, Mapping):
        if len(plugin) > 1:
            raise UsageError(
                f"Accelerator(deepspeed_plugins=...) has {len(plugin)} of them: one Accelerator "
                "trains with one. Make an Accelerator for each."
            )
        plugin = next(iter(plugin.values()), None)
    return _plugin_of_process(given) if plugin is None else plugin


def _plugin_of_process(given: MutableMapping[str, Any]) -> DeepSpeedPlugin | None:
    """Return the plugin of an earlier Accelerator, with its precision, or of the variables."""
    kept: PluginJson | None = AcceleratorState._shared_state.get(_KEPT)
    if kept is None:
        return DeepSpeedPlugin() if _is_asked() else None
    if given.get("mixed_precision") is None:
        given["mixed_precision"] = kept.mixed_precision
    return kept.plugin


def _is_asked() -> bool:
    return os.environ.get(VARIABLE, "false").lower() == "true"


@contextmanager
def without_switch() -> Iterator[bool]:
    """Remove the variable that asks for DeepSpeed inside the block, because Accelerate would import
    deepspeed. Yields whether it asks."""
    asked, before = _is_asked(), os.environ.pop(VARIABLE, None)
    try:
        yield asked
    finally:
        if before is not None:
            os.environ[VARIABLE] = before


class PluginJson:
    """The JSON of `plugin` for an Accelerator with the arguments `given`.

    Raises ConfigError as `config.deepspeed.parse` does, and if an argument contradicts a key.
    """

    def __init__(self, plugin: DeepSpeedPlugin, given: Mapping[str, Any]) -> None:
        self.plugin = plugin
        self._accumulation = given.get("gradient_accumulation_plugin")
        self._tree = dict(plugin.deepspeed_config)
        self._tree.pop("steps_per_print", None)  # infinite: Accelerate's way to say none
        self._auto = _auto_of(given)
        for word in ("bf16", "fp16"):
            if self._auto[f"{word}.enabled"]:
                self._tree.setdefault(word, {"enabled": True})
        self._made: dict[int, tuple[DummyOptim, optim.Optimizer]] = {}
        self.job = parse_for_loop(self._tree, self._auto)
        self._check(given)

    def _check(self, given: Mapping[str, Any]) -> None:
        """Raise ConfigError if an argument of the Accelerator contradicts the JSON."""
        steps = _steps_of(given)
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
    def mixed_precision(self) -> str:
        """The precision under Accelerate's name: "no" for fp32."""
        return {"fp32": "no", "bf16": "bf16", "bf16-mixed": "bf16"}.get(self.job.precision, "fp16")

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of Accelerate that the JSON sets."""
        found: dict[str, Any] = {"mixed_precision": self.mixed_precision}
        steps = self.job.document.get("gradient_accumulation_steps")
        if steps is None:
            return found
        if self._accumulation is None:
            return found | {"gradient_accumulation_steps": steps}
        plugin = replace(self._accumulation, num_steps=steps)
        return found | {"gradient_accumulation_plugin": plugin}

    def keep(self) -> None:
        """Keep the JSON for later Accelerators, in Accelerate's own state."""
        AcceleratorState._shared_state[_KEPT] = self

    def say(self, world: sw.World) -> None:
        """Print once which settings the JSON sets."""
        say_settings(world, self.job)
        norm = self.job.clipping
        clips = f"each step clips to {norm:g}" if norm else "nothing is clipped"
        world.say_once(f"{self.job.document.name}: {clips}")

    # -- optimizers and schedules of the JSON ------------------------------------------------

    def replaced(self, objects: tuple[Any, ...], accelerator: Any) -> tuple[Any, ...]:
        """Return the `objects` to prepare, with the JSON's optimizer and schedule instead of
        dummies. Raises ConfigError for an optimizer or schedule that the JSON has too."""
        self._check_own(objects)
        models = [each for each in objects if isinstance(each, nn.Module)]
        # Optimizers first: a dummy schedule may stand before its dummy optimizer in the call.
        for each in objects:
            if isinstance(each, DummyOptim):
                self._made[id(each)] = each, self._optimizer(each, models)
        found = []
        for each in objects:
            if isinstance(each, DummyScheduler):
                optimizer = self._in_place_of(each.optimizer)
                each = SteppedSchedule(self._schedule(each, optimizer), optimizer, accelerator)
            found.append(self._in_place_of(each))
        return tuple(found)

    def _check_own(self, objects: tuple[Any, ...]) -> None:
        for each in objects:
            if getattr(each, "_is_accelerate_prepared", False):
                continue
            if self.job.optimizer is not None and isinstance(each, optim.Optimizer):
                raise made_twice(self.job, "optimizer", "prepare()", "DummyOptim")
            if self.job.schedule is not None and isinstance(each, optim.lr_scheduler.LRScheduler):
                raise made_twice(self.job, "scheduler", "prepare()", "DummyScheduler")

    def _in_place_of(self, given: Any) -> Any:
        """Return the optimizer that was made for a dummy; anything else as it is."""
        return self._made[id(given)][1] if id(given) in self._made else given

    def _optimizer(self, dummy: DummyOptim, models: list[nn.Module]) -> optim.Optimizer:
        params = "optimizer.params"
        auto = {f"{params}.lr": dummy.lr, f"{params}.weight_decay": dummy.weight_decay}
        self._auto |= auto | {f"{params}.{name}": value for name, value in dummy.kwargs.items()}
        self.job = parse_for_loop(self._tree, self._auto)
        if self.job.optimizer is None:
            raise ConfigError(
                "DummyOptim stands for the optimizer of a DeepSpeed JSON without one."
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
                "DummyScheduler stands for the scheduler of a DeepSpeed JSON without one."
            )
        return optimizers.schedule_of_json(self.job.schedule, optimizer, self.job.document.name)


class SteppedSchedule:
    """A JSON's schedule in a loop of Accelerate. As in DeepSpeed's engine it steps with each update
    of its optimizer, not when the loop calls `step`."""

    def __init__(self, schedule: Any, optimizer: Any, accelerator: Any) -> None:
        self.scheduler = schedule
        plain = getattr(optimizer, "optimizer", optimizer)
        accelerator._schedulers.append(self)  # so that save_state has it

        def follow(trained: TrainedEngine) -> None:
            if any(each is plain for each in trained.optimizers):
                schedule.step()

        accelerator._trained.followers.append(follow)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def step(self, *arguments: Any, **keywords: Any) -> None:
        """Do nothing: the optimizer's step has stepped it already."""

    def state_dict(self) -> Any:
        """Return the schedule's state."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Load the schedule's `state`."""
        self.scheduler.load_state_dict(state)


def with_scaling(given: list[Any] | None, job: DeepSpeedJob) -> list[Any] | None:
    """Return `kwargs_handlers` with the loss scale of a JSON's fp16, unless they have one. Raises
    ConfigError for a static scale."""
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


def _steps_of(given: Mapping[str, Any]) -> int:
    """Return the number of micro-batches of a step, from the arguments of an Accelerator."""
    plugin = given.get("gradient_accumulation_plugin")
    steps = given.get("gradient_accumulation_steps") if plugin is None else plugin.num_steps
    return steps or 1


def _auto_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of "auto" for an Accelerator with these arguments."""
    precision = given.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return {
        "gradient_accumulation_steps": _steps_of(given),
        "bf16.enabled": str(precision) == "bf16",
        "fp16.enabled": str(precision) == "fp16",
    }
