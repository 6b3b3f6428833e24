"""Transports, which run collectives over flat buffers.

This package is the only caller of torch.distributed's collectives.

    base.py             the verbs of a transport, its handles, how to add one; Solo, of one rank
    gloo.py             CPU ranks, by Gloo's point-to-point messages
    shared_memory.py    CPU ranks of one host, through memory that all of them map
    hierarchical.py     CPU ranks of several hosts: shared memory inside a host, Gloo between
    nccl.py             CUDA ranks, by NCCL's collectives
    host_staged.py      CUDA ranks that share a GPU, by Gloo through host memory
    hybrid_shard.py     sharded inside a host, replicated between hosts
    connect.py          chooses the transport of a process and joins it
    gather_order.py     runs collectives inside forwards and backwards in one order on all ranks
    agreed_order.py     the list of entries that defines this order

    mismatched_calls.py detects ranks in different collectives at one call
    ordered_sums.py     sums in rank order, or in the tree of the exact mode
    torch_backend.py    shared by Gloo and NCCL: subgroups, and their errors in words
    gloo_exchange.py    the messages of one call over Gloo, and their tags: gloo_messages.py
    shared_work.py      calls in flight between ranks that share memory
    shared_buffers.py   puts their buffers into the memory of arena.py
    socket_mesh.py      the sockets between them
    progress_thread.py  a thread that starts Gloo's messages, or waits for them
    same_host.py        finds out which ranks are on one host

A flat buffer is cut into one interval per rank by `cuts`, size + 1 ascending offsets, so that
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
from shardwise.net.torchrun_store import exposed

__all__ = [
    "Collectives",
    "Cuts",
    "GatherOrder",
    "Gloo",
    "GroupRanks",
    "Handle",
    "Hierarchical",
    "HostStaged",
    "Nccl",
    "OnMeeting",
    "SharedMemory",
    "Solo",
    "Sum",
    "address_of",
    "check_all",
    "connect",
    "disconnect",
    "exposed",
    "for_thread",
    "host_key",
    "place",
    "ranks_by_host",
    "shard_within_hosts",
    "share_again",
]
