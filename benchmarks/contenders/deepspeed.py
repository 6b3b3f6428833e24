"""DeepSpeed's ZeRO stages on the CPU over Gloo, with torch's AdamW as the client optimizer.

Its own CPU Adam is compiled when it is first used; with torch's, every contender runs the same
update, and none needs a compiler.
"""

import os

import deepspeed
from torch import Tensor

from job import Job, Step


def build(job: Job, *, stage: int) -> Step:
    os.environ |= {
        "RANK": str(job.rank),
        "LOCAL_RANK": str(job.rank),
        "WORLD_SIZE": str(job.size),
    }
    job.join_torch()
    deepspeed.init_distributed(dist_backend="gloo")
    model = job.model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=job.optimizer(model.parameters()),
        config=_config(stage, job.workload.batch // job.size),
    )

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = job.loss(engine, inputs, targets)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def _config(stage: int, rows: int) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # left out, it clips at 1 and trains another model than the rest
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
