"""What an engine of DeepSpeed knows of itself: how it was configured, and what it has counted."""

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
    """What an engine counts, and what a checkpoint keeps."""

    global_steps: int = 0
    global_samples: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0


@dataclass(kw_only=True)
class EngineParts:
    """What an engine of DeepSpeed is made from: None and empty without an optimizer."""

    engine: sw.Engine | None = None
    optimizer: Any = None
    optimizers: Sequence[torch.optim.Optimizer] = field(default_factory=tuple)
    scheduler: Any = None
    schedules_file: SchedulesFile = field(default_factory=SchedulesFile)


class Configured(nn.Module):
    """Answers what scripts ask an engine: sizes, precision, stage, rates, ranks."""

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
        """Where this worker computes."""
        return self.world.device

    @property
    def local_rank(self) -> int:
        """This worker's number on its host."""
        return self.world.local_rank

    @property
    def global_rank(self) -> int:
        """This worker's number."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return self.world.size

    @property
    def dp_world_size(self) -> int:
        """How many workers have batches of their own."""
        return self.world.data_size

    @property
    def config(self) -> dict[str, Any]:
        """The values of the JSON by dotted name."""
        return dict(self._job.document.values)

    @property
    def global_steps(self) -> int:
        """Updates made or skipped."""
        return self._counts.global_steps

    @property
    def global_samples(self) -> int:
        """Samples trained on, over all workers."""
        return self._counts.global_samples

    @property
    def micro_steps(self) -> int:
        """Calls of `step`."""
        return self._counts.micro_steps

    @property
    def skipped_steps(self) -> int:
        """Updates that were skipped for an overflow."""
        return self._counts.skipped_steps

    def train_batch_size(self) -> int:
        """Samples of an update, over all workers."""
        return self._batches.total

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one backward of one worker."""
        return self._batches.micro

    def gradient_accumulation_steps(self) -> int:
        """Backwards of an update."""
        return self._batches.steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """The three sizes: of an update, of a backward, and backwards of an update."""
        return self._batches.total, self._batches.micro, self._batches.steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Let an update have `train_batch_size` samples, by other accumulation steps. Raises
        UsageError where it is no multiple of what all workers take in one backward."""
        at_once = self._batches.micro * self.world.data_size
        if train_batch_size % at_once or train_batch_size < at_once:
            raise UsageError(
                f"set_train_batch_size({train_batch_size}) takes a multiple of {at_once}: "
                f"{self._batches.micro} samples x {self.world.data_size} workers."
            )
        steps = train_batch_size // at_once
        self._batches = Batches(total=train_batch_size, micro=self._batches.micro, steps=steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Let a backward have `micro_batch_size` samples, by an update of more."""
        steps = self._batches.steps
        total = micro_batch_size * steps * self.world.data_size
        self._batches = Batches(total=total, micro=micro_batch_size, steps=steps)

    def gradient_clipping(self) -> float:
        """The norm that gradients are clipped to, 0 for none."""
        return self._job.clipping

    def steps_per_print(self) -> int | None:
        """Updates between two lines of progress, None for no lines."""
        return self._job.steps_per_print

    def _precision(self) -> str:
        engine = self._parts.engine
        return self._job.precision if engine is None else engine.settings.precision

    def fp16_enabled(self) -> bool:
        """Whether it computes in fp16."""
        return self._precision() == "fp16-mixed"

    def bfloat16_enabled(self) -> bool:
        """Whether the parameters are bf16."""
        return self._precision() == "bf16"

    def torch_autocast_enabled(self) -> bool:
        """Whether forwards run in autocast."""
        return self._precision().endswith("-mixed") and "torch_autocast.enabled" in self.config

    def managed_gradient_accumulation(self) -> bool:
        """Whether `step` updates only in the last micro-batch."""
        return self._job.manages_accumulation

    def dataloader_drop_last(self) -> bool:
        """Whether the last short batch of `training_data` is left out."""
        return self._job.drop_last

    def get_data_parallel_rank(self) -> int:
        """The replica that this worker is of, from 0."""
        return self.world.data_rank

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage of the placement."""
        engine = self._parts.engine
        return self._job.stage if engine is None else engine.placement.level

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self.zero_optimization_stage() == 3

    def zero_cpu_offload(self) -> bool:
        """Whether optimizer state rests in the host's memory."""
        return self._optimizer_tier() == "cpu"

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether optimizer state rests in the host's memory or on its disk."""
        return self._optimizer_tier() in ("cpu", "nvme")

    def _optimizer_tier(self) -> str:
        engine = self._parts.engine
        return "device" if engine is None else engine.placement.tier("optimizer").kind

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether save_16bit_model writes whole weights: it does in every stage."""
        return True

    def autotp_size(self) -> int:
        """How many workers of a replica a layer is split over."""
        return self.world.tensor_size

    def wall_clock_breakdown(self) -> bool:
        """Whether `step` prints its times: --timeline writes them instead."""
        return False

    def curriculum_learning_enabled(self) -> bool:
        """Whether batches grow as a curriculum: the JSON's is refused."""
        return False

    def data_efficiency_enabled(self) -> bool:
        """Whether data is sampled or dropped while training: the JSON's is refused."""
        return False

    def loss_scale(self) -> float:
        """The present loss scale, 1 where there is none."""
        return 1.0 if self._parts.engine is None else self._parts.engine.loss_scale

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self.fp16_enabled() and not self._job.scaling.static

    def optimizer_name(self) -> str | None:
        """The optimizer of the JSON, in small letters."""
        return None if self._job.optimizer is None else self._job.optimizer.name.lower()

    def optimizer_params(self) -> dict[str, Any] | None:
        """The keywords of the optimizer in the JSON."""
        return None if self._job.optimizer is None else dict(self._job.optimizer.params)

    def scheduler_name(self) -> str | None:
        """The schedule of the JSON."""
        return None if self._job.schedule is None else self._job.schedule.name

    def scheduler_params(self) -> dict[str, Any] | None:
        """The keywords of the schedule in the JSON."""
        return None if self._job.schedule is None else dict(self._job.schedule.params)

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Modules whose gradients travel as sparse tensors: none do."""
        return set()

    def empty_partition_cache(self) -> None:
        """Nothing to do: gathered parameters are freed as soon as they were used."""

    def get_lr(self) -> list[float]:
        """The learning rate of each group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """The momentum, or the betas, of each group."""
        return self._of_groups("momentum" if self.optimizer_name() in _BY_MOMENTUM else "betas")

    def get_type(self) -> list[Any]:
        """The type of each group, where the script has given one."""
        return self._of_groups("type")

    def _engine(self, call: str) -> sw.Engine:
        if self._parts.engine is None:
            raise UsageError(
                f"engine.{call}() without an optimizer, or after destroy(): give initialize an "
                "optimizer, or name one in the JSON."
            )
        return self._parts.engine

    def _of_groups(self, name: str) -> list[Any]:
        if self.optimizer is None:
            return []
        return [group.get(name, 0.0) for group in self.optimizer.param_groups]


_BY_MOMENTUM = ("sgd", "rmsprop")
