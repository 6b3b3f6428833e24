"""Small checkpoints that other libraries write, and the losses of the steps after them.

Each writer trains a model for STEPS steps with plain PyTorch or the library, lets the library save
it, and trains on for MORE steps.
"""

import argparse
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
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


class Layers(nn.Module):
    """Two equal layers with the names of Megatron-Core, which stores them stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.ModuleDict({"word_embeddings": nn.Embedding(7, 4)})
        layers = [
            nn.ModuleDict({"norm": nn.LayerNorm(4), "mlp": nn.Linear(4, 4)}) for _ in range(2)
        ]
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.output_layer = nn.Linear(4, 7, bias=False)

    def forward(self, x: Tensor) -> Any:
        x = self.embedding["word_embeddings"](x)
        for layer in self.decoder["layers"]:
            x = x + layer["mlp"](layer["norm"](x)).tanh()
        return self.output_layer(x)


def build(seed: int = 5, kind: type[nn.Module] = Net) -> nn.Module:
    """Return the model in fp64."""
    torch.manual_seed(seed)
    return kind().double()


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


def composer(folder: Path, model: nn.Module, optimizer: optim.Optimizer) -> Path:
    """Write the layout of Composer's State.state_dict, with an object of another class."""
    counters = {"epoch": 0, "batch": STEPS, "sample": STEPS * ROWS}
    state = {
        "model": {f"module.{name}": v for name, v in model.state_dict().items()},
        "optimizers": {type(optimizer).__name__: optimizer.state_dict()},
        "schedulers": {"LambdaLR": {"base_lrs": [0.02], "last_epoch": STEPS}},
        "timestamp": {"Timestamp": counters},
        "train_metrics": argparse.Namespace(loss=1.0),
    }
    torch.save({"state": state, "rng": [{"python": (3, (1, 2), None)}]}, folder / "ba3.pt")
    return folder / "ba3.pt"


def composer_sharded(folder: Path, model: nn.Module, optimizer: optim.Optimizer) -> Path:
    """Write the layout of a sharded checkpoint of Composer, which is DCP."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    counters = {"epoch": 0, "batch": STEPS}
    state = {
        "model": of_model,
        "optimizers": {type(optimizer).__name__: of_optimizer},
        "timestamp": {"Timestamp": counters},
    }
    return save_dcp({"state": state, "rng": [{"python": 3}]}, folder / "ba3")


def timm(folder: Path, model: nn.Module, optimizer: optim.Optimizer) -> Path:
    """Write the layout of timm's CheckpointSaver, with the script's arguments and an average."""
    state = {
        "epoch": 1,
        "arch": "net",
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "version": 2,
        "args": argparse.Namespace(model="net", lr=0.02),
        "amp_scaler": {"scale": 1024.0, "growth_factor": 2.0, "_growth_tracker": 3},
        "state_dict_ema": {name: value + 1 for name, value in model.state_dict().items()},
        "metric": 71.5,
    }
    torch.save(state, folder / "checkpoint-1.pth.tar")
    return folder / "checkpoint-1.pth.tar"


def lightning_sharded(folder: Path, model: nn.Module, optimizer: optim.Optimizer) -> Path:
    """Write the layout of Lightning's FSDPStrategy.save_checkpoint with state_dict_type sharded."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    save_dcp({"model": of_model, "optimizer_0": of_optimizer}, folder / "epoch=0.ckpt")
    rest = {"epoch": 0, "global_step": STEPS, "pytorch-lightning_version": "2.6", "loops": {}}
    rest["lr_schedulers"] = [{"last_epoch": STEPS}]
    torch.save(rest, folder / "epoch=0.ckpt" / "meta.pt")
    return folder / "epoch=0.ckpt"


