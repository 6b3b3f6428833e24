"""Writes a checkpoint of any format in another library's format, tensor by tensor."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import file_system
from shardwise.checkpoint.deepspeed.convert import write_parts, write_pickled
from shardwise.checkpoint.export import PICKLED, replace_when_complete, write_safetensors
from shardwise.checkpoint.format import TensorSpec, dtype_name, dtype_of, index, lay_out
from shardwise.checkpoint.formats.importing import SPLIT, Advance
from shardwise.checkpoint.formats.optimizers import fields_alone
from shardwise.checkpoint.formats.saved import Checkpoint, Leaf, MappedReader
from shardwise.checkpoint.json_values import decode
from shardwise.errors import BrokenCheckpoint, CheckpointError

SUFFIXES = {".safetensors": "safetensors", ".ckpt": "lightning"} | dict.fromkeys(PICKLED, "pt")
"""Format of a file, by its suffix."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes that `--dtype` accepts."""


@dataclass(frozen=True)
class Export:
    """An export: the checkpoint to write, and how to write it.

    Args:
        checkpoint: The source, to which rules may have been applied.
        out: The file or folder to write.
        dtype: Dtype of floating-point weights, or None to keep their dtypes.
        with_optimizer: Also write the optimizer state, step and schedulers.
    """

    checkpoint: Checkpoint
    out: Path
    dtype: torch.dtype | None = None
    with_optimizer: bool = False

    @property
    def specs(self) -> list[TensorSpec]:
        """The model's tensors as they are written: in their final dtypes and without aliases."""
        found = []
        for name, spec in self.checkpoint.model.specs.items():
            if name in self.checkpoint.aliases:
                continue
            is_float = dtype_of(spec.dtype).is_floating_point
            dtype = dtype_name(self.dtype) if self.dtype is not None and is_float else spec.dtype
            found.append(TensorSpec(name, dtype, spec.shape))
        return found

    @property
    def weights(self) -> MappedReader:
        """The model's tensors. Parameters written in a wider dtype come from fp32 masters."""
        masters = {
            f"{key}": entry["master"]
            for optimizer in self.checkpoint.optimizers
            for key, entry in optimizer.state.items()
            if isinstance(entry.get("master"), Leaf)
        }
        model = self.checkpoint.model
        leaves = {}
        for spec in self.specs:
            stored = model.specs[spec.name]
            is_wider = dtype_of(spec.dtype).itemsize > dtype_of(stored.dtype).itemsize
            master = masters.get(spec.name) if is_wider else None
            leaves[spec.name] = Leaf(model, spec.name) if master is None else master
        return MappedReader(leaves)

    @cached_property
    def training(self) -> tuple[MappedReader, dict[str, Any]]:
        """The optimizer state's tensors as `NAME.KEY`, and the fields of checkpoint.json.

        Raises CheckpointError if the source has no optimizer state.
        """
        if not self.checkpoint.optimizers:
            raise CheckpointError(
                f"{self.checkpoint.path} has no optimizer state. Leave out --with-optimizer. The "
                f"formats {' and '.join(OF_TRAINING)} need it."
            )
        sets, fields = fields_alone(self.checkpoint)
        tensors = sets.get("optimizer")
        # Masters are weights: `weights` uses them, and no other library knows this key.
        leaves = {
            name: Leaf(tensors, name)
            for name in (tensors.specs if tensors is not None else ())
            if tensors is not None and not name.endswith(".master")
        }
        return MappedReader(leaves), fields


def format_of(out: Path) -> str:
    """Return the format that the name of the file or folder `out` implies.

    Raises CheckpointError if the suffix is unknown.
    """
    if out.suffix and out.suffix not in SUFFIXES and not out.is_dir():
        raise CheckpointError(
            f"{out} ends in {out.suffix}. Write a file name that ends in {', '.join(SUFFIXES)}, or "
            "add --to transformers or --to dcp to write a folder of this name."
        )
    return SUFFIXES.get(out.suffix, "transformers")


