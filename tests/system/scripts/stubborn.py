"""Rank 0 fails; rank 1 ignores every polite request to end."""

import os
import signal
import sys
import time

if os.environ["SHARDWISE_LAUNCH_RANK"] == "0":
    time.sleep(0.3)
    sys.exit(7)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
