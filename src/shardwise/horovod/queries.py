"""Who this rank is, and what this library is built of."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.horovod.context import current


def size() -> int:
    """The number of ranks."""
    current().asked_size = True
    return current().world.size


def rank() -> int:
    """This rank, from 0 on."""
    return current().world.rank


def local_size() -> int:
    """The number of ranks on this host."""
    return current().world.local_size


def local_rank() -> int:
    """This rank among those of its host."""
    return current().world.local_rank


def cross_size() -> int:
    """The number of hosts that have a rank of this local rank."""
    return len(_column())


def cross_rank() -> int:
    """The place of this host among them."""
    return _column().index(current().world.rank)


def _column() -> list[int]:
    place = current().world.local_rank
    return [ranks[place] for ranks in current().hosts if len(ranks) > place]


def is_homogeneous() -> bool:
    """Whether all hosts have as many ranks."""
    return len({len(ranks) for ranks in current().hosts}) == 1


def mpi_threads_supported() -> bool:
    """Whether MPI may be used beside by several threads: yes, for we use none."""
    current()
    return True


def mpi_enabled() -> bool:
    """Whether ranks talk over MPI: never, also where mpirun has started them."""
    return False


def mpi_built() -> bool:
    """Whether ranks can talk over MPI: never."""
    return False


def gloo_enabled() -> bool:
    """Whether ranks talk over Gloo, or memory that they share; else over NCCL."""
    return current().world.collectives.name != "nccl"


def gloo_built() -> bool:
    """Whether this PyTorch has Gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """The version of this PyTorch's NCCL, such as 22703; 0 without."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return 0
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return int(version[0] * 10000 + version[1] * 100 + version[2])


def cuda_built() -> bool:
    """Whether this PyTorch knows CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this PyTorch knows ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """Whether there is IBM's DDL: never."""
    return False


def ccl_built() -> bool:
    """Whether there is Intel's oneCCL: never."""
    return False
