"""Five steps under Ray: `SHARDWISE_ZERO=3 python examples/ray_train.py --workers 2`.

    pip install "ray[train]"
    SHARDWISE_ZERO=3 python examples/ray_train.py --workers 2

Ray's TorchTrainer starts the workers and keeps the engine's checkpoints. It prints the loss of the
last step and the path of the checkpoint. The losses equal those of examples/same_losses.py, which
trains the same model.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import shardwise as sw
from same_losses import CONTEXT, dataset


def train(config: dict[str, Any]) -> None:
    """Train, on each of Ray's workers."""
    world = sw.init(seed=0, quiet=True)
    model = nn.Sequential(
        nn.Embedding(128, 16),
        nn.Flatten(),
        nn.Linear(CONTEXT * 16, 64),
        nn.Tanh(),
        nn.Linear(64, 128),
    ).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = sw.Engine(model, optimizer)
    loader = sw.Loader(dataset(), batch_size=250, shuffle=True)
    engine.track(loader=loader)
    if (last := ray.train.get_checkpoint()) is not None:  # Ray has restarted the workers
        with last.as_directory() as folder:
            engine.load(folder)
    for step in loader.steps():
        for x, y in step:
            engine.backward(nn.functional.cross_entropy(model(x), y))
        stats = engine.step(max_norm=1.0)
        # All ranks write one checkpoint together, so only the main rank reports it. But Ray needs
        # a report from every rank.
        saved = engine.save(config["folder"], keep=1)
        checkpoint = Checkpoint.from_directory(saved) if world.is_main else None
        metrics = {"step": engine.steps, "loss": stats.loss, "placement": engine.placement.name}
        ray.train.report(metrics, checkpoint=checkpoint)
        if engine.steps == config["steps"]:
            break


def main() -> None:
    """Start the workers, and print the report of the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--folder", default="runs/ray", help="a folder that all hosts share")
    given = parser.parse_args()
    folder = Path(given.folder).resolve()
    # Ray does not pass the driver's environment variables to its workers.
    settings = {name: value for name, value in os.environ.items() if name.startswith("SHARDWISE_")}
    ray.init(runtime_env={"env_vars": settings})
    result = TorchTrainer(
        train,
        train_loop_config={"steps": given.steps, "folder": str(folder / "saved")},
        scaling_config=ScalingConfig(
            num_workers=given.workers, use_gpu=torch.cuda.device_count() > 0
        ),
        run_config=RunConfig(
            name="train", storage_path=str(folder), failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    print(f"step {result.metrics['step']}  loss {result.metrics['loss']:.12f}")
    print(f"checkpoint {result.checkpoint.path}")


if __name__ == "__main__":
    main()
