"""Rank 1 raises in its third step while the others wait for it in a collective."""

import shardwise as sw

world = sw.init(seed=0)
for step in range(1, 6):
    if world.rank == 1 and step == 3:
        raise ValueError(f"no such token in step {step}")
    world.barrier()
