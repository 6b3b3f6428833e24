"""Lets a run continue after workers are lost, with `--survive` (docs/recovery.md).

    membership.py   decides who is left, and whether the ranks finish a pending step
    agreement.py    ranks exchange reports until all remaining ranks know the same decision
    admission.py    lets spares join between two steps
    connecting.py   connects the remaining ranks, over a new store and a new transport
    replaceable.py  groups whose transport is replaced after a loss
    group.py        the group of all remaining ranks
    lost_hosts.py   closes the connections to lost hosts

A killed process closes its sockets. A rank that loses another one closes its transport at once, so
that every other rank notices too. All remaining ranks then report to the first of them, which
decides. That rank also hosts a new store, over which they create a new transport.

A process on the same host has ended if it is not in /proc. The launcher reports ranks of other
hosts that have ended. It alone does so, so the ranks cannot split into two groups.

Elastic islands (islands/elastic/membership.py) need no such agreement: all their data passes
through a broker in the launcher, which alone decides who takes part in an exchange. Without a
broker, ranks that lose another one at different times must first agree.
"""

from shardwise.comm.survivors.group import Loss, SurvivorGroup, copied_places
from shardwise.comm.survivors.membership import Decision, Divisions, Report, holders, stands

__all__ = [
    "Decision",
    "Divisions",
    "Loss",
    "Report",
    "SurvivorGroup",
    "copied_places",
    "holders",
    "stands",
]
