"""The same ranks over channels of their own, for another thread of each process.

A transport belongs to one thread: whoever waits on it moves all of its calls. What shares memory
is therefore made anew, over channels and memory that nobody else uses.
"""

from __future__ import annotations

from shardwise.collectives.base import Collectives
from shardwise.collectives.hierarchical import Spanning
from shardwise.collectives.host_staged import Staged
from shardwise.collectives.same_host import share_memory
from shardwise.collectives.shared_memory import Shared


def for_thread(group: Collectives, timeout: float) -> Collectives:
    """The ranks of `group`, all of the run, as another thread may use them beside. Collective;
    `timeout` in seconds bounds every wait."""
    if isinstance(group, Staged):
        return Staged(for_thread(group.inner, timeout), group.device)
    if isinstance(group, Shared | Spanning):
        assert group.under is not None
        return share_memory(group.under.second_group(), timeout, required=False)
    return group.second_group()
