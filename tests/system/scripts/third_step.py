"""Rank 1 raises in its third step; the others keep working."""

import os
import time

RANK = int(os.environ["SHARDWISE_LAUNCH_RANK"])


def train_one_step(step: int) -> None:
    if RANK == 1 and step == 3:
        raise ValueError(f"no such token in step {step}")
    print(f"step {step}")
    time.sleep(0.05)


for step in range(1, 2000):
    train_one_step(step)
