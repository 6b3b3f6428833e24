"""Which transport a process joins, and how."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise.collectives.base import Collectives, Solo
from shardwise.collectives.gloo import Gloo
from shardwise.collectives.nccl import Nccl
from shardwise.errors import LaunchError
from shardwise.launch.identity import Identity


def connect(identity: Identity, device: torch.device, timeout: float) -> Collectives:
    """Join the group that `identity` describes; `timeout` in seconds bounds every wait.

    Raises LaunchError when the others cannot be reached.
    """
    if identity.launcher == "python":
        return Solo()
    backend = "nccl" if device.type == "cuda" else "gloo"
    limit = timedelta(seconds=timeout)
    try:
        if identity.listen_fd is not None or identity.launcher == "shardwise run":
            store = dist.TCPStore(  # type: ignore[attr-defined]
                identity.address or "127.0.0.1",
                identity.port or 0,
                identity.size,
                is_master=identity.rank == 0,
                timeout=limit,
                master_listen_fd=identity.listen_fd,
            )
            dist.init_process_group(
                backend, store=store, rank=identity.rank, world_size=identity.size, timeout=limit
            )
        else:
            dist.init_process_group(backend, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"Rank {identity.rank} of {identity.size} cannot join the others at "
            f"{identity.address}:{identity.port} (started by {identity.launcher}): "
            f"{str(error).splitlines()[0]}. Is the port in use by another run, or did a rank "
            "not start?"
        ) from error
    if backend == "nccl":
        return Nccl(identity.rank, identity.size, device)
    return Gloo(identity.rank, identity.size)
