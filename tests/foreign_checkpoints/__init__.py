"""Small checkpoints that other libraries write, and the losses of the steps after them.

Each writer trains a model for STEPS steps with plain PyTorch or the library, lets the library save
it, and trains on for MORE steps.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)

STEPS, MORE = 3, 5
ROWS = 6


class Net(nn.Module):
    """An embedding that is tied to the head, a layer, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 4)
        self.lin = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("scale", torch.tensor([1.5, 0.5, 1.0, 2.0]))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.norm(self.lin(self.emb(x)).tanh() * self.scale))


def build(seed: int = 5) -> Net:
    """Return the model in fp64."""
    torch.manual_seed(seed)
    return Net().double()


def optimizer_of(model: nn.Module, kind: str = "adamw") -> optim.Optimizer:
    """Return the optimizer: two groups, unless `kind` is "one" or "sgd"."""
    if kind == "sgd":
        return optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if kind == "one":
        return optim.AdamW(model.parameters(), lr=0.02)
    vectors = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    return optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 0.03}], lr=0.02
    )


def batch(step: int, first: int = 0, end: int = ROWS) -> tuple[Tensor, Tensor]:
    """Return rows `first` to `end` of the batch of a step: tokens and the next tokens."""
    tokens = torch.randint(7, (ROWS, 6), generator=torch.Generator().manual_seed(step))
    return tokens[first:end, :-1], tokens[first:end, 1:]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def train(model: nn.Module, optimizer: optim.Optimizer, first: int, steps: int) -> list[float]:
    """Train with plain PyTorch and return the losses."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, *batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save_dcp(state: dict[str, Any], folder: Path) -> Path:
    """Save with DCP in this process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


Writer = Callable[[Path, nn.Module, optim.Optimizer], Path]


def torch_dict(folder: Path, model: nn.Module, optimizer: optim.Optimizer) -> Path:
    """Write what most scripts write, also with Horovod."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": STEPS}
    torch.save(state, folder / "ckpt.pt")
    return folder / "ckpt.pt"


def ddp_dict(folder: Path, model: nn.Module, optimizer: optim.Optimizer) -> Path:
    """Write the names of a compiled model in DistributedDataParallel, and no step count."""
    wrapped = {f"module._orig_mod.{name}": v for name, v in model.state_dict().items()}
    state = {"state_dict": wrapped, "optimizer": optimizer.state_dict(), "epoch": 1}
    torch.save(state, folder / "ddp.pth.tar")
    return folder / "ddp.pth.tar"


def dcp_nested(folder: Path, model: nn.Module, optimizer: optim.Optimizer) -> Path:
    """Write what the guide of FSDP2 writes."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"app": {"model": of_model, "optim": of_optimizer}, "step": STEPS}
    return save_dcp(state, folder / "dcp")


def torchtitan(folder: Path, model: nn.Module, optimizer: optim.Optimizer) -> Path:
    """Write the layout that torchtitan documents: weights at the top, flat optimizer state."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=flat),
        "lr_scheduler": {"last_epoch": STEPS},
        "train_state": {"step": torch.tensor(STEPS, dtype=torch.int32)},
        "dataloader": {"dp_rank_0": b"\x80\x04N."},
    }
    return save_dcp(state, folder / "step-3")


def fsdp1_full(folder: Path, model: nn.Module, optimizer: optim.Optimizer) -> Path:
    """Write full state_dicts by name, as FSDP.optim_state_dict returns."""
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=full)
    state = {"model": of_model, "optimizer": of_optimizer, "iteration": STEPS}
    torch.save(state, folder / "full.pt")
    return folder / "full.pt"


def accelerate_state(folder: Path, model: nn.Module, optimizer: optim.Optimizer) -> Path:
    """Write a folder with Accelerate's save_state."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    accelerator.save_state(str(folder / "state"))
    return folder / "state"


def fabric(folder: Path, model: nn.Module, optimizer: optim.Optimizer) -> Path:
    """Write a file with Lightning Fabric."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import LightningEnvironment

    state = {"model": model, "optimizer": optimizer, "step": STEPS}
    # Without the plugin, Fabric warns about an installed srun.
    alone = Fabric(accelerator="cpu", devices=1, plugins=[LightningEnvironment()])
    alone.save(folder / "fabric.ckpt", state)
    return folder / "fabric.ckpt"


WRITERS: dict[str, Writer] = {
    "torch dict": torch_dict,
    "ddp dict": ddp_dict,
    "dcp": dcp_nested,
    "torchtitan": torchtitan,
    "fsdp1 full": fsdp1_full,
    "accelerate": accelerate_state,
    "fabric": fabric,
}
"""The writers, by name of the format."""


def write(kind: str, folder: Path, optimizer_kind: str = "adamw") -> tuple[Path, list[float]]:
    """Write a checkpoint, and return its path and the losses of the next steps."""
    model = build()
    optimizer = optimizer_of(model, optimizer_kind)
    train(model, optimizer, 0, STEPS)
    path = WRITERS[kind](folder, model, optimizer)
    return path, train(model, optimizer, STEPS, MORE)


def lightning(folder: Path) -> tuple[Path, list[float]]:
    """Let Lightning's Trainer train and save, and return the path and the losses of next steps."""
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = build()
            # An object in the file, which is not loaded.
            self.save_hyperparameters({"device": torch.device("cpu"), "path": folder})

        def training_step(self, batch: Any, _: int) -> Tensor:
            return loss_of(self.net, *batch)

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self.net)
            return [optimizer], [optim.lr_scheduler.StepLR(optimizer, 100)]

    module = Module()
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[LightningEnvironment()],
    )
    data = [batch(step) for step in range(STEPS)]
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    trainer.save_checkpoint(folder / "trainer.ckpt")
    losses = train(module.net, trainer.optimizers[0], STEPS, MORE)
    return folder / "trainer.ckpt", losses
