"""Contenders of plain PyTorch: one process, and torch's own ways to train on several ranks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

import models
from job import Job, Step

ONE_BUCKET = 10_000
"""MB, more than the gradients have."""


def plain(job: Job, *, recomputed: bool = False) -> Step:
    """One process on the whole batch, with one thread on the CPU: the limit is taken from it."""
    model = job.plain_model()
    if recomputed:
        models.recompute(model)
    return job.plain_step(model, job.optimizer(model.parameters()))


def apart(job: Job) -> Step:
    """The ranks' own work and nothing else: forward and backward on their rows, and the update of
    their part of the parameters. No exchange can be faster on memory that the ranks share."""
    model = job.model()
    # About 1/size of the elements: the largest parameters first, each to the rank with the least.
    parts: list[list[nn.Parameter]] = [[] for _ in range(job.size)]
    loads = [0] * job.size
    for parameter in sorted(model.parameters(), key=lambda p: -p.numel()):
        least = loads.index(min(loads))
        parts[least].append(parameter)
        loads[least] += parameter.numel()
    # The other parameters have gradients too, which this optimizer does not clear.
    return job.plain_step(model, job.optimizer(parts[job.rank]), clear=model.zero_grad)


def _ddp_model(job: Job, **options: object) -> DistributedDataParallel:
    """DDP with gradients as views of its buckets, its faster setting."""
    job.join_torch()
    return DistributedDataParallel(
        job.plain_model(),
        device_ids=[job.device.index] if job.on_gpu else None,
        gradient_as_bucket_view=True,
        **options,
    )


def ddp(job: Job) -> Step:
    """DistributedDataParallel."""
    model = _ddp_model(job)
    return job.plain_step(model, job.optimizer(model.parameters()))


def zero_redundancy(job: Job) -> Step:
    """DDP with ZeroRedundancyOptimizer: optimizer state sharded by whole parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = _ddp_model(job)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        parameters_as_bucket_view=True,
        **job.hyperparameters,
    )
    return job.plain_step(model, optimizer)


def fsdp2(
    job: Job,
    *,
    reshard: bool,
    offload: bool = False,
    own_cast: bool = False,
) -> Step:
    """FSDP2, one unit per block; parameters freed after forward, or kept until backward.

    With `offload`, parameters, gradients and optimizer state are in the host's pinned memory, where
    they are updated. In bf16 the sharded parameters and the sums are fp32, as ours are. `own_cast`
    replaces autocast in bf16-mixed by FSDP2's own cast of gathered parameters, its faster setting.
    """
    job.join_torch()
    mesh = init_device_mesh(job.setting.device, (job.size,))
    model = job.model()
    job.compile(model)
    policy = MixedPrecisionPolicy()
    own_cast = own_cast and job.setting.precision == "bf16-mixed"
    if job.setting.precision == "bf16" or own_cast:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        _halve_buffers(model)
    where = CPUOffloadPolicy() if offload else OffloadPolicy()
    for unit in [*models.blocks(model), model]:
        fully_shard(
            unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=where
        )
    optimizer = job.optimizer(model.parameters())
    return job.plain_step(model, optimizer, loss_of=models.loss_of if own_cast else None)


def _halve_buffers(model: nn.Module) -> None:
    """Convert running statistics to bf16: FSDP2 leaves buffers as they are, and torch's BatchNorm
    refuses buffers whose dtype differs from its weights'."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(torch.bfloat16))


def power_sgd(job: Job, *, rank: int) -> Step:
    """DDP with its PowerSGD hook: each gradient as two matrices of a low rank, with feedback."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
        PowerSGDState,
        powerSGD_hook,
    )

    # One bucket: with several, the hook calls its collectives in the order in which earlier ones
    # end, which over Gloo is not the same on all ranks.
    model = _ddp_model(job, bucket_cap_mb=ONE_BUCKET)
    # With error feedback 2 is the first step that may be compressed.
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook)
    return job.plain_step(model, job.optimizer(model.parameters()))


def post_local_sgd(job: Job, *, every: int) -> Step:
    """torch's PostLocalSGD: DDP whose hook leaves gradients with the rank, and the mean of
    parameters every `every` steps."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = _ddp_model(job)
    alone, _ = dist.new_subgroups(group_size=1)
    state = PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=0)
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=every, warmup_steps=0)
    # It averages when its count of steps is a multiple of the period; from 0 it would in the first.
    averager.step = 1
    return job.plain_step(model, PostLocalSGDOptimizer(job.optimizer(model.parameters()), averager))


class _Part(nn.Module):
    """Some blocks of the GPT; the first part has the embeddings, the last one norm and head."""

    def __init__(self, model: models.GptModel, rank: int, size: int) -> None:
        super().__init__()
        each = len(model.blocks) // size
        self.blocks = model.blocks[rank * each : (rank + 1) * each]
        self.tokens = model.tokens if rank == 0 else None
        self.positions = model.positions if rank == 0 else None
        self.norm = model.norm if rank == size - 1 else None
        self.head = model.head if rank == size - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def pipeline(job: Job, *, schedule: str, microbatches: int) -> Step:
    """torch.distributed.pipelining by hand: the GPT in stages of equal blocks."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    job.join_torch()
    model = job.model()
    assert isinstance(model, models.GptModel)
    part = _Part(model, job.rank, job.size)
    stage = PipelineStage(part, job.rank, job.size, torch.device("cpu"))
    run = get_schedule_class(schedule)(stage, microbatches, loss_fn=models.cross_entropy)
    optimizer = job.optimizer(part.parameters())
    last = job.rank == job.size - 1

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        run.step(
            *([inputs] if job.rank == 0 else []), target=targets if last else None, losses=losses
        )
        optimizer.step()
        loss = torch.stack(losses).mean().detach() if last else torch.zeros(())
        dist.broadcast(loss, job.size - 1)  # every loop that logs the loss does this
        return loss

    return step
