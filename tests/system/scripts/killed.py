"""Rank 1 is killed as the out-of-memory killer does it; rank 0 goes on."""

import os
import signal
import time

if os.environ["SHARDWISE_LAUNCH_RANK"] == "1":
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
