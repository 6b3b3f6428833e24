"""What scripts import from `horovod.torch.functions`."""

from shardwise.horovod.objects import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_parameters,
)
from shardwise.horovod.optimizer_states import broadcast_optimizer_state

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
