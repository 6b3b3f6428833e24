"""Rank 1 leaves in peace; the others wait for it in a barrier."""

import shardwise as sw

world = sw.init(seed=0)
world.barrier()
if world.rank == 1:
    raise SystemExit(0)
world.barrier()
