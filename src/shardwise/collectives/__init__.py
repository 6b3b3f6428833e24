"""The one seam to the other ranks: the only caller of torch.distributed's collectives.

    base.py    the verbs, and Solo, the group of one
    gloo.py    CPU ranks, by Gloo's point-to-point messages
    nccl.py    CUDA ranks, by NCCL's collectives
    wire.py    what the transports share
    connect.py which of them a process joins, and how

A flat buffer is cut into one interval per rank by `cuts`, size + 1 ascending offsets, so that
rank r owns [cuts[r], cuts[r + 1]). Intervals may differ in length and may be empty. Every rank
makes the same calls in the same order.
"""

from shardwise.collectives.base import Collectives, Cuts, Handle, Solo
from shardwise.collectives.connect import connect
from shardwise.collectives.gloo import Gloo
from shardwise.collectives.nccl import Nccl

__all__ = ["Collectives", "Cuts", "Gloo", "Handle", "Nccl", "Solo", "connect"]
