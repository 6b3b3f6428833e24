"""python leaves.py RANK HOW: RANK leaves at once; the others join the run, or go on alone."""

import os
import sys
import time

if os.environ["RANK"] == sys.argv[1]:
    raise SystemExit(0)
if sys.argv[2] == "joins":
    import shardwise as sw

    sw.init(seed=0)
time.sleep(0.5)  # the other rank has exited during this time
print("done")
