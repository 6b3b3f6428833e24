"""The rank that is named stands still before it joins the others."""

import os
import signal
import sys

if os.environ["SHARDWISE_LAUNCH_RANK"] == sys.argv[1]:
    os.kill(os.getpid(), signal.SIGSTOP)

import shardwise as sw

sw.init()
