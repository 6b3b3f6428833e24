"""The one seam to the other ranks: the only caller of torch.distributed's collectives.

    base.py    the verbs, and Solo, the group of one
    gloo.py    CPU ranks, by Gloo's point-to-point messages
    shared.py  CPU ranks of one host, through memory that all map
    spanning.py CPU ranks of several hosts: shared memory inside, Gloo between
    nccl.py    CUDA ranks, by NCCL's collectives
    staged.py  CUDA ranks that share a GPU, by Gloo's through the host
    within.py  sharded inside a host, replicated between hosts
    threads.py the same for another thread
    gather_order.py what ranks do together inside forwards and backwards; turns.py in which order
    connect.py which of them a process joins, and how

    sums.py    sums in rank order
    wire.py    what Gloo and NCCL share
    messages.py what is sent over Gloo, and under which tag
    pieces.py  buffers of which parts lie elsewhere
    flights.py calls on their way between ranks that share memory
    mesh.py    the sockets between them
    arena.py   the memory
    host.py    which ranks are on one host
    courier.py who starts Gloo's messages, and waits for them
    listeners.py what Gloo listens on, shut once its ranks are connected
    roster.py  which ranks of the run a group has
    meeting.py how ranks find rank 0 and prove who they are; by_torch.py where torchrun has a store
    table.py   what rank 0 keeps for them until they can talk

A flat buffer is cut into one interval per rank by `cuts`, size + 1 ascending offsets, so that
rank r owns [cuts[r], cuts[r + 1]). Intervals may differ in length and may be empty. Every rank
makes the same calls in the same order.
"""

from shardwise.collectives.base import Collectives, Cuts, Handle, Solo
from shardwise.collectives.connect import OnMeeting, address_of, connect, disconnect
from shardwise.collectives.gather_order import GatherOrder
from shardwise.collectives.gloo import Gloo
from shardwise.collectives.hierarchical import Spanning
from shardwise.collectives.host_staged import Staged
from shardwise.collectives.hybrid_shard import within_hosts
from shardwise.collectives.nccl import Nccl
from shardwise.collectives.ordered_sums import Sum
from shardwise.collectives.same_host import key as host_key
from shardwise.collectives.shared_memory import Shared
from shardwise.collectives.threads import for_thread
from shardwise.collectives.torchrun_store import exposed

__all__ = [
    "Collectives",
    "Cuts",
    "GatherOrder",
    "Gloo",
    "Handle",
    "Nccl",
    "OnMeeting",
    "Shared",
    "Solo",
    "Spanning",
    "Staged",
    "Sum",
    "address_of",
    "connect",
    "disconnect",
    "exposed",
    "for_thread",
    "host_key",
    "within_hosts",
]
