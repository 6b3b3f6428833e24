"""Splits models over the ranks of a replica, gathers full parameters, and restores the models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim

from shardwise.comm import Collectives
from shardwise.errors import ModelError, UsageError
from shardwise.layout.shards import Shard
from shardwise.model.module_hooks import Hooked, attach
from shardwise.parallel.tensor import parallel_layers
from shardwise.parallel.tensor.parallel_layers import TensorParallelModule
from shardwise.parallel.tensor.region_collectives import all_gather_tensors
from shardwise.parallel.tensor.replica import ForwardHooks, Replica
from shardwise.parallel.tensor.replica_randomness import ReplicaRandomness
from shardwise.parallel.tensor.split_rules import ModuleSplit, SplitGroup
from shardwise.parallel.tensor.user_hooks import HookGuard


class TensorParallelModels:
    """The tensor-parallel state of models: their split parameters, and this rank's parts."""

    def __init__(
        self, group: Collectives, device: torch.device, *, sequence_parallel: bool = False
    ) -> None:
        self.replica = Replica(
            group,
            ReplicaRandomness(group.rank, device),
            sequence_parallel,
            hooks=HookGuard(self._name_of),
        )
        self.shards: dict[nn.Parameter, Shard] = {}
        self._split_keys: dict[nn.Parameter, dict[str, bool]] = {}
        """Whether each entry of a parameter's optimizer state is split. State of an optimizer that
        needs full tensors may be full and yet have the shape of a part, so shapes do not tell."""
        self.groups: list[SplitGroup] = []
        self.reasons_unsplit: dict[str, str] = {}
        """Maps modules that a trial rejected to the reason, if it is worth reporting."""
        self._modules: list[TensorParallelModule] = []
        self._models: Sequence[nn.Module] = ()
        self._handles: list[Hooked] = []
        self._versions: dict[nn.Parameter, int] = {}
        """Versions of parameters at the time they were gathered, to detect writes."""
        self.writes = False
        """True if changes to gathered parameters are kept."""

    @property
    def group(self) -> Collectives:
        """The ranks of the replica."""
        return self.replica.group

    # -- cutting --------------------------------------------------------------------------

    def cut(
        self,
        groups: Sequence[SplitGroup],
        models: Sequence[nn.Module],
        optimizers: Iterable[optim.Optimizer],
    ) -> None:
        """Split the models and the optimizers' state as described by `groups`.

        Raises ModelError, before anything is split, if two groups contain the same module, if
        modules share a parameter but split it differently, or if only the output layer of torch's
        attention would be split.
        """
        cuts = [cut for group in groups for cut in group.splits]
        # Check everything first, so that a rejected split leaves the models unchanged.
        shards = self._shards_of(cuts)
        _check_unsplit_modules(shards, {cut.module for cut in cuts}, models)
        self.groups, self.shards, self._models = list(groups), shards, models
        for optimizer in optimizers:
            state: dict[Any, Any] = optimizer.state
            # Moments have the same shape as their parameter, and are split like it. A step count is
            # not split.
            for parameter in [p for p in state if p in shards]:
                state[parameter] = self.part_state(parameter, state[parameter])
        # Assign `.data`, because optimizers and the user hold references to the parameter object.
        with torch.no_grad():
            for parameter, shard in shards.items():
                parameter.data = shard.of(parameter.detach())
        for cut in cuts:
            self._split_module(cut)
        forwards = ForwardHooks(self.replica)
        for model in models:
            self._handles += [
                attach(model.register_forward_pre_hook, forwards.begin),
                # Call it after a failed forward pass too, because its region must be closed.
                attach(model.register_forward_hook, forwards.end, always_call=True),
            ]

    def _name_of(self, module: nn.Module) -> str:
        pairs = (pair for model in self._models for pair in model.named_modules())
        kind = type(module).__name__
        return next((f"{path} ({kind})" for path, each in pairs if each is module), kind)

    def _shards_of(self, cuts: Iterable[ModuleSplit]) -> dict[nn.Parameter, Shard]:
        shards: dict[nn.Parameter, Shard] = {}
        names: dict[nn.Parameter, str] = {}
        seen: set[nn.Module] = set()
        for cut in cuts:
            if cut.module in seen:
                raise ModelError(
                    f"{cut.name} would be split twice: alone, and as a part of the module around "
                    "it. Name only one of the two in tensor_plan."
                )
            seen.add(cut.module)
            for key, (dim, ranges) in cut.tensors.items():
                parameter = cut.module._parameters[key]
                assert parameter is not None
                shard = Shard(tuple(parameter.shape), dim, tuple(ranges), self.group.rank)
                if shards.setdefault(parameter, shard) != shard:
                    raise ModelError(
                        f"{cut.name}.{key} is also {names[parameter]}, and the two are split in "
                        "different ways. Split both in the same way (an embedding by its "
                        "vocabulary, the tied head colwise_rep), or leave both whole."
                    )
                names[parameter] = f"{cut.name}.{key}"
        return shards

    def _split_module(self, cut: ModuleSplit) -> None:
        local: Mapping[str, Any] = (
            cut.local_attributes[self.group.rank] if cut.local_attributes else {}
        )
        parallel_layers.make_tensor_parallel(
            cut.module,
            cut.style,
            self.replica,
            local,
            cut.ranges,
            gather_output=cut.gather_output,
            allowed=cut.allowed,
        )
        assert isinstance(cut.module, TensorParallelModule)
        self._modules.append(cut.module)

    # -- putting together -----------------------------------------------------------------

    def whole(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """Gather the full tensor from each rank's `part`, which is split like `parameter`.

        Collective.
        """
        shard = self.shards[parameter]
        shapes = [shard.part_shape(rank) for rank in range(self.group.size)]
        staged = (
            part.detach()
            if part.device.type != "cpu"
            else part.detach().to(self.group.small_device)
        )
        return shard.joined(all_gather_tensors(staged, self.group, shapes)).to(part.device)

    def whole_of(self, parameter: nn.Parameter) -> Tensor:
        """Return the full value of `parameter`. Differentiable and collective.

        All ranks must use the result in the same way. In the backward pass, each rank receives the
        gradient of its part. Raises UsageError between split layers, where the ranks' computations
        differ.
        """
        shard = self.shards.get(parameter)
        if shard is None:
            return parameter
        if self.replica.in_region:
            raise UsageError(
                f"A parameter of shape {shard.shape} that is split (--tensor {self.group.size}) is "
                "used between two split layers, where each worker has different features. Leave "
                'its module whole with tensor_plan={"...": "whole"}.'
            )
        return self.joined_as(parameter, parameter)

    def joined_as(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """Gather the full tensor from each rank's `part`, split like `parameter`. Differentiable.

        All ranks must use the result in the same way. Returns `part` itself if the parameter is not
        split. Collective.
        """
        shard = self.shards.get(parameter)
        if shard is None:
            return part
        return _GatherParameter.apply(part, self, parameter)  # type: ignore[no-any-return, no-untyped-call]

    def whole_shape(self, parameter: nn.Parameter) -> tuple[int, ...] | None:
        """Return the full shape of a parameter, or None if it is not split."""
        shard = self.shards.get(parameter)
        return None if shard is None else shard.shape

    @contextmanager
    def wholes(
        self,
        chosen: Iterable[nn.Parameter],
        *,
        write: bool,
        group: Collectives | None = None,
        is_here: Callable[[Tensor], bool] = lambda parameter: True,
    ) -> Iterator[None]:
        """Context manager that gathers the split parameters among `chosen`. Collective.

        Inside the block, modules run their unsplit `forward`.

        Args:
            chosen: The parameters to gather. Parameters that are not split are ignored.
            write: True to keep values written inside the block. On exit, they are split again.
            group: If given, the values written by this group's first rank are kept.
            is_here: Only parameters for which it returns True are gathered.
        """
        # Keep the same order on all ranks, because each gather is collective.
        split = [p for p in dict.fromkeys(chosen) if p in self.shards]
        parts = {p: p.data for p in split if is_here(p)}
        with torch.no_grad():
            for parameter in parts:
                parameter.data = self.whole(parameter, parameter.data)
        if split:
            self._set_whole(whole=True)
            self._versions = {parameter: parameter._version for parameter in parts}
            self.writes = write
        try:
            yield
            if write:
                self._split_again(parts, group)
        finally:
            if split:
                self._set_whole(whole=False)
                self._versions = {}
            for parameter, part in parts.items():
                parameter.data = part

    @property
    def is_whole(self) -> bool:
        """True inside a block of `wholes`."""
        return self.replica.is_whole

    def written(self) -> list[nn.Parameter]:
        """Return the gathered parameters that have been written to since `wholes` gathered them."""
        return [p for p, version in self._versions.items() if p._version != version]

    def _split_again(self, parts: Mapping[nn.Parameter, Tensor], group: Collectives | None) -> None:
        with torch.no_grad():
            for parameter, part in parts.items():
                value = parameter.data.contiguous()
                # Ranks may have written different values, for example from a random initialisation.
                if group is not None:
                    group.broadcast(value.view(-1)).wait()
                # Copy into the part's old memory, because flat buckets refer to it.
                part.copy_(self.shards[parameter].of(value))

    def _set_whole(self, *, whole: bool) -> None:
        self.replica.is_whole = whole
        for module in self._modules:
            module.set_sizes(whole=whole)

    def whole_state(self, parameter: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        """Gather the optimizer state `state` of a parameter. Collective."""
        shard = self.shards.get(parameter)
        if shard is None:
            return state
        return {
            key: self.whole(parameter, value) if self.is_split(parameter, key, value) else value
            for key, value in state.items()
        }

    def part_of(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """Return a copy of this rank's part of `whole`, which is split like `parameter`."""
        return self.shards[parameter].of(whole)

    def part_state(self, parameter: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of the full optimizer state `state` of a split parameter."""
        shard = self.shards[parameter]
        shapes = {key: tuple(v.shape) for key, v in state.items() if isinstance(v, Tensor)}
        self.record_shapes(parameter, shapes)
        keys = self._split_keys[parameter]
        return {key: shard.of(v) if keys.get(key) else v for key, v in state.items()}

    def record_shapes(self, parameter: nn.Parameter, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Record which state tensors of a split parameter are split like it.

        Args:
            parameter: A split parameter.
            shapes: Full shapes of its state tensors, by key.
        """
        whole = self.shards[parameter].shape
        keys = self._split_keys.setdefault(parameter, {})
        keys |= {key: shape == whole != () for key, shape in shapes.items()}

    def is_split(self, parameter: nn.Parameter, key: str, value: Any) -> bool:
        """Return whether `value`, entry `key` of a split parameter's state, is split like it."""
        # Only element-wise optimizers create state without a record, and theirs has no other
        # tensors of this shape.
        part = self.shards[parameter].part_shape(self.group.rank)
        default = isinstance(value, Tensor) and tuple(value.shape) == part != ()
        return self._split_keys.get(parameter, {}).get(key, default)

    def share_split_keys(self, group: Collectives, optimizers: Iterable[optim.Optimizer]) -> None:
        """Send the records of `record_shapes` to the ranks in `group`. Collective.

        A rank has records only of the state that it has updated, but may receive other state.
        """
        parameters = [p for o in optimizers for each in o.param_groups for p in each["params"]]
        # Identify parameters by index, which is the same on all ranks.
        known = {n: self._split_keys[p] for n, p in enumerate(parameters) if p in self._split_keys}
        for records in group.gather_objects(known):
            for number, keys in records.items():
                self._split_keys.setdefault(parameters[number], {}).update(keys)

    # -- giving back ----------------------------------------------------------------------

    def undo(
        self,
        optimizers: Iterable[optim.Optimizer],
        is_here: Callable[[Tensor], bool] = lambda parameter: True,
    ) -> None:
        """Restore the full models and optimizer state on every rank. Collective.

        Only parameters for which `is_here` returns True are gathered.
        """
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter in self.shards and parameter in optimizer.state:
                        state = optimizer.state[parameter]
                        optimizer.state[parameter] = self.whole_state(parameter, state)
        with torch.no_grad():
            for parameter in filter(is_here, self.shards):
                parameter.data = self.whole(parameter, parameter.data)
        for module in self._modules:
            parallel_layers.restore(module)
        for handle in self._handles:
            handle.remove()
        self.shards, self._modules, self._split_keys = {}, [], {}


class _GatherParameter(torch.autograd.Function):
    """Gathers a parameter from its parts. All ranks must use it in the same way."""

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, split: TensorParallelModels, parameter: nn.Parameter
    ) -> Tensor:
        ctx.args = split, parameter
        return split.whole(parameter, part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _TakeParameterShard.apply(grad, *ctx.args), None, None  # type: ignore[no-untyped-call]


class _TakeParameterShard(torch.autograd.Function):
    """Returns this rank's part of a full parameter."""

    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, split: TensorParallelModels, parameter: nn.Parameter
    ) -> Tensor:
        ctx.args = split, parameter
        return split.shards[parameter].of(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _GatherParameter.apply(grad, *ctx.args), None, None  # type: ignore[no-untyped-call]


def _check_unsplit_modules(
    shards: Mapping[nn.Parameter, Shard], split: set[nn.Module], models: Iterable[nn.Module]
) -> None:
    """Raise ModelError if an unsplit module uses a split parameter."""
    for path, module in (pair for model in models for pair in model.named_modules()):
        if module in split:
            continue
        for key, parameter in module._parameters.items():
            if parameter in shards:
                raise ModelError(
                    f"{path}.{key} is shared with a split module, but {path} is not split. Split "
                    "both in the same way (an embedding by its vocabulary, the tied head "
                    "colwise_rep), or leave both whole."
                )
        if isinstance(module, nn.MultiheadAttention) and module.out_proj in split:
            raise ModelError(
                f"{path}.out_proj is split, but {path}, which uses its weight, is not. Remove "
                "out_proj from tensor_plan to split both by heads."
            )
