"""Implements deepspeed.initialize, which creates an engine from a model and a config."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn, optim
from torch.amp import GradScaler

import shardwise as sw
from shardwise.bridging.deepspeed_json import say_lines
from shardwise.bridging.joining import divide
from shardwise.config import OF_THE_ENGINE, json_of_deepspeed
from shardwise.config.deepspeed import DeepSpeedJob, parse
from shardwise.deepspeed import optimizers
from shardwise.deepspeed.checkpoints import BESIDE
from shardwise.deepspeed.comm import join_run
from shardwise.deepspeed.configured import EngineParts
from shardwise.deepspeed.engine import DeepSpeedEngine, OutputTypes
from shardwise.deepspeed.loader import DeepSpeedDataLoader
from shardwise.deepspeed.pipe.engine import PipelineEngine
from shardwise.deepspeed.pipe.module import PipelineModule
from shardwise.deepspeed.pipe.topology import PipelineParallelGrid
from shardwise.errors import ConfigError, FailedAssertion, UsageError

Json = str | os.PathLike[str] | Mapping[str, Any]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: optim.Optimizer | Callable[[Any], optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: Json | None = None,
    mesh_param: Any = None,
    config_params: Json | None = None,
) -> tuple[DeepSpeedEngine, Any, DeepSpeedDataLoader | None, Any]:
    """Create an engine for a model. Collective.

    Command-line flags override the config. docs/from_deepspeed.md lists the differences from
    DeepSpeed.

    Args:
        args: Arguments of the script, which may include `deepspeed_config` and `local_rank`.
        model: A module, or a PipelineModule.
        optimizer: An optimizer, or a function that creates one from the parameters (default: the
            config's optimizer).
        model_parameters: The parameters to train (default: all).
        training_data: A dataset for `engine.training_dataloader`.
        lr_scheduler: A schedule, or a function that creates one from the optimizer (default: the
            config's schedule).
        collate_fn: As in torch's DataLoader, for `training_data`.
        config: The DeepSpeed config, as a path or a dict (default: `args.deepspeed_config`, or the
            file of `shardwise run --deepspeed`).
        config_params: The older name of `config`.
        distributed_port, dist_init_required: Ignored, because the launcher determines them.
        mpu, mesh_param: Not supported, because Shardwise itself creates groups of ranks.

    Returns:
        The engine, its optimizer, the loader of `training_data`, and the schedule. Each of the last
        three is None if it does not exist.

    Raises:
        ConfigError: If this engine does not support a key of the config.
        UsageError: If a plain model is used with several pipeline stages.

    Example:
        ```python
        import shardwise.deepspeed as deepspeed

        engine, optimizer, _, _ = deepspeed.initialize(model=model, config="ds.json")
        for x, y in loader:
            loss = loss_fn(engine(x), y)
            engine.backward(loss)
            engine.step()
        ```
    """
    del distributed_port, dist_init_required  # the launcher's variables describe the run
    model = _checked(model)
    if mesh_param is not None or not isinstance(mpu, PipelineParallelGrid | None):
        raise UsageError(
            "deepspeed.initialize(mpu=..., mesh_param=...) is not supported, because Shardwise "
            "creates the groups of ranks. Leave them out, and write tensor_parallel.autotp_size "
            "in the JSON."
        )
    job = parse(_json_of(args, config if config is not None else config_params))
    world = join_run({})
    _divide(world, job, model)
    _say(world, job)
    if hasattr(args, "local_rank"):
        args.local_rank = world.local_rank
    engine = _build(world, job, model, optimizer, model_parameters, lr_scheduler, collate_fn)
    if training_data is not None:
        reads = engine.read if isinstance(engine, PipelineEngine) else engine.deepspeed_io
        engine.training_dataloader = reads(training_data)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _checked(model: Any) -> nn.Module:
    """Check that `model` has a supported type, and return it.

    Raises FailedAssertion if it is not a module, and UsageError if it is DeepSpeed's own
    PipelineModule.
    """
    if not isinstance(model, nn.Module):
        raise FailedAssertion(
            f"deepspeed.initialize(model=...) needs a torch.nn.Module, not {model!r}."
        )
    is_theirs = any(kind.__name__ == "PipelineModule" for kind in type(model).__mro__)
    if is_theirs and not isinstance(model, PipelineModule):
        raise UsageError(
            "deepspeed.initialize(model=...) has a PipelineModule of another library. Create it "
            "with shardwise.deepspeed.pipe.PipelineModule, or start with --adopt deepspeed."
        )
    return model


def _divide(world: sw.World, job: DeepSpeedJob, model: Any) -> None:
    """Divide each replica among ranks, as the config specifies.

    Raises UsageError if a plain model has several stages, and ConfigError if the number of
    replicas differs from the config's.
    """
    if (size := job.settings.get("tensor", 1)) > 1:
        divide(world, f"{job.document.name}: tensor_parallel.autotp_size", tensor=size)
    if world.pipeline_size > 1 and not isinstance(model, PipelineModule):
        raise UsageError(
            f"deepspeed.initialize with --pipeline {world.pipeline_size} needs a PipelineModule, "
            f"not a {type(model).__name__}. Pass its layers to one, or leave the flag out."
        )
    if (replicas := job.document.get(key := "data_parallel_size", 0)) not in (0, world.data_size):
        raise ConfigError(
            f"{job.document.name} has {key} {replicas}, but this run has {world.data_size} "
            "replica(s). Leave it out, or start a different number of workers."
        )


def _json_of(args: Any, config: Json | None) -> Json:
    """Return the DeepSpeed config. Raises UsageError unless exactly one is given."""
    names = ("deepspeed_config", "deepscale_config")
    given = [config, *(getattr(args, name, None) for name in names)]
    found: list[Json] = [each for each in given if each is not None]
    if len(found) > 1:
        raise UsageError(
            "deepspeed.initialize has both config and args.deepspeed_config: pass one of them."
        )
    if not found and (of_run := json_of_deepspeed(os.environ)) is not None:
        found.append(of_run)
    if not found:
        raise UsageError(
            "deepspeed.initialize has no JSON. Pass config=, or --deepspeed_config in args, or "
            "start with shardwise run --deepspeed FILE."
        )
    return found[0]


def _say(world: sw.World, job: DeepSpeedJob) -> None:
    """Print the config's ignored keys and the values that replaced "auto", once."""
    say_lines(world, job)
    if job.precision == "fp16-mixed" and job.document.get("fp16.enabled"):
        world.say_once(
            f"{job.document.name}: with fp16, forwards run in autocast and weights stay fp32. "
            "DeepSpeed casts the weights."
        )


def _build(
    world: sw.World,
    job: DeepSpeedJob,
    model: nn.Module,
    optimizer: Any,
    model_parameters: Any,
    lr_scheduler: Any,
    collate_fn: Any,
) -> DeepSpeedEngine:
    batches = job.batches(world.data_size)
    settings = {n: v for n, v in job.settings.items() if n in OF_THE_ENGINE}
    precision = world.settle(**settings).precision
    _place(model, world, precision)
    parameters = list(model.parameters()) if model_parameters is None else list(model_parameters)
    made = _optimizers(job, model, optimizer, parameters)
    # Before the engine, so that its hook runs before the engine's hook.
    outputs = OutputTypes(model, restores=precision.startswith("bf16"))
    parts = EngineParts(optimizers=made)
    if made:
        scaler = _scaler(job, world) if precision == "fp16-mixed" else None
        parts.engine = sw.Engine(model, made, scaler=scaler, **settings)
        parts.engine.track(**{BESIDE: parts.schedules_file})
        parts.optimizer = made[0] if len(made) == 1 else optimizers.ManyOptimizers(made)
        if lr_scheduler is not None:
            given = lr_scheduler
            parts.scheduler = given(parts.optimizer) if callable(given) else given
        elif job.schedule is not None:
            name = job.document.name
            parts.scheduler = optimizers.schedule_of_json(job.schedule, parts.optimizer, name)
    elif job.stage > 0:
        world.say_once(
            "a model without an optimizer is not sharded: each worker has the whole model."
        )
    kind = PipelineEngine if isinstance(model, PipelineModule) else DeepSpeedEngine
    return kind(model, job, batches, world, parts, outputs, collate_fn)


def _place(model: nn.Module, world: sw.World, precision: str) -> None:
    """Move `model` to this rank's device. With bf16, round its weights."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return  # the engine allocates meta tensors on the device
    model.to(world.device)
    if precision != "bf16":
        return
    # As in DeepSpeed, the fp32 masters start from the rounded weights.
    for module in model.modules():
        if not isinstance(module, nn.modules.batchnorm._NormBase):
            for parameter in module.parameters(recurse=False):
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(torch.bfloat16)


def _optimizers(
    job: DeepSpeedJob, model: nn.Module, optimizer: Any, parameters: list[Any]
) -> list[optim.Optimizer]:
    """Return the script's optimizer or the config's, or an empty list if neither has one."""
    if optimizer is None:
        if job.optimizer is None:
            return []
        made = optimizers.of_json(job.optimizer, parameters, [model], job.document.name)
    else:
        made = [optimizer if isinstance(optimizer, optim.Optimizer) else optimizer(parameters)]
    for each in made:
        if not isinstance(each, optim.Optimizer):
            raise UsageError(
                "deepspeed.initialize(optimizer=...) needs a torch optimizer, or a function that "
                f"returns one, not {type(each).__name__}."
            )
        # Scripts create groups with and without weight decay, and one of them may be empty.
        each.param_groups[:] = [group for group in each.param_groups if group["params"]]
    return made


def _scaler(job: DeepSpeedJob, world: sw.World) -> GradScaler:
    scaling = job.scaling
    scale = scaling.static or float(2**scaling.power)
    scaler = GradScaler(world.device.type, init_scale=scale, growth_interval=scaling.window)
    # GradScaler has no static scale, but factors of 1 keep it constant.
    if scaling.static:
        scaler.set_growth_factor(1.0)
        scaler.set_backoff_factor(1.0)
    return scaler


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add --deepspeed, --deepspeed_config and their old names to the script's parser.

    Args:
        parser: The parser of the script.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    for name in ("deepspeed", "deepscale"):
        group.add_argument(f"--{name}", action="store_true", help="train with DeepSpeed's engine")
        group.add_argument(f"--{name}_config", default=None, type=str, help="its JSON file")
    return parser
