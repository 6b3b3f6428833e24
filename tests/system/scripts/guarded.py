"""Two ranks that meet while somebody else tries to; they wait for files in the folder given.

Rank 1 comes once `tried` is there, and both go on until `disturbed` is.
"""

import os
import sys
import time
from pathlib import Path

import torch

import shardwise as sw
import shardwise.horovod as hvd

folder = Path(sys.argv[1])
while os.environ["SHARDWISE_LAUNCH_RANK"] == "1" and not (folder / "tried").exists():
    time.sleep(0.05)
torch.set_num_threads(1)
world = sw.init(seed=0)
hvd.init()
while not world.any((folder / "disturbed").exists()):
    time.sleep(0.05)
said = hvd.broadcast_object({"by": world.rank}, root_rank=1)
world.print(world.gather(world.rank), said, world.sum(torch.ones(1)).item())
