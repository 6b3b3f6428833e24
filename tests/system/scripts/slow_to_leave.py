"""Both ranks raise; the first to do so is the last to be gone."""

import atexit
import time

import shardwise as sw

world = sw.init(seed=0, device="cpu")
if world.rank == 0:
    atexit.register(time.sleep, 60)
else:
    time.sleep(1)
raise ValueError("no such token")
