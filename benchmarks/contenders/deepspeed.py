"""DeepSpeed's ZeRO stages with torch's AdamW as the client optimizer: on GPUs over NCCL, on the CPU
over Gloo; and the same calls and JSON through shardwise.deepspeed.

Its own CPU Adam is compiled when it is first used; with torch's, every contender runs the same
update, and none needs a compiler.
"""

import os
from importlib import import_module
from typing import Any

from torch import Tensor

from job import Job, Step


def build(job: Job, *, stage: int, offload: str = "none", library: str = "deepspeed") -> Step:
    """`offload` is where the optimizer state rests: none, cpu or nvme:FOLDER. `library` is the
    module with DeepSpeed's interface."""
    deepspeed = import_module(library)
    if library == "deepspeed":
        if offload.startswith("nvme"):
            _check_async_io()
        os.environ |= job.launched()
        job.join_torch()
    else:
        _name_rank(job)
    deepspeed.init_distributed(dist_backend="nccl" if job.on_gpu else "gloo")
    model = job.model()
    job.compile(model)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=job.optimizer(model.parameters()),
        config=_config(stage, job, offload),
    )

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = job.loss(engine, inputs, targets)
        engine.backward(loss)
        with job.updating():
            engine.step()
        return loss

    return step


def _name_rank(job: Job) -> None:
    """Set the variables by which shardwise.deepspeed knows who it is, and where it computes."""
    from contenders.shardwise import identity
    from shardwise.net import environment

    os.environ |= environment.identity_variables(identity(job))
    os.environ |= {"SHARDWISE_QUIET": "on", "SHARDWISE_DEVICE": str(job.setting.device)}


def _check_async_io() -> None:
    """Its operator for disks is compiled when it is first used; say now if it cannot be."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        raise ModuleNotFoundError(name="its async_io, built from libaio's headers by a compiler")


def _config(stage: int, job: Job, offload: str) -> dict[str, Any]:
    zero: dict[str, object] = {"stage": stage}
    kind, _, folder = offload.partition(":")
    if kind != "none":
        zero["offload_optimizer"] = {"device": kind, "pin_memory": job.on_gpu}
    if folder:
        # Read ahead and written behind; without, each would wait for the other.
        zero["offload_optimizer"] |= {
            "nvme_path": folder,
            "pipeline_read": True,
            "pipeline_write": True,
        }
    return {
        "train_micro_batch_size_per_gpu": job.workload.batch // job.size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": job.max_norm or 0.0,  # left out, it would clip at 1
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # Under "bf16-mixed" it is the loss that has an autocast; its parameters are fp32.
        "bf16": {"enabled": job.setting.precision == "bf16"},
    }
