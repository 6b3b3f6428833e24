"""A drop-in for `import horovod.torch as hvd`: write `import shardwise.horovod as hvd`.

requests.py      what ranks ask for by name, and whether it is the same
coordinator.py   who has asked for what, and what all do next
links.py         the connections over which they say so
background.py    the thread that negotiates and communicates
operations.py    how each operation is done with a transport's verbs; adasum.py
handles.py       operations on their way; streams.py on an accelerator; stall.py waits too long

joining.py       init, shutdown; context.py  what there is between them
queries.py       who a rank is; process_sets.py
timelines.py     started and stopped by a script; samples.py  counted for `shardwise scale`
asking.py        from a call to a handle
allreduce.py allgather.py broadcast.py alltoall.py reducescatter.py waiting.py objects.py
sparse_allreduce.py optimizer_states.py

mpi_ops.py functions.py   what scripts import from Horovod's modules of these names
standing_in.py            `import horovod` in code that is not to be changed
"""

from shardwise.horovod import elastic, mpi_ops
from shardwise.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from shardwise.horovod.mpi_ops import *  # noqa: F403 (its __all__ is what it gives)
from shardwise.horovod.optimizer import DistributedOptimizer
from shardwise.horovod.standing_in import install_as_horovod
from shardwise.horovod.sync_batch_norm import SyncBatchNorm

__all__ = [
    "DistributedOptimizer",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "install_as_horovod",
]
__all__ += mpi_ops.__all__

__version__ = "0.28.1"
"""The version of Horovod whose calls these are, for code that asks."""
