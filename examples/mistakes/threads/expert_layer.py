"""A layer of experts that are spread over ranks, with collectives of torch only.

Each rank has every N-th expert, under its global number. It computes them for the rows of all
ranks, and the sum over ranks of the outputs is the output.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce


class ExpertLayer(nn.Module):
    """Mixes 4 experts by the softmax of a router. Input and output: (rows, width)."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        made = {str(e): nn.Linear(width, width) for e in range(experts)}  # alike on all ranks
        rank, size = dist.get_rank(), dist.get_world_size()
        self.experts = nn.ModuleDict({e: made[e] for e in made if int(e) % size == rank})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        everyone, gates = gather(x), gather(self.router(x).softmax(-1))
        y = sum(gates[:, int(e), None] * each(everyone).tanh() for e, each in self.experts.items())
        first = dist.get_rank() * len(x)
        return all_reduce(y)[first : first + len(x)]


def gather(x: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks. Its backward sums over ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    above, below = rank * len(x), (size - 1 - rank) * len(x)
    return all_reduce(nn.functional.pad(x, (0, 0, above, below)))


def is_expert(name: str) -> bool:
    """Return whether a parameter belongs to an expert."""
    return ".experts." in name
