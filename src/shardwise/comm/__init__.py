"""Transports that run collectives over flat buffers.

This package is the only caller of torch.distributed's collectives.

    base.py             the transport interface, its handles, and `Solo`, the one-rank transport
    gloo.py             CPU ranks, over Gloo's point-to-point messages
    shared_memory.py    CPU ranks on one host, through memory that all of them map
    hierarchical.py     CPU ranks on several hosts: shared memory within a host, Gloo between hosts
    nccl.py             CUDA ranks, over NCCL's collectives
    abortable_nccl.py   the same with `--survive`: a lost rank does not block the others
    survivors/          the group of a run with `--survive`, which replaces its transport when
                        ranks are lost
    host_staged.py      CUDA ranks that share a GPU, over Gloo through host memory
    hybrid_shard.py     sharding within a host, replication across hosts
    connect.py          chooses a process's transport and connects it to the other ranks
    gather_order.py     runs the collectives of forward and backward passes in the same order on all
                        ranks
    agreed_order.py     agrees on this order

    mismatched_calls.py detects ranks that are in different collectives
    ordered_sums.py     sums in rank order, or in the reduction tree of the exact mode
    torch_backend.py    subgroups and error messages, for both Gloo and NCCL
    gloo_exchange.py    exchanges the messages of one call over Gloo
    gloo_messages.py    describes and tags these messages
    shared_work.py      pending calls between ranks that share memory
    shared_buffers.py   publishes buffers in shared memory
    arena.py            allocates the shared memory
    socket_mesh.py      sockets between ranks that share memory
    progress_thread.py  threads that start Gloo's messages or wait for them
    same_host.py        detects which ranks are on the same host

A flat buffer is divided into one interval per rank by `cuts`, a list of size + 1 ascending offsets:
rank r owns [cuts[r], cuts[r + 1]). Intervals may differ in length and may be empty. Every rank
makes the same calls in the same order.
"""

from shardwise.comm.arena import share_again
from shardwise.comm.base import Collectives, Cuts, GroupRanks, Handle, Solo
from shardwise.comm.connect import (
    OnMeeting,
    address_of,
    check_all,
    connect,
    disconnect,
    for_thread,
    place,
    wait_alone,
)
from shardwise.comm.gather_order import GatherOrder
from shardwise.comm.gloo import Gloo
from shardwise.comm.hierarchical import Hierarchical
from shardwise.comm.host_staged import HostStaged
from shardwise.comm.hybrid_shard import shard_within_hosts
from shardwise.comm.nccl import Nccl
from shardwise.comm.ordered_sums import Sum
from shardwise.comm.same_host import host_key, ranks_by_host
from shardwise.comm.shared_memory import SharedMemory
from shardwise.comm.survivors import Divisions, Loss, SurvivorGroup, copied_places, holders
from shardwise.net.torchrun_store import exposed

__all__ = [
    "Collectives",
    "Cuts",
    "Divisions",
    "GatherOrder",
    "Gloo",
    "GroupRanks",
    "Handle",
    "Hierarchical",
    "HostStaged",
    "Loss",
    "Nccl",
    "OnMeeting",
    "SharedMemory",
    "Solo",
    "Sum",
    "SurvivorGroup",
    "address_of",
    "check_all",
    "connect",
    "copied_places",
    "disconnect",
    "exposed",
    "for_thread",
    "holders",
    "host_key",
    "place",
    "ranks_by_host",
    "shard_within_hosts",
    "share_again",
    "wait_alone",
]
