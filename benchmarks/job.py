"""What a contender is given: its place among the ranks, and the same model, data and optimizer
as every other contender."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import models
from residents import disk_bytes
from workloads import Workload

Step = Callable[[Tensor, Tensor], Tensor]
"""Trains one step on (inputs, targets) and returns this rank's loss."""

Update = tuple[int, int, int]
"""When an update began and ended (ns, on the clock that all processes of a host share), and the
bytes that this process read from disks and wrote to them meanwhile."""

HYPERPARAMETERS: dict[str, Any] = {"weight_decay": 0.01, "fused": True}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One rank's part. Rank 0 inherited `listen_fd`, a socket that listens on `port`, so that no
    port is chosen by one process and taken by another."""

    workload: Workload
    rank: int
    size: int
    shares: int
    """Into how many parts a batch is cut."""
    port: int
    listen_fd: int | None
    updates: list[Update] = field(default_factory=list)
    told: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """Questions about a contender that are put to it after each stint, by name."""

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around what a step does once its gradients are there."""
        moved, begun = disk_bytes(), time.monotonic_ns()
        yield
        ended = time.monotonic_ns()
        self.updates.append((begun, ended, disk_bytes() - moved))

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

    def launched(self) -> dict[str, str]:
        """The variables that torchrun would have set."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RUN_ID": "benchmark",
        }

    def model(self) -> nn.Module:
        """The model on the CPU in fp32, with the same weights on every rank."""
        return models.build(self.workload)

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """What AdamW is given."""
        return {"lr": self.workload.lr} | HYPERPARAMETERS

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """torch's fused AdamW, the fastest there is on the CPU."""
        return torch.optim.AdamW(parameters, **self.hyperparameters)

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over this rank's rows."""
        return models.loss_of(model, inputs, targets)

    def plain_step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clear: Callable[[], None] | None = None,
    ) -> Step:
        """The step of a plain training loop, for those whose users write one; `clear` where not
        every gradient is of the optimizer."""
        clear = clear or optimizer.zero_grad

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            clear()
            loss = self.loss(model, inputs, targets)
            loss.backward()
            with self.updating():
                if self.max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
                optimizer.step()
            return loss

        return step

    @property
    def max_norm(self) -> float | None:
        """What gradients are to be clipped to, if they are."""
        return float(self.workload.clip) or None

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The units by which the model is sharded where a peer wants to be told."""
        return models.blocks(model)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's rows of the batches that the steps go round."""
        return models.batches(self.workload, self.rank % self.shares, self.shares)
