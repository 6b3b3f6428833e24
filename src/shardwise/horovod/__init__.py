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
"""

from shardwise.errors import HorovodInternalError
from shardwise.horovod import elastic
from shardwise.horovod.allgather import (
    allgather,
    allgather_async,
    grouped_allgather,
    grouped_allgather_async,
)
from shardwise.horovod.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from shardwise.horovod.alltoall import alltoall, alltoall_async
from shardwise.horovod.asking import ReduceOp
from shardwise.horovod.asking import wait as synchronize
from shardwise.horovod.broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from shardwise.horovod.compression import Compression
from shardwise.horovod.context import is_initialized
from shardwise.horovod.handles import poll
from shardwise.horovod.joining import init, shutdown
from shardwise.horovod.objects import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from shardwise.horovod.optimizer import DistributedOptimizer
from shardwise.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from shardwise.horovod.queries import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    size,
)
from shardwise.horovod.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from shardwise.horovod.sync_batch_norm import SyncBatchNorm
from shardwise.horovod.timelines import start_timeline, stop_timeline
from shardwise.horovod.waiting import barrier, join

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product
