"""Rank 0 dies like a rank that torch's NCCL watchdog kills. Rank 1 never makes the call."""

import os
import sys
import time
from pathlib import Path

if os.environ["RANK"] == "0":
    sys.stderr.write(Path(__file__).with_name("nccl_watchdog.txt").read_text())
    sys.stderr.flush()
    os.abort()
time.sleep(60)
