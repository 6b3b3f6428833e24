"""Rank 1 asks for more and more memory; rank 0 goes on."""

import os
import time

held = []
while os.environ["SHARDWISE_LAUNCH_RANK"] == "1":
    held.append(b"x" * (16 << 20))
time.sleep(60)
