"""Say something on both streams, and something without a newline at the end."""

import os
import sys

rank = os.environ["SHARDWISE_LAUNCH_RANK"]
print(f"out {rank}")
print(f"err {rank}", file=sys.stderr)
print(f"last {rank}", end="")