def check(export: Export, to: str) -> Export:
    """Return the export that `write` writes. For a PEFT model, this is only the adapter.

    Raises CheckpointError if it cannot be written because the format is unknown or cannot hold the
    optimizer state, the source has no such state, or the path is not usable.
    """
    if to not in FORMATS:
        raise CheckpointError(f"There is no format {to!r}. Write one of {', '.join(FORMATS)}.")
    if export.with_optimizer and to not in WITH_OPTIMIZER:
        raise CheckpointError(
            f"The format {to} holds weights only. Leave out --with-optimizer, or write "
            f"{' or '.join(f'--to {name}' for name in WITH_OPTIMIZER)}."
        )
    _check_path(export.out, to)
    if export.with_optimizer:
        _ = export.training  # raises if the state cannot be written
    is_adapter = to == "transformers" and "adapter_config.json" in export.checkpoint.config
    return _adapter_of(export) if is_adapter else export


def write(export: Export, to: str, advance: Advance = lambda _: None) -> int:
    """Write a checkpoint in the format `to`, and return the number of model tensors.

    The file or folder gets its name only once it is complete.

    Args:
        advance: Called after each write with the number of elements written.

    Raises:
        CheckpointError: `check` fails, or the disk fails.
        BrokenCheckpoint: The source is damaged.
    """
    export = check(export, to)
    # The result does not contain the source's checksums, so verify them first.
    for damage in export.checkpoint.damages(0, 1):
        raise BrokenCheckpoint(damage)
    try:
        FORMATS[to](export, advance)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{export.out} cannot be written: {why}.") from error
    return len(export.specs) + len(export.checkpoint.aliases)


def _check_path(out: Path, to: str) -> None:
    """Raise CheckpointError if `out` does not suit the format `to`, or is a non-empty folder."""
    wanted = SUFFIXES.get(out.suffix)
    if to in SUFFIXES.values() and wanted != to:
        suffixes = [suffix for suffix, format in SUFFIXES.items() if format == to]
        raise CheckpointError(
            f"{out} ends in {out.suffix or 'nothing'}. Write a file name that ends in "
            f"{' or '.join(suffixes)}."
        )
    if to in ("transformers", "dcp", "accelerate"):
        if wanted is not None:
            raise CheckpointError(
                f"{out} is the name of a file, but --to {to} writes a folder. Name a folder."
            )
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise CheckpointError(
                f"{out} exists and is not an empty folder. Name a new folder, or remove it first."
            )


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Context manager that yields a hidden folder, and renames it to `out` on success."""
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        yield aside
        for path in aside.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        file_system.sync(aside)
        # mkdtemp lets only the owner read the folder, but other users may load the model.
        mask = os.umask(0)
        os.umask(mask)
        aside.chmod(0o777 & ~mask)
        # A rename replaces an empty folder, and fails if another one has appeared meanwhile.
        aside.rename(out)
        file_system.sync(out.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _write_safetensors(export: Export, advance: Advance) -> None:
    with replace_when_complete(export.out) as file:
        write_safetensors(
            file,
            export.out,
            export.specs,
            export.checkpoint.aliases,
            partial(write_parts, export.weights, advance),
        )


def _write_transformers(export: Export, advance: Advance) -> None:
    """Write a folder for from_pretrained: weights in files of up to 5 GB, and the configs."""
    stem = "adapter_model" if "adapter_config.json" in export.checkpoint.config else "model"
    layout = lay_out(stem, export.specs, limit=SPLIT, aliases=export.checkpoint.aliases)
    weights = export.weights
    with _new_folder(export.out) as folder:
        for planned in layout:
            with (folder / planned.name).open("wb") as file:
                file.write(planned.header)
                for placed in planned.tensors.values():
                    parts = write_parts(weights, advance, placed.spec)
                    for part in parts:
                        file.write(part.view(torch.uint8).numpy().data)
        if len(layout) > 1:
            text = json.dumps(index(layout), indent=1) + "\n"
            (folder / f"{stem}.safetensors.index.json").write_text(text)
        for name, data in export.checkpoint.config.items():
            if name == "config.json" and export.dtype is not None:
                data = with_dtype(data, export.dtype)
            (folder / name).write_bytes(data)


def _adapter_of(export: Export) -> Export:
    """Return an export of only a PEFT model's adapter, under the names that PEFT uses in files.

    Returns `export` unchanged if it contains no other weights. Raises CheckpointError if the
    adapter is not plain LoRA.
    """
    checkpoint = export.checkpoint
    names = [name for name in checkpoint.model.specs if name not in checkpoint.aliases]
    own = [n for n in names if _ADAPTER.search(n) or ".modules_to_save.default." in n]
    others = [name for name in names if ".default" in name and name not in own]
    try:
        bias = json.loads(checkpoint.config["adapter_config.json"]).get("bias", "none")
    except (ValueError, AttributeError, RecursionError):
        bias = "none"
    if others or (own and bias != "none"):
        raise CheckpointError(
            f"{checkpoint.path} has an adapter of PEFT that is not only LoRA without biases "
            f"({others[0] if others else f'bias={bias!r:.20}'}), which cannot be exported. Call "
            "model.save_pretrained inside engine.full_parameters()."
        )
    if not own:
        return export
    leaves: dict[str, Leaf] = {}
    for name in own:
        new = re.sub(r"(\.modules_to_save)?\.default\b", "", name)
        # Models of Transformers with an adapter lack the prefix that PEFT's files have.
        new = new if new.startswith(_PEFT) else _PEFT + new
        leaves[new] = Leaf(checkpoint.model, name)
    return replace(export, checkpoint=replace(checkpoint, model=MappedReader(leaves), aliases={}))


_ADAPTER = re.compile(r"\blora_\w+\.default\b")
"""Matches LoRA tensor names in a PEFT model. PEFT's files omit the adapter's name."""

_PEFT = "base_model.model."


def with_dtype(config: bytes, dtype: torch.dtype) -> bytes:
    """Return the config.json `config` with `dtype` as its dtype.

    Transformers and servers convert weights to this dtype when they load them, so it must match the
    files. Returns the config unchanged if it is not a JSON object.
    """
    try:
        fields = json.loads(config)
    except (ValueError, RecursionError):
        return config
    if not isinstance(fields, dict):
        return config
    # The key is `torch_dtype` before Transformers 4.56, and later versions read it too.
    keys = {"dtype", "torch_dtype"} & fields.keys() or {"torch_dtype"}
    fields |= dict.fromkeys(keys, str(dtype).removeprefix("torch."))
    return json.dumps(fields, indent=2).encode() + b"\n"


Arrange = Callable[[dict[str, Any]], dict[str, Any]]
"""Arranges model, optimizers, schedulers and step as a library's training dict."""


