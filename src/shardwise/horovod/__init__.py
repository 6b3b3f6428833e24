"""A drop-in for `import horovod.torch as hvd`: write `import shardwise.horovod as hvd`.

The path of an allreduce:

    gradient_buckets.py  a hook fills a bucket and launches it      any thread
    operations.py        submit: a request and a handle             any thread
    background.py        the communication thread sends the request ─▶ rank 0
    coordinator.py       rank 0 matches the requests of all ranks   ─▶ a response to all
    execution.py         runs the agreed operation on a transport   communication thread
    operations.py        wait: the handle returns the result        any thread

links.py connects the ranks, and streams.py orders CUDA work between threads.

basics.py            init, shutdown, rank, size, join, barrier
context.py           this rank's state between init and shutdown
process_sets.py      groups of ranks
allreduce.py         reductions of dense tensors
sparse_allreduce.py  reductions of sparse COO tensors
gather_scatter.py    allgather, alltoall, broadcast, reducescatter
optimizer.py         DistributedOptimizer
script_checks.py     warnings about steps that a script omits, and about stalls
functions.py compression.py elastic.py mpi_ops.py sync_batch_norm.py   as in Horovod
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
from shardwise.horovod.mpi_ops import *  # noqa: F403 (limited by its __all__)
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
"""The version of Horovod whose API this package implements, for code that checks it."""
