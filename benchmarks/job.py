"""What a contender is given: its place among the ranks, and the same model, data and optimizer
as every other contender."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import models
from workloads import Gpt

Step = Callable[[Tensor, Tensor], Tensor]
"""Trains one step on (inputs, targets) and returns this rank's loss."""

HYPERPARAMETERS: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.01, "fused": True}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One rank's part. Rank 0 inherited `listen_fd`, a socket that listens on `port`, so that no
    port is chosen by one process and taken by another."""

    workload: Gpt
    rank: int
    size: int
    port: int
    listen_fd: int | None

    def join_torch(self) -> None:
        """Make the default process group, over Gloo."""
        store = dist.TCPStore(
            "127.0.0.1",
            self.port,
            self.size,
            is_master=self.rank == 0,
            master_listen_fd=self.listen_fd,
        )
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)

    def model(self) -> nn.Module:
        """The model on the CPU in fp32, with the same weights on every rank."""
        return models.build(self.workload)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """torch's fused AdamW, the fastest there is on the CPU."""
        return torch.optim.AdamW(parameters, **HYPERPARAMETERS)

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over this rank's rows."""
        return models.loss_of(model, inputs, targets)

    def plain_step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        """The step of a plain training loop, for those whose users write one."""

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(model, inputs, targets)
            loss.backward()
            optimizer.step()
            return loss

        return step

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The units by which the model is sharded where a peer wants to be told."""
        return models.blocks(model)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's rows of the batches that the steps go round."""
        return models.batches(self.workload, self.rank, self.size)
