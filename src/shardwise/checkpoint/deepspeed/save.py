"""Reads one DeepSpeed save: the model's tensors, the optimizer, and everything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwise.checkpoint import tensor_names
from shardwise.checkpoint.deepspeed import inert
from shardwise.checkpoint.deepspeed.flat_groups import Shapes, each_by_itself
from shardwise.checkpoint.deepspeed.folders import SaveFiles, as_written, files_of
from shardwise.checkpoint.deepspeed.partitions import (
    STAGE_3,
    FragmentReader,
    Partitions,
    check_count,
    stage_of,
)
from shardwise.errors import BrokenCheckpoint, CheckpointError, CheckpointMismatch

_OF_DEEPSPEED = {
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "sparse_tensor_module_names",
    "csr_tensor_module_names",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "ds_config",
    "ds_version",
    "num_experts",
    "ds_autoep_layers",
    "autoep_layers",
    "universal_checkpoint_info",
}
"""Keys that DeepSpeed writes next to the model. All other keys are the user's client_state."""


class Save:
    """A DeepSpeed save in `folder`, which is the folder of one tag. Tensors are read on demand.

    Attributes:
        model: The model's tensors: in fp32 at stage 3, and otherwise in the dtype of the training.
        optimizer: The optimizer's state_dict at stage 0, or None at other stages.
        partitions: The optimizer's partitions at stages 1 to 3, or None at stage 0.

    Raises:
        CheckpointError: This kind of save is not supported.
        BrokenCheckpoint: Files are missing or truncated.
    """

    def __init__(self, folder: Path) -> None:
        self.files: SaveFiles = files_of(folder)
        with as_written(folder):
            self._read(folder)

    def _read(self, folder: Path) -> None:
        self._models = {rank: _load_map(path) for rank, path in self.files.models.items()}
        self._rank_0 = self._models[0]
        saved: dict[int, dict[str, Any]] = {}
        for rank, path in self.files.optimizers.items():
            optimizer = _load_map(path).get("optimizer_state_dict")
            if not isinstance(optimizer, dict):
                raise BrokenCheckpoint(
                    f"{path} has no optimizer_state_dict. Use another checkpoint."
                )
            saved[rank] = optimizer
        self.stage = stage_of(folder, saved)
        self.partitions: Partitions | None = None
        if saved:
            check_count(folder, saved, len(self._models) if self.stage == STAGE_3 else None)
            self.partitions = Partitions(folder, self.stage, saved, self._shapes())
        elif self._rank_0.get("param_shapes") is not None:
            raise BrokenCheckpoint(
                f"{folder} was saved with ZeRO, but all its *_optim_states.pt are missing. Restore "
                "them, or use another checkpoint."
            )
        self.ranks = len(saved) or self._count("dp_world_size", 1)
        self.optimizer: dict[str, Any] | None = self._rank_0.get("optimizer")
        self.loss_scale = _loss_scale(saved[0] if saved else self.optimizer or {})
        self.model = self._read_model()

    def _count(self, key: str, default: int = 0) -> int:
        count = self._rank_0.get(key, default)
        return count if isinstance(count, int) and count >= 0 else default

    def _shapes(self) -> list[Shapes]:
        shapes = self._rank_0.get("param_shapes")
        if not isinstance(shapes, list) or not all(isinstance(group, dict) for group in shapes):
            raise BrokenCheckpoint(
                f"{self.files.models[0]} does not list the parameters in the optimizer's "
                "partitions (param_shapes). Use another checkpoint."
            )
        return [{str(name): tuple(shape) for name, shape in group.items()} for group in shapes]

    # -- contents other than tensors ------------------------------------------------------

    @property
    def steps(self) -> int:
        """Number of steps, including steps that were skipped because of an overflow."""
        return self._count("global_steps")

    @property
    def counts(self) -> dict[str, int]:
        """DeepSpeed's counters of steps, skipped steps and samples, by name."""
        names = ("global_steps", "skipped_steps", "global_samples")
        return {name: self._count(name) for name in names}

    @property
    def version(self) -> str:
        """Version of DeepSpeed that wrote the save, or "unknown"."""
        return str(self._rank_0.get("ds_version", "unknown"))

    @property
    def scheduler(self) -> Any:
        """State of the learning-rate scheduler, or None."""
        return self._rank_0.get("lr_scheduler")

    @property
    def client_state(self) -> dict[str, Any]:
        """The user's client_state. Objects of unknown classes are Inert records."""
        return {k: value for k, value in self._rank_0.items() if k not in _OF_DEEPSPEED}

    # -- the model ------------------------------------------------------------------------

    def _read_model(self) -> FragmentReader:
        module = self._rank_0.get("module")
        if not isinstance(module, dict):
            raise CheckpointError(
                f"{self.files.models[0]} has no module: it was saved by a pipeline, or by another "
                "program. Save it in a run without a pipeline."
            )
        found = FragmentReader()
        if self.stage == STAGE_3:
            self._read_pieces(found, module)
        else:
            for name, value in module.items():
                if isinstance(value, Tensor):
                    found.add_whole(str(name), value)
        return found

    def _read_pieces(self, found: FragmentReader, module: dict[str, Any]) -> None:
        """Read a stage-3 save, which contains full buffers but only parts of each parameter."""
        for name in self._rank_0.get("buffer_names") or ():
            found.add_whole(name, module[name])
        for name, shape in (self._rank_0.get("frozen_param_shapes") or {}).items():
            pieces = {
                rank: content["frozen_param_fragments"][name]
                for rank, content in self._models.items()
            }
            cuts = each_by_itself({name: tuple(shape)}, len(pieces))[name]
            found.add_cuts(name, tuple(shape), cuts, pieces)
        assert self.partitions is not None
        for group, shapes in enumerate(self.partitions.shapes):
            same = {name: name for name in shapes}
            self.partitions.add(found, group, self.partitions.flats(group), same)
        for name, twin in (self._rank_0.get("shared_params") or {}).items():
            found.add_from(name, found, twin)

    def is_narrow(self, name: str) -> bool:
        """Return whether parameter `name` was trained in a different dtype than its fp32 master."""
        spec = self.model.specs.get(name)
        return spec is not None and spec.dtype != "F32"

    def shape_of(self, name: str, names: Mapping[str, Sequence[str]]) -> tuple[int, ...]:
        """Return the shape of the model's parameter `name` in this save.

        Raises CheckpointMismatch if the parameter is missing.

        Args:
            names: All names of each of the model's tensors, keyed by the first one.
        """
        saved_names = tensor_names.match({name: names.get(name, [name])}, self.model.specs).found
        if name not in saved_names:
            raise CheckpointMismatch(
                f"{self.files.folder} has no {name}, which an optimizer has here. Build the model "
                "that was saved."
            )
        return self.model.specs[saved_names[name]].shape

    @property
    def twins(self) -> dict[str, str]:
        """Map from each alias of a tied weight to its canonical name."""
        shared = self._rank_0.get("shared_params")
        # At stage 3, an empty map means that no weights are tied. At other stages it may be empty
        # even if weights are tied.
        if isinstance(shared, dict) and (shared or self.stage == STAGE_3):
            return dict(shared)
        first: dict[Any, str] = {}
        found = {}
        for name, value in self._rank_0["module"].items():
            if isinstance(value, Tensor) and value.numel():
                place = value.data_ptr(), tuple(value.shape), value.stride()
                # Tied weights share memory after loading, because torch.save stores shared storage
                # once.
                if first.setdefault(place, name) != name:
                    found[name] = first[place]
        return found

    def fp32(self) -> FragmentReader:
        """Return the model's tensors, with fp32 master weights in place of 16-bit parameters.

        A tied weight appears once. The masters in a stage-0 save are not used, because the save
        does not record which parameter each of them belongs to.
        """
        found = FragmentReader()
        masters = FragmentReader()
        if self.partitions is not None and self.stage != STAGE_3:
            for group, shapes in enumerate(self.partitions.shapes):
                same = {name: name for name in shapes}
                self.partitions.add(masters, group, self.partitions.flats(group), same)
        for name in self.model.specs.keys() - self.twins.keys():
            found.add_from(name, masters if name in masters.specs else self.model, name)
        return found


def _load_map(path: Path) -> dict[str, Any]:
    content = inert.load(path)
    if not isinstance(content, dict):
        raise BrokenCheckpoint(f"{path} does not contain a dict. Use another checkpoint.")
    return content


def _loss_scale(saved: dict[str, Any]) -> tuple[float, int] | None:
    """Return the fp16 loss scale and the number of steps since it last changed.

    Returns None if the save has no loss scale.
    """
    scaler = saved.get("loss_scaler")
    state = vars(scaler) if isinstance(scaler, inert.Inert) else saved
    scale = state.get("cur_scale")
    if not isinstance(scale, int | float) or isinstance(scale, bool) or scale <= 0:
        return None
    window = state.get("scale_window")
    if not isinstance(window, int) or window < 1:
        return float(scale), 0
    # DeepSpeed counts steps from the last overflow, and doubles the scale after each `scale_window`
    # steps without an overflow.
    since = int(state.get("cur_iter", 0)) - int(state.get("last_overflow_iter", -1)) - 1
    return float(scale), max(since - 1, 0) % window
