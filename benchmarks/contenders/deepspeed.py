"""DeepSpeed's ZeRO stages with torch's AdamW as the client optimizer: on GPUs over NCCL, on the CPU
over Gloo; and the same calls and JSON through shardwise.deepspeed.

DeepSpeed compiles its own CPU Adam at its first use. With torch's, every contender runs the same
update, and none needs a compiler.
"""

import os
from importlib import import_module

from torch import Tensor

from job import Job, Step


def build(job: Job, *, stage: int, library: str = "deepspeed") -> Step:
    """`library` is the module with DeepSpeed's interface."""
    deepspeed = import_module(library)
    if library == "deepspeed":
        os.environ |= job.launched()
        job.join_torch()
    else:
        from contenders.ours import name_rank

        name_rank(job)
        os.environ |= {"SHARDWISE_QUIET": "on", "SHARDWISE_DEVICE": str(job.setting.device)}
    deepspeed.init_distributed(dist_backend="nccl" if job.on_gpu else "gloo")
    model = job.model()
    job.compile(model)
    config = {
        "train_micro_batch_size_per_gpu": job.workload.batch // job.size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": job.max_norm or 0.0,  # without the key it would clip at 1
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # Under "bf16-mixed" the loss has an autocast; DeepSpeed's parameters are fp32.
        "bf16": {"enabled": job.setting.precision == "bf16"},
    }
    optimizer = job.optimizer(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = job.loss(engine, inputs, targets)
        engine.backward(loss)
        engine.step()
        return loss

    return step
