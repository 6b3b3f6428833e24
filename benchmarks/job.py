"""The input of a contender: its place among the ranks, and the same model, data and optimizer as
every other contender has."""

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
    """Number of parts of a batch."""
    port: int
    listen_fd: int | None
    addresses: tuple[str, ...] = ()
    """Of each rank, if each has a separate host; else all are on this one."""
    setting: Setting = field(default_factory=Setting)
    told: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """Questions about a contender that the worker answers after each stint, by name."""

    def join_torch(self) -> None:
        """Create the default process group: over NCCL on GPUs, else over Gloo."""
        is_master, fd = self.rank == 0, self.listen_fd
        store = dist.TCPStore(
            self.address, self.port, self.size, is_master=is_master, master_listen_fd=fd
        )
        dist.init_process_group(
            "nccl" if self.on_gpu else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.size,
            device_id=self.device if self.on_gpu else None,
        )

    # Libraries read these at import or init, and would else start ranks themselves.
    def launched(self) -> dict[str, str]:
        """Return the variables that torchrun would have set."""
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
        """Rank 0's address."""
        return self.addresses[0] if self.addresses else "127.0.0.1"

    @property
    def local_rank(self) -> int:
        """Rank within its host."""
        return 0 if self.addresses else self.rank

    @property
    def local_size(self) -> int:
        """Number of ranks on its host."""
        return 1 if self.addresses else self.size

    @property
    def on_gpu(self) -> bool:
        return self.setting.device == "cuda"

    @property
    def device(self) -> torch.device:
        """This rank's device; ranks share the GPUs if there are fewer of them."""
        if not self.on_gpu:
            return torch.device("cpu")
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())

    @property
    def max_norm(self) -> float | None:
        """The norm for clipping; None: gradients are not clipped."""
        return float(self.workload.clip) or None

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """AdamW's. The fused one is torch's fastest, on the CPU too."""
        return {"lr": self.workload.lr, "weight_decay": 0.01, "fused": True}

    def model(self) -> nn.Module:
        """Return the model on this rank's device in fp32, with the same weights on every rank."""
        with self.device:  # a large one takes long to initialise on the CPU, and may not fit there
            return models.build(self.workload)

    def plain_model(self) -> nn.Module:
        """Return the model for a contender that has no settings of precision: in bf16 its
        parameters are bf16. Its blocks are compiled if the setting says so."""
        model = self.model()
        if self.setting.precision == "bf16":
            model.to(torch.bfloat16)
        self.compile(model)
        return model

    def compile(self, model: nn.Module) -> None:
        """Compile each block if the setting says so; operations between blocks stay eager."""
        if self.setting.compiled:
            for block in models.blocks(model):
                block.compile(backend=self.setting.compiled)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(parameters, **self.hyperparameters)

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over this rank's rows, in bf16-mixed under autocast."""
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
        """Return the step of a plain training loop, for contenders whose users write one.

        `clear` is for gradients that the optimizer does not have, `loss_of` for a loss without
        autocast.
        """
        clear, loss_of = clear or optimizer.zero_grad, loss_of or self.loss

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            # Before forward, as in PyTorch's tutorials: memory between steps includes gradients.
            clear()
            loss = loss_of(model, inputs, targets)
            loss.backward()
            if self.max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
            optimizer.step()
            return loss

        return step

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's rows of the batches that the steps cycle through, on its device."""
        pairs = models.batches(self.workload, self.rank % self.shares, self.shares)
        half = self.setting.precision == "bf16"
        return [
            (x.to(self.device, torch.bfloat16 if half and x.is_floating_point() else x.dtype), y)
            for x, y in ((x, y.to(self.device)) for x, y in pairs)
        ]