def megatron(folder: Path, model: nn.Module, optimizer: optim.Optimizer) -> Path:
    """Write Megatron-Core's layout, with one state flattened as with two tensor-parallel ranks."""
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, value in model.named_parameters():
        key, number = re.sub(r"layers\.\d+\.", "layers.", name), re.search(r"layers\.(\d+)\.", name)
        stacks.setdefault(key, {})[int(number[1]) if number else -1] = value

    def stacked(key: str, of: Callable[[Tensor], Tensor]) -> Tensor:
        values = [of(value).detach() for _, value in sorted(stacks[key].items())]
        return torch.stack(values) if "layers." in key else values[0]

    state = {key: stacked(key, lambda value: value) for key in stacks}
    for kind in optimizer.state[next(model.parameters())]:
        if kind != "step":
            for key in stacks:
                value = stacked(key, lambda p, kind=kind: optimizer.state[p][kind])
                if key == "decoder.layers.mlp.weight":
                    # [layers, ranks, 1, elements]: each rank has flattened its rows of a layer.
                    value = value.view(2, 2, 1, 8)
                state[f"chained_0.optimizer.state.{kind}.{key}"] = value
    home = save_dcp(state, folder / "iter_0000003")
    (home / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    groups = [
        {k: v for k, v in group.items() if k != "params"}
        | {"wd_mult": float(number == 0), "step": STEPS, "min_lr": 0.0}
        for number, group in enumerate(optimizer.param_groups)
    ]
    common = {
        "args": argparse.Namespace(num_layers=2, num_attention_heads=4, num_query_groups=1),
        "iteration": STEPS,
        "optimizer": {"optimizer": {"param_groups": groups}},
        "opt_param_scheduler": {"num_steps": 18},
    }
    torch.save(common, home / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


def nanotron(folder: Path, model: nn.Module, optimizer: optim.Optimizer | None) -> Path:
    """Write nanotron's layout, with matrices on two tensor-parallel ranks, each with two boxes."""
    home = folder / "3"
    local: list[dict[str, Any]] = [{}, {}]
    for name, value in model.named_parameters():
        *parts, last = name.split(".")
        place = home.joinpath("model", *parts)
        place.mkdir(parents=True, exist_ok=True)
        entry = {} if optimizer is None else optimizer.state[value]
        is_sharded = value.ndim == 2 and value.shape[0] % 4 == 0
        if not is_sharded:
            file = place / f"model_{last}.safetensors"
            safetensors.torch.save_file({"data": value.detach()}, file)
            for state in local:
                state[name] = entry
            continue
        n = value.shape[0] // 4

        def shard_of(full: Tensor, rank: int) -> Tensor:
            # Rows r and 2 + r of four, as of a fused matrix with two parts.
            return full.detach().view(2, 2, -1, *full.shape[1:])[:, rank].flatten(0, 1).contiguous()

        for rank in range(2):
            pairs = ";".join(
                f"{part * n},{part * n + n},None|None,None,None"
                f"#{(2 * part + rank) * n},{(2 * part + rank + 1) * n},None|None,None,None"
                for part in range(2)
            )
            metadata = {
                "version": "1.4",
                "local_global_slices_pairs": pairs,
                "unsharded_shape": str(tuple(value.shape)),
            }
            file = place / f"model_{last}_pp-rank-0-of-1_tp-rank-{rank}-of-2.safetensors"
            safetensors.torch.save_file({"data": shard_of(value, rank)}, file, metadata)
            local[rank][name] = {k: shard_of(v, rank) if v.ndim else v for k, v in entry.items()}
    (home / "checkpoint_metadata.json").write_text(
        json.dumps({"version": "1.4", "tp": 2, "dp": 1, "metas": {"last_train_step": STEPS}})
    )
    (home / "model_config.json").write_text('{"num_attention_heads": 4}')
    (folder / "latest.txt").write_text("3")
    if optimizer is None:
        return folder
    (home / "optimizer").mkdir()
    names = {value: name for name, value in model.named_parameters()}
    for rank, state in enumerate(local):
        content = optimizer.state_dict()
        order = [names[p] for group in optimizer.param_groups for p in group["params"]]
        content["state"] = {number: state[name] for number, name in enumerate(order)}
        content["names"] = dict(enumerate(order))
        file = f"optimizer_pp-0-of-1_tp-{rank}-of-2_exp-0-of-1.pt"
        torch.save(content, home / "optimizer" / file)
    return folder


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
    "composer": composer,
    "composer sharded": composer_sharded,
    "timm": timm,
    "lightning sharded": lightning_sharded,
    "accelerate": accelerate_state,
    "fabric": fabric,
}
"""The writers of `Net`, by name of the format."""

OF_LAYERS: dict[str, Writer] = {"megatron": megatron, "nanotron": nanotron}
"""The writers of `Layers`."""


def write(
    kind: str, folder: Path, optimizer_kind: str = "adamw", model_kind: type[nn.Module] = Net
) -> tuple[Path, list[float]]:
    """Write a checkpoint, and return its path and the losses of the next steps."""
    model = build(kind=model_kind)
    optimizer = optimizer_of(model, optimizer_kind)
    train(model, optimizer, 0, STEPS)
    path = (WRITERS | OF_LAYERS)[kind](folder, model, optimizer)
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
