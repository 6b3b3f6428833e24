"""What a contender is given: its place among the ranks, and the same model, data and optimizer
as every other contender."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import models
from workloads import Setting, Workload

Step = Callable[[Tensor, Tensor], Tensor]
"""Trains one step on (inputs, targets) and returns this rank's loss."""


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
    addresses: tuple[str, ...] = ()
    """Of each rank, where each is on a host of its own; else all are on this one."""
    setting: Setting = field(default_factory=Setting)
    told: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """Questions about a contender that are put to it after each stint, by name."""

    def join_torch(self) -> None:
        """Make the default process group: over NCCL on GPUs, else over Gloo."""
        store = dist.TCPStore(
            self.address,
            self.port,
            self.size,
            is_master=self.rank == 0,
            master_listen_fd=self.listen_fd,
        )
        dist.init_process_group(
            "nccl" if self.on_gpu else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.size,
            device_id=self.device if self.on_gpu else None,
        )

    def launched(self) -> dict[str, str]:
        """The variables that torchrun would have set."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "GROUP_RANK": str(self.rank - self.local_rank),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RUN_ID": "benchmark",
        }

    @property
    def address(self) -> str:
        """Where rank 0 listens."""
        return self.addresses[0] if self.addresses else "127.0.0.1"

    @property
    def local_rank(self) -> int:
        """The rank among those of its host."""
        return 0 if self.addresses else self.rank

    @property
    def local_size(self) -> int:
        """How many ranks its host has."""
        return 1 if self.addresses else self.size

    @property
    def on_gpu(self) -> bool:
        """Whether ranks train on GPUs, each on its own."""
        return self.setting.device == "cuda"

    @property
    def device(self) -> torch.device:
        """Where this rank trains; ranks share the GPUs if there are fewer of them."""
        if not self.on_gpu:
            return torch.device("cpu")
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())

    def model(self) -> nn.Module:
        """The model on this rank's device in fp32, with the same weights on every rank."""
        with self.device:  # a large one takes long to initialise on the CPU, and may not fit there
            return models.build(self.workload)

    def plain_model(self) -> nn.Module:
        """The model of a contender that knows no precisions: in bf16 parameters are, too. Its
        blocks are compiled where that is asked for."""
        model = self.model()
        if self.setting.precision == "bf16":
            model.to(torch.bfloat16)
        self.compile(model)
        return model

    def compile(self, model: nn.Module) -> None:
        """Have each block become a graph, if they are to; what is between them stays as it is."""
        if self.setting.compiled:
            for block in self.blocks(model):
                block.compile(backend=self.setting.compiled)

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """What AdamW is given."""
        return {"lr": self.workload.lr, "weight_decay": 0.01, "fused": True}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """torch's fused AdamW, the fastest there is, on the CPU too."""
        return torch.optim.AdamW(parameters, **self.hyperparameters)

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over this rank's rows, under autocast if that is the precision."""
        mixed = self.setting.precision == "bf16-mixed"
        with torch.autocast(self.setting.device, torch.bfloat16, enabled=mixed):
            return models.loss_of(model, inputs, targets)

    def plain_step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clear: Callable[[], None] | None = None,
        loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
    ) -> Step:
        """Return the step of a plain training loop, for contenders whose users write one. `clear`
        is for gradients that the optimizer does not have, `loss_of` for a loss without autocast."""
        clear = clear or optimizer.zero_grad
        loss_of = loss_of or self.loss

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            clear()
            loss = loss_of(model, inputs, targets)
            loss.backward()
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
        """This rank's rows of the batches that the steps go round, where it trains."""
        pairs = models.batches(self.workload, self.rank % self.shares, self.shares)
        whole = self.setting.precision == "bf16"
        return [(self._placed(x, whole), y.to(self.device)) for x, y in pairs]

    def _placed(self, inputs: Tensor, whole: bool) -> Tensor:
        dtype = torch.bfloat16 if whole and inputs.is_floating_point() else inputs.dtype
        return inputs.to(self.device, dtype)
