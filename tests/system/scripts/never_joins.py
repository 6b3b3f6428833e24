"""Rank 1 of mpirun fails before it joins; rank 0 waits for it."""

import os
import time

if "1" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK")):
    time.sleep(0.5)
    raise SystemExit("rank 1 has no data")

import shardwise as sw

sw.init()
