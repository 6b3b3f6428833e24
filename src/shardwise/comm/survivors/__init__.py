"""Lets a run continue after workers are lost, with `--survive` (docs/faults.md).

    membership.py   decides who is left and which step stands: pure arithmetic
    agreement.py    ranks exchange reports until all that are left know the same decision
    connecting.py   connects them, over a new store and a new transport
    group.py        the group whose transport is replaced after a loss
    fence.py        kills ranks that are stopped for long

A rank that loses another one closes its transport at once, so that every other rank notices too.
All that are left then report to the lowest of them, which decides. They meet in a new store of that
rank, and create a new transport.
"""

from shardwise.comm.survivors.group import Loss, SurvivorGroup
from shardwise.comm.survivors.membership import Decision, Report, holders, stands

__all__ = ["Decision", "Loss", "Report", "SurvivorGroup", "holders", "stands"]
