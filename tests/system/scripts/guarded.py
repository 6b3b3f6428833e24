"""Two ranks that meet while an intruder tries to. They wait for files in the given folder.

Rank 1 starts once `tried` exists. Both continue once `disturbed` exists.
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
