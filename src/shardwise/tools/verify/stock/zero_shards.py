"""Follows and reads DeepSpeed's ZeRO optimizers, whose states are flat partitions.

A step of DeepSpeed's optimizer calls the torch optimizer inside it once per parameter group, on
this rank's partition of the group (ZeRO 1 and 2), or once per sub-group (ZeRO 3, which splits each
parameter):

                first.weight | first.bias | last.weight | last.bias
    ZeRO 1, 2   rank 0                      | rank 1
    ZeRO 3      rank 0, rank 1 | 0, 1      | 0, 1       | 0, 1
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

ENGINE = "deepspeed.runtime.engine"
KINDS = (
    ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"),
    ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
)
"""Modules and names of the supported optimizers."""

PER_RANK = "train_micro_batch_size_per_gpu"

_NARROW = ("fp16", "bf16", "amp", "torch_autocast")
"""Sections of DeepSpeed's configuration that enable a narrower dtype."""


def kinds() -> tuple[type, ...]:
    """Return the supported optimizer classes that have been imported."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in KINDS)
    return tuple(kind for kind in found if kind is not None)


def after_import(act: Callable[[], None]) -> None:
    """Call `act` when the script has imported DeepSpeed's engine, or now if it already has."""
    if ENGINE in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _AfterImport(act))


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads DeepSpeed's engine as usual, and then calls a function."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != ENGINE:
            return None
        sys.meta_path.remove(self)  # the next finder finds the real module
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._act()


def follow(before: Callable[[Any], None], after: Callable[[Any], None]) -> None:
    """Call `before` and `after` with the optimizer in each of its steps."""

    def patch() -> None:
        for module, name in KINDS:
            kind = getattr(importlib.import_module(module), name)
            kind.step = _followed(kind.step, before, after)

    after_import(patch)


def _followed(
    plain: Callable[..., Any], before: Callable[[Any], None], after: Callable[[Any], None]
) -> Callable[..., Any]:
    @wraps(plain)
    def step(zero: Any, *args: Any, **kwargs: Any) -> Any:
        before(zero)
        result = plain(zero, *args, **kwargs)
        after(zero)
        return result

    return step


def widen() -> None:
    """Make DeepSpeed compute in fp64: parameters, master weights, gradients and reductions."""

    def patch() -> None:
        engine: Any = sys.modules[ENGINE]
        engine.DeepSpeedEngine.get_data_types = lambda this: (torch.float64, torch.float64)
        _change_config(_disable_narrow)
        for module, name in KINDS:
            kind: Any = getattr(importlib.import_module(module), name)
            kind._configure_master_weights = _returns_fp64(kind._configure_master_weights)
            kind.__init__ = _accepts_fp64(kind.__init__)
        context: Any = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
        init = context.InsertPostInitMethodToModuleSubClasses
        init.__init__ = _partitions_in_fp64(init.__init__)

    after_import(patch)


def _disable_narrow(section: dict[str, Any]) -> None:
    section |= {name: {"enabled": False} for name in _NARROW if name in section}
    for name in ("communication_data_type", "data_types"):
        section.pop(name, None)


