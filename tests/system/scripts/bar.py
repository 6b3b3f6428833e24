"""Rank 0 draws a bar where it sees a terminal; rank 1 prints a line in the middle of it."""

import os
import sys
import time

if os.environ["SHARDWISE_LAUNCH_RANK"] == "0":
    print(f"terminal {sys.stdout.isatty()} {os.get_terminal_size(1).columns}")
    for step in range(1, 9):
        sys.stdout.write(f"\r\x1b[2Kbar {step}")
        sys.stdout.flush()
        time.sleep(0.1)
    print()
else:
    print(f"terminal {sys.stdout.isatty()} {os.environ['COLUMNS']}")
    time.sleep(0.4)
    print("hello")
