"""A drop-in for `import horovod.torch as hvd`: write `import shardwise.horovod as hvd`.

coordinator.py      matches requests on rank 0: what every rank executes next
links.py            carries requests and responses; background.py  the thread that negotiates
execution.py        executes agreed operations on a transport; streams.py  orders CUDA work

basics.py           init, shutdown, rank, size, join, barrier; context.py  the state between
process_sets.py     groups of ranks
operations.py       requests an operation; operation_handle.py  waits for it
allreduce.py        dense tensors; sparse_allreduce.py  sparse COO tensors
gather_scatter.py   allgather, alltoall, broadcast, reducescatter

optimizer.py        DistributedOptimizer; gradient_hooks.py and buckets.py reduce its gradients
script_checks.py    warns of left-out steps and of stalls
functions.py compression.py elastic.py mpi_ops.py sync_batch_norm.py   Horovod's own module names
"""

from shardwise.horovod import elastic, mpi_ops
from shardwise.horovod.basics import install_as_horovod
from shardwise.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from shardwise.horovod.mpi_ops import *  # noqa: F403 (its __all__ is what it gives)
from shardwise.horovod.optimizer import DistributedOptimizer
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
