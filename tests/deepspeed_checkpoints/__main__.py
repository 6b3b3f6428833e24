"""Write the small DeepSpeed checkpoints that the tests read.

    python -m tests.deepspeed_checkpoints [NAME ...]

Each is a folder here: the files of `save_checkpoint` after some steps, and `losses.json` with the
losses of the steps that DeepSpeed trained afterwards. It needs deepspeed, and runs on the CPU. The
scripts that DeepSpeed copies next to its files are removed.
"""

import json
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch import distributed as dist

from tests import deepspeed_checkpoints as small

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

CASES = {
    "stage0": (1, "fp32", {"stage": 0}),
    "stage1": (2, "fp32", {"stage": 1}),
    "stage2": (3, "fp32", {"stage": 2}),
    "stage2-round-robin": (2, "fp32", {"stage": 2, "round_robin_gradients": True}),
    "stage3": (2, "fp32", {"stage": 3}),
    "stage3-groups": (3, "fp32", {"stage": 3, "sub_group_size": 20}),
    "stage0-bf16": (2, "bf16", {"stage": 0}),
    "stage1-bf16": (2, "bf16", {"stage": 1}),
    "stage2-bf16": (2, "bf16", {"stage": 2}),
    "stage3-bf16": (2, "bf16", {"stage": 3}),
    "stage0-fp16": (2, "fp16", {"stage": 0}),
    "stage2-fp16": (2, "fp16", {"stage": 2}),
    "stage3-fp16": (2, "fp16", {"stage": 3}),
}
"""Number of ranks, precision and ZeRO settings, by name."""


def config_of(size: int, precision: str, zero: dict) -> dict:
    """Return the JSON configuration for DeepSpeed."""
    config = {
        "train_micro_batch_size_per_gpu": small.ROWS // size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config[precision] |= {"initial_scale_power": 8, "loss_scale_window": 2}
    return config


def train(rank: int, name: str, folder: str, meeting: str) -> None:
    """Train one rank of one case."""
    size, precision, zero = CASES[name]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import deepspeed

    # DeepSpeed refuses fp16 on the CPU, although torch has all that this model needs.
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, verbose=False
    )
    model = small.made()
    optimizer = small.optimizer_of(model)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=small.scheduler_of(optimizer),
        config=config_of(size, precision, zero),
    )
    losses = []
    for step in range(small.STEPS + small.MORE):
        if step == small.STEPS:
            engine.save_checkpoint(folder, client_state={"epoch": 1, "best": 0.5, "words": ("a",)})
        x, y = small.batch(step, rank, size)
        loss = (engine(x.to(PRECISIONS[precision])).float() - y).square().mean()
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / size)
    if rank == 0:
        said = {"losses": losses[small.STEPS :], "ranks": size, "precision": precision}
        Path(folder, "losses.json").write_text(json.dumps(said, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def make(name: str) -> None:
    """Write the checkpoint `name`, replacing an older one."""
    folder = small.HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as aside:
        mp.spawn(train, (name, str(folder), f"{aside}/meeting"), nprocs=CASES[name][0])
    for script in ("zero_to_fp32.py", "zero_to_torch.py"):
        with suppress(FileNotFoundError):
            (folder / script).unlink()
    print(name, sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()), "bytes")


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    for each in sys.argv[1:] or CASES:
        make(each)