def _of_scripts(parts: dict[str, Any]) -> dict[str, Any]:
    """Arrange `parts` as a training dict in the form that most scripts write."""
    optimizers, schedulers = parts["optimizers"], parts["schedulers"]
    return {
        "model": parts["model"],
        "optimizer": optimizers[0] if len(optimizers) == 1 else optimizers,
        "step": parts["step"],
        **({"lr_scheduler": schedulers[0]} if len(schedulers) == 1 else {}),
    }


def _write_pt(export: Export, advance: Advance, arrange: Arrange = _of_scripts) -> None:
    """Write a file with torch.save: the state_dict, or a dict of model, optimizer and step."""
    specs, aliases = export.specs, export.checkpoint.aliases
    tensors = export.weights.leaves
    wrap: Callable[[dict[str, Tensor]], Any] = dict
    if export.with_optimizer:
        state, fields = export.training
        # Two sets in one file, so mark the names of one. No parameter's name contains a NUL.
        specs = [*specs]
        for name, leaf in state.leaves.items():
            tensors[f"\0{name}"] = leaf
            specs.append(TensorSpec(f"\0{name}", leaf.spec.dtype, leaf.spec.shape))
        wrap = partial(_training_dict, fields, arrange)
    with replace_when_complete(export.out) as file:
        reader = MappedReader(tensors)
        write_pickled(reader, specs, aliases, file, export.out.parent, advance, wrap)