def _returns_fp64(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def configured(*args: Any, **kwargs: Any) -> torch.dtype:
        plain(*args, **kwargs)
        return torch.float64

    return configured


def _accepts_fp64(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def built(*args: Any, **kwargs: Any) -> None:
        # With reduce_scatter, DeepSpeed refuses to reduce in fp64. The sums are the same.
        init(*args, **kwargs | {"reduce_scatter": False, "communication_data_type": torch.float64})

    return built


def _partitions_in_fp64(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def built(this: Any, *args: Any, **kwargs: Any) -> None:
        init(this, *args, **kwargs | {"dtype": torch.float32})  # it refuses fp64
        this.dtype = torch.float64

    return built


def join_ranks(window: int) -> None:
    """Make the batch of one process in DeepSpeed's configuration as large as those of all ranks.

    DeepSpeed checks that the total batch is the product of the batch per rank, the accumulation
    steps and the number of ranks.

    Args:
        window: Number of accumulation steps on the ranks.
    """

    def change(section: dict[str, Any]) -> None:
        total = section.get("train_batch_size")
        if isinstance(total, int) and isinstance(section.get(PER_RANK), int):
            section |= {PER_RANK: total // window, "gradient_accumulation_steps": window}

    after_import(lambda: _change_config(change))


def _change_config(change: Callable[[dict[str, Any]], None]) -> None:
    """Let `change` edit each configuration before DeepSpeed reads it."""
    kind: Any = importlib.import_module("deepspeed.runtime.config").DeepSpeedConfig
    plain: Callable[..., None] = kind._initialize_params

    @wraps(plain)
    def initialised(config: Any, section: dict[str, Any]) -> None:
        changed = dict(section)
        change(changed)
        plain(config, changed)

    kind._initialize_params = initialised


def gradients(zero: Any) -> Iterator[Tensor]:
    """Yield the reduced gradients that this rank is about to clip and use."""
    for group in zero.averaged_gradients.values():
        yield from group or ()
    # With an optimizer on the CPU, they are already in the partitions.
    name = next(
        n
        for n in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")
        if hasattr(zero, n)
    )
    yield from (flat.grad for flat in getattr(zero, name) if flat.grad is not None)


class Fragment(NamedTuple):
    """This rank's part of a parameter.

    Args:
        flat: The partition that contains it.
        start: Its first element in the partition.
        length: Its number of elements.
        offset: Its first element in the parameter.
        group: The ranks that hold the parameter's fragments.
    """

    flat: Tensor
    start: int
    length: int
    offset: int
    group: Any


class ZeroShards:
    """Reads full parameters, gradients and states of a ZeRO optimizer.

    Args:
        zero: The optimizer.
    """

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self._splits_parameters = hasattr(zero, "fp32_partitioned_groups_flat")
        self._gradients: dict[int, Tensor] = {}

    @property
    def parameters(self) -> list[Tensor]:
        """The model's parameters."""
        groups = self._zero.fp16_groups if self._splits_parameters else self._zero.bit16_groups
        return [parameter for group in groups for parameter in group]

    @property
    def window(self) -> int:
        """Number of accumulation steps."""
        return int(self._zero.gradient_accumulation_steps)

    def keep_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the gradients that the torch optimizer inside is about to use."""
        for group in optimizer.param_groups:
            for flat in group["params"]:
                if flat.grad is not None:
                    self._gradients[id(flat)] = flat.grad.clone()

    def forget_gradients(self) -> None:
        """Drop the copies that `keep_gradients` has made."""
        self._gradients = {}

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the full gradient of the last step. Collective."""
        return self._full(parameter, lambda flat: self._gradients.get(id(flat)))

    def value(self, parameter: Tensor) -> Tensor:
        """Return the full parameter. Collective for ZeRO 3."""
        if not self._splits_parameters:
            return parameter.detach()
        full = self._full(parameter, lambda flat: flat.detach())
        assert full is not None
        return full

    def state(self, parameter: Tensor) -> Iterator[tuple[str, Any]]:
        """Yield each state of a parameter. Collective."""
        flat = self._fragment(parameter).flat
        for key, value in self._zero.optimizer.state.get(flat, {}).items():
            if isinstance(value, Tensor) and value.shape == flat.shape:
                yield key, self._full(parameter, partial(self._of_flat, key))
            else:
                yield key, value

    def clip_words(self) -> str:
        """Return the last step's norm, limit and number of parameters, or "" without clipping."""
        limit, norm = float(self._zero.clip_grad), self._zero._global_grad_norm
        return f" {float(norm)!r} {limit!r} {len(self.parameters)}" if limit else ""

    def _of_flat(self, key: str, flat: Tensor) -> Tensor:
        value: Tensor = self._zero.optimizer.state[flat][key]
        return value

    def _fragment(self, parameter: Any) -> Fragment:
        zero = self._zero
        if self._splits_parameters:
            number, start, count = zero.grad_position[zero.get_param_id(parameter)]
            group = parameter.ds_process_group
            offset = count * torch.distributed.get_rank(group)
            return Fragment(zero.fp32_partitioned_groups_flat[number], start, count, offset, group)
        number = next(
            n for n, each in enumerate(zero.bit16_groups) if any(p is parameter for p in each)
        )
        flat, group = (
            zero.single_partition_of_fp32_groups[number],
            zero.real_dp_process_group[number],
        )
        mapping = parameter._hp_mapping
        if mapping is None:  # other ranks hold all of it
            return Fragment(flat, 0, 0, 0, group)
        inside, outside = mapping.hp_fragment_address, mapping.lp_fragment_address
        return Fragment(flat, inside.start, inside.numel, outside.start, group)

    def _full(self, parameter: Any, read: Callable[[Tensor], Tensor | None]) -> Tensor | None:
        """Add up all ranks' fragments of what `read` returns for a partition. Collective."""
        part = self._fragment(parameter)
        values = read(part.flat)
        if values is None:
            return None
        shape = getattr(parameter, "ds_shape", parameter.shape)
        # ZeRO 3's last fragment ends with padding.
        size = max(shape.numel(), part.length * torch.distributed.get_world_size(part.group))
        full = values.new_zeros(size if self._splits_parameters else shape.numel())
        full[part.offset : part.offset + part.length] = values[
            part.start : part.start + part.length
        ]
        # Not torch.distributed.all_reduce, which the recorder follows in the script.
        distributed_c10d.all_reduce(full, group=part.group)
        return full[: shape.numel()].view(shape)
