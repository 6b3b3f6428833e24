"""Rank 0 draws a bar if it has a terminal. Rank 1 prints a line while the bar is shown."""

import os
import sys
import time
from pathlib import Path

HALF_WAY, SAID = Path("half_way"), Path("said")


def wait_for(file: Path) -> None:
    """The ranks meet by files: sleeping alone says nothing on a busy machine."""
    while not file.exists():
        time.sleep(0.02)


if os.environ["SHARDWISE_LAUNCH_RANK"] == "0":
    print(f"terminal {sys.stdout.isatty()} {os.get_terminal_size(1).columns}")
    for step in range(1, 9):
        sys.stdout.write(f"\r\x1b[2Kbar {step}")
        sys.stdout.flush()
        if step == 4:
            time.sleep(0.2)
            HALF_WAY.touch()
            wait_for(SAID)
            time.sleep(0.5)
    print()
else:
    print(f"terminal {sys.stdout.isatty()} {os.environ['COLUMNS']}")
    wait_for(HALF_WAY)
    print("hello")
    SAID.touch()