def _training_dict(
    fields: Mapping[str, Any], arrange: Arrange, values: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return a training dict whose state_dicts torch's own load_state_dict accepts."""
    of_state = _by_parameter({n[1:]: value for n, value in values.items() if n[:1] == "\0"})
    return arrange(
        {
            "model": {name: value for name, value in values.items() if name[:1] != "\0"},
            "optimizers": [_state_dict(one, fields, of_state) for one in fields["optimizers"]],
            "schedulers": [decode(state) for state in fields["tracked"].values()],
            "step": fields["step"],
        }
    )


def _by_parameter(values: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Group optimizer tensors, named `NAME.KEY`, by parameter and then by key."""
    found: dict[str, dict[str, Tensor]] = {}
    for full, value in values.items():
        name, _, key = full.rpartition(".")
        found.setdefault(name, {})[key] = value
    return found


def _state_dict(
    described: Mapping[str, Any],
    fields: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, Tensor]],
) -> dict[str, Any]:
    """Return an optimizer's state_dict, which identifies parameters by position."""
    names = [name for group in described["groups"] for name in group["parameters"]]
    state: dict[int, dict[str, Any]] = {}
    for number, name in enumerate(names):
        entry = {key: decode(value) for key, value in fields["state"].get(name, {}).items()}
        entry |= tensors.get(name, {})
        if entry:
            state[number] = entry
    groups, first = [], 0
    for group in described["groups"]:
        count = len(group["parameters"])
        options = {key: decode(value) for key, value in group["options"].items()}
        groups.append(options | {"params": list(range(first, first + count))})
        first += count
    return {"state": state, "param_groups": groups}


def _write_accelerate(export: Export, advance: Advance) -> None:
    """Write a folder for Accelerate's load_state, for a script that prepares one model."""
    checkpoint = export.checkpoint
    _, fields = export.training
    schedulers = [decode(state) for state in fields["tracked"].values()]
    with _new_folder(export.out) as folder:
        with (folder / "model.safetensors").open("wb") as file:
            write_safetensors(
                file,
                export.out,
                export.specs,
                checkpoint.aliases,
                partial(write_parts, export.weights, advance),
            )
        for number, described in enumerate(fields["optimizers"]):
            _write_optimizer(export, described, folder / _numbered("optimizer", number), advance)
        for number, state in enumerate(schedulers):
            torch.save(state, folder / _numbered("scheduler", number))


def _numbered(stem: str, number: int) -> str:
    """Return the name of Accelerate's file for object number `number`."""
    return f"{stem}_{number}.bin" if number else f"{stem}.bin"


def _write_optimizer(
    export: Export, described: Mapping[str, Any], path: Path, advance: Advance
) -> None:
    tensors, fields = export.training
    names = {name for group in described["groups"] for name in group["parameters"]}
    own = {full: leaf for full, leaf in tensors.leaves.items() if full.rpartition(".")[0] in names}
    specs = [TensorSpec(name, leaf.spec.dtype, leaf.spec.shape) for name, leaf in own.items()]

    def wrap(values: dict[str, Tensor]) -> Any:
        return _state_dict(described, fields, _by_parameter(values))

    with path.open("wb") as file:
        write_pickled(MappedReader(own), specs, {}, file, path.parent, advance, wrap)


def _write_lightning(export: Export, advance: Advance) -> None:
    """Write a file for Lightning's Trainer.fit(ckpt_path=...)."""
    _write_pt(export, advance, _of_lightning)


def _of_lightning(parts: dict[str, Any]) -> dict[str, Any]:
    """Arrange `parts` as Lightning's training dict, with the progress that its Trainer restores.

    All other progress stays at its initial value, so the Trainer continues at the first batch of
    epoch 0.
    """
    steps = {"ready": parts["step"], "completed": parts["step"]}
    none = {"ready": 0, "completed": 0}
    step = {"total": steps, "current": none}
    zero_grad = {key: value | {"started": value["ready"]} for key, value in step.items()}
    optimization = "epoch_loop.automatic_optimization.optim_progress"
    try:
        version = importlib.metadata.version("lightning")
    except importlib.metadata.PackageNotFoundError:
        version = "2.0.0"
    return {
        "epoch": 0,
        "global_step": parts["step"],
        "pytorch-lightning_version": version,
        "state_dict": parts["model"],
        "optimizer_states": parts["optimizers"],
        "lr_schedulers": parts["schedulers"],
        "loops": {
            "fit_loop": {
                optimization: {"optimizer": {"step": step, "zero_grad": zero_grad}},
                "epoch_loop.manual_optimization.optim_step_progress": step,
            }
        },
    }


def _write_dcp(export: Export, advance: Advance) -> None:
    """Write a DCP folder of `model` and, if requested, `optim` and `step`, as in FSDP2's guide."""
    # Imported here, because they take a second, which the other formats need not spend.
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    planner_type = _lazy_planner()
    model = {spec.name: _on_meta(spec) for spec in export.specs}
    leaves = {f"model.{name}": leaf for name, leaf in export.weights.leaves.items()}
    # Every name of a tied weight is stored, because DCP's loaders expect all of them.
    for alias, first in export.checkpoint.aliases.items():
        model[alias] = model[first]
        leaves[f"model.{alias}"] = leaves[f"model.{first}"]
    state: dict[str, Any] = {"model": model}
    if export.with_optimizer:
        tensors, fields = export.training
        if len(fields["optimizers"]) != 1:
            raise CheckpointError(
                f"--to dcp writes one optimizer, but the source has {len(fields['optimizers'])}. "
                f"Leave out --with-optimizer."
            )
        optim: dict[str, dict[str, Any]] = {}
        for name, entry in fields["state"].items():
            optim.setdefault(name, {}).update({key: decode(v) for key, v in entry.items()})
        for full, leaf in tensors.leaves.items():
            name, _, key = full.rpartition(".")
            optim.setdefault(name, {})[key] = _on_meta(leaf.spec)
            leaves[f"optim.state.{full}"] = leaf
        groups = [
            {key: decode(value) for key, value in group["options"].items()}
            | {"params": group["parameters"]}
            for group in fields["optimizers"][0]["groups"]
        ]
        state["optim"] = {"state": optim, "param_groups": groups}
        state["step"] = fields["step"]
    with _new_folder(export.out) as folder, warnings.catch_warnings():
        # It says that it saves in a single process, which is what no_dist asks for.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save(
            state,
            storage_writer=FileSystemWriter(folder, sync_files=False),
            planner=planner_type(leaves, advance),
            no_dist=True,
        )


def _on_meta(spec: TensorSpec) -> Tensor:
    return torch.empty(spec.shape, dtype=dtype_of(spec.dtype), device="meta")


def _lazy_planner() -> Any:
    """Return a DCP planner class that reads each tensor only when it writes it."""
    # torch imports half of torch.distributed for this class, so define it only if it is needed.
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    class LazyPlanner(DefaultSavePlanner):
        def __init__(self, leaves: Mapping[str, Leaf], advance: Advance) -> None:
            super().__init__()
            self._leaves, self._advance = leaves, advance

        def lookup_object(self, index: Any) -> Any:
            found = super().lookup_object(index)
            leaf = self._leaves.get(index.fqn)
            if leaf is None:
                return found
            value = leaf.value().to(found.dtype)
            self._advance(value.numel())
            return value

    return LazyPlanner


FORMATS: dict[str, Callable[[Export, Advance], None]] = {
    "transformers": _write_transformers,
    "safetensors": _write_safetensors,
    "pt": _write_pt,
    "dcp": _write_dcp,
    "accelerate": _write_accelerate,
    "lightning": _write_lightning,
}
"""The formats that `--to` accepts, each with the function that writes it."""

OF_TRAINING = ("accelerate", "lightning")
"""Formats that always have the optimizer state."""

WITH_OPTIMIZER = ("pt", "dcp", *OF_TRAINING)
"""Formats that can hold the optimizer state."""


def numel(export: Export) -> int:
    """Return the number of elements that `export` writes, for a progress bar."""
    total = sum(spec.numel for spec in export.specs)
    if export.with_optimizer:
        tensors, _ = export.training
        total += sum(math.prod(spec.shape) for spec in tensors.specs.values())
    return total
