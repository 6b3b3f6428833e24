"""Exposes an engine's configuration and counters under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.bridging.written_files import SchedulesFile
from shardwise.config.deepspeed import Batches, DeepSpeedJob
from shardwise.errors import UsageError


@dataclass(kw_only=True)
class Counts:
    """An engine's counters, which are stored in checkpoints."""

    global_steps: int = 0
    global_samples: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0


@dataclass(kw_only=True)
class EngineParts:
    """The parts of a DeepSpeedEngine. Without an optimizer, they are None or empty."""

    engine: sw.Engine | None = None
    optimizer: Any = None
    optimizers: Sequence[torch.optim.Optimizer] = field(default_factory=tuple)
    scheduler: Any = None
    schedules_file: SchedulesFile = field(default_factory=SchedulesFile)


class Configured(nn.Module):
    """Sizes, precision, stage, learning rates and ranks, under DeepSpeed's attribute names."""

    optimizer: Any

    def __init__(
        self, job: DeepSpeedJob, batches: Batches, world: sw.World, parts: EngineParts
    ) -> None:
        super().__init__()
        self.world = world
        self._job = job
        self._batches = batches
        self._parts = parts
        self._counts = Counts()
        self.lr_scheduler = parts.scheduler

    @property
    def device(self) -> torch.device:
        """The device of this worker."""
        return self.world.device

    @property
    def local_rank(self) -> int:
        """The rank of this worker on its host."""
        return self.world.local_rank

    @property
    def global_rank(self) -> int:
        """The rank of this worker."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self.world.size

    @property
    def dp_world_size(self) -> int:
        """The number of data-parallel replicas."""
        return self.world.data_size

    @property
    def config(self) -> dict[str, Any]:
        """The config's values by dotted name."""
        return dict(self._job.document.values)

    @property
    def global_steps(self) -> int:
        """Number of updates, including skipped ones."""
        return self._counts.global_steps

    @property
    def global_samples(self) -> int:
        """Number of samples that all ranks have trained on."""
        return self._counts.global_samples

    @property
    def micro_steps(self) -> int:
        """Number of calls to `step`."""
        return self._counts.micro_steps

    @property
    def skipped_steps(self) -> int:
        """Number of updates that were skipped because of an overflow."""
        return self._counts.skipped_steps

    def train_batch_size(self) -> int:
        """Return the number of samples per update, across all ranks."""
        return self._batches.total

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples per backward pass on one rank."""
        return self._batches.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the number of backward passes per update."""
        return self._batches.steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return the samples per update, samples per backward pass, and accumulation steps."""
        return self._batches.total, self._batches.micro, self._batches.steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the number of samples per update, by changing the number of accumulation steps.

        Raises:
            UsageError: If `train_batch_size` is not a multiple of the number of samples that all
                workers together use per backward pass.
        """
        at_once = self._batches.micro * self.world.data_size
        if train_batch_size % at_once or train_batch_size < at_once:
            raise UsageError(
                f"set_train_batch_size({train_batch_size}) needs a multiple of {at_once}: "
                f"{self._batches.micro} samples x {self.world.data_size} workers."
            )
        steps = train_batch_size // at_once
        self._batches = Batches(total=train_batch_size, micro=self._batches.micro, steps=steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the number of samples per backward pass. The number per update changes too."""
        steps = self._batches.steps
        total = micro_batch_size * steps * self.world.data_size
        self._batches = Batches(total=total, micro=micro_batch_size, steps=steps)

    def gradient_clipping(self) -> float:
        """Return the norm to which gradients are clipped, or 0 if they are not clipped."""
        return self._job.clipping

    def steps_per_print(self) -> int | None:
        """Return the number of updates between two progress lines, or None if none are printed."""
        return self._job.steps_per_print

    def _precision(self) -> str:
        engine = self._parts.engine
        return self._job.precision if engine is None else engine.settings.precision

    def fp16_enabled(self) -> bool:
        """Return whether forward passes compute in fp16."""
        return self._precision() == "fp16-mixed"

    def bfloat16_enabled(self) -> bool:
        """Return whether the parameters are bf16."""
        return self._precision() == "bf16"

    def torch_autocast_enabled(self) -> bool:
        """Return whether forward passes run under autocast."""
        return self._precision().endswith("-mixed") and "torch_autocast.enabled" in self.config

    def managed_gradient_accumulation(self) -> bool:
        """Return whether `step` updates parameters only in the last micro-batch."""
        return self._job.manages_accumulation

    def dataloader_drop_last(self) -> bool:
        """Return whether a short last batch of `training_data` is dropped."""
        return self._job.drop_last

    def get_data_parallel_rank(self) -> int:
        """Return the index of the replica that this worker belongs to."""
        return self.world.data_rank

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage of the placement."""
        engine = self._parts.engine
        return self._job.stage if engine is None else engine.placement.level

    def zero_optimization(self) -> bool:
        """Return whether any state is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Return whether gradients are sharded."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Return whether parameters are sharded."""
        return self.zero_optimization_stage() == 3

    def zero_cpu_offload(self) -> bool:
        """Return whether optimizer state is in host memory."""
        return self._optimizer_tier() == "cpu"

    def zero_use_cpu_optimizer(self) -> bool:
        """Return whether optimizer state is in host memory or on the host's disk."""
        return self._optimizer_tier() in ("cpu", "nvme")

    def _optimizer_tier(self) -> str:
        engine = self._parts.engine
        return "device" if engine is None else engine.placement.tier("optimizer").kind

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return True, because save_16bit_model writes full weights at every stage."""
        return True

    def autotp_size(self) -> int:
        """Return the number of workers across which a layer is split."""
        return self.world.tensor_size

    def wall_clock_breakdown(self) -> bool:
        """Return False, because --timeline records times instead."""
        return False

    def curriculum_learning_enabled(self) -> bool:
        """Return False, because curriculum learning is not supported."""
        return False

    def data_efficiency_enabled(self) -> bool:
        """Return False, because data efficiency is not supported."""
        return False

    def loss_scale(self) -> float:
        """Return the current loss scale, or 1 if losses are not scaled."""
        return 1.0 if self._parts.engine is None else self._parts.engine.loss_scale

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale adapts to overflows."""
        return self.fp16_enabled() and not self._job.scaling.static

    def optimizer_name(self) -> str | None:
        """Return the name of the config's optimizer in lower case, or None."""
        return None if self._job.optimizer is None else self._job.optimizer.name.lower()

    def optimizer_params(self) -> dict[str, Any] | None:
        """Return the arguments of the config's optimizer, or None."""
        return None if self._job.optimizer is None else dict(self._job.optimizer.params)

    def scheduler_name(self) -> str | None:
        """Return the name of the config's schedule, or None."""
        return None if self._job.schedule is None else self._job.schedule.name

    def scheduler_params(self) -> dict[str, Any] | None:
        """Return the arguments of the config's schedule, or None."""
        return None if self._job.schedule is None else dict(self._job.schedule.params)

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """An empty set, because no gradients are sent as sparse tensors."""
        return set()

    def empty_partition_cache(self) -> None:
        """No-op, because the engine frees gathered parameters immediately after their use."""

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """Return the momentum, or the betas, of each parameter group."""
        # As in DeepSpeed, this depends on the name in the config and not on the groups' entries.
        return self._of_groups("momentum" if self.optimizer_name() in _BY_MOMENTUM else "betas")

    def get_type(self) -> list[Any]:
        """Return the type of each parameter group, if the script has set it."""
        return self._of_groups("type")

    def _engine(self, call: str) -> sw.Engine:
        if self._parts.engine is None:
            raise UsageError(
                f"engine.{call}() was called without an optimizer, or after destroy(). Pass "
                "initialize an optimizer, or name one in the JSON."
            )
        return self._parts.engine

    def _of_groups(self, name: str) -> list[Any]:
        if self.optimizer is None:
            return []
        return [group.get(name, 0.0) for group in self.optimizer.param_groups]


_BY_MOMENTUM = ("sgd", "rmsprop")
