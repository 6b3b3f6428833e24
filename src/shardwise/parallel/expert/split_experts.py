"""Assigns experts to ranks, gathers full parameters, and restores the models.

Every rank keeps the parameter objects of all experts, so that names and order are the same
everywhere. Parameters of other ranks' experts have no elements: each parameter has a `Shard`, which
gives a rank either all rows of dim 0 or none.

    experts.0.up.weight    rank 0  (16, 8)    rank 1  (0, 8)
    experts.1.up.weight    rank 0  (0, 8)     rank 1  (16, 8)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn, optim

from shardwise.comm import Collectives
from shardwise.errors import ModelError
from shardwise.layout.bucket_layout import Span
from shardwise.layout.shards import Shard
from shardwise.parallel.expert.fused_experts import FusedExperts, is_fused, why_not
from shardwise.parallel.expert.moe import MoE
from shardwise.parallel.expert.planned_blocks import PlannedBlock

Layer = MoE | FusedExperts
"""Experts that can be spread over ranks."""


def find_layers(models: Sequence[nn.Module]) -> list[tuple[str, MoE]]:
    """Return the distinct `sw.MoE` layers of `models`, with their names."""
    return [(n, module) for n, module in named_modules(models) if isinstance(module, MoE)]


def named_modules(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once, with a name that is unique across `models`."""
    seen: set[nn.Module] = set()
    for number, model in enumerate(models):
        prefix = f"models[{number}]" if len(models) > 1 else ""
        for path, module in model.named_modules():
            if module not in seen:
                seen.add(module)
                # torch.compile adds `_orig_mod` to module names.
                name = ".".join(part for part in (prefix, path) if part)
                yield name.replace("_orig_mod.", ""), module


def find_fused(models: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return the modules of `models` that hold experts in tensors (E, ...), by name."""
    return {name: module for name, module in named_modules(models) if is_fused(module)}


def unsplit_reasons(fused: Mapping[str, nn.Module]) -> dict[str, str | None]:
    """Map each module's name to why its experts cannot be split, or to None if they can."""
    by_form: dict[object, str | None] = {}
    reasons = {}
    for name, module in fused.items():
        shapes = tuple(p.shape for p in module.parameters())
        form = type(module), shapes, module.training, "forward" in vars(module)
        if form not in by_form:
            by_form[form] = why_not(module)
        reasons[name] = by_form[form]
    return reasons


class ExpertParallelModels:
    """Models whose experts are divided among ranks: frees, gathers and restores the experts.

    Args:
        group: The ranks that together hold every expert once.
        copies: The ranks that hold the same experts as this rank.
    """

    def __init__(self, group: Collectives, copies: Collectives) -> None:
        self.group = group
        self.copies = copies
        self.shards: dict[nn.Parameter, Shard] = {}
        self.layers: list[tuple[str, Layer]] = []
        self.fused: list[tuple[str, FusedExperts]] = []
        """Modules with fused experts that passed a trial, before they are cut."""
        self.planned: list[PlannedBlock] = []
        """Blocks that the user's plan names."""
        self.modules: set[nn.Module] = set()
        """The modules that are split by experts, or route tokens to them."""
        self.reasons_unsplit: dict[str, str] = {}
        """Modules that look like experts but are not split, with the reason."""
        self.is_whole = False
        """True inside a block of `wholes`."""
        self.writes = False
        """True if changes to gathered parameters are kept."""
        self._versions: dict[nn.Parameter, int] = {}
        """Versions of parameters at the time they were gathered, to detect writes."""

    # -- cutting --------------------------------------------------------------------------

    def cut(
        self,
        layers: Sequence[tuple[str, Layer]],
        models: Sequence[nn.Module],
        optimizers: Iterable[optim.Optimizer],
    ) -> None:
        """Free the other ranks' experts and their optimizer state.

        Raises ModelError, before anything changes, if a layer's experts cannot be divided.
        """
        shards: dict[nn.Parameter, Shard] = {}
        spans = {layer: self._spans_of(name, layer) for name, layer in layers}
        for name, layer in layers:
            if isinstance(layer, FusedExperts):
                rows = tuple((span,) for span in spans[layer])
                for parameter in layer.module.parameters():
                    shard = Shard(tuple(parameter.shape), 0, rows, self.group.rank)
                    shards[parameter] = shard
                continue
            for holder, (first, end) in enumerate(spans[layer]):
                for index in range(first, end):
                    expert = layer.experts[index]
                    path = f"{name}.experts.{index}".removeprefix(".")
                    shards |= self._shards_of(path, expert, holder, shards)
        _check_sharing(shards, layers, models)
        self.shards, self.layers = shards, list(layers)
        for optimizer in optimizers:
            state: dict[Any, Any] = optimizer.state
            for parameter in [p for p in state if p in shards]:
                # Without elements there is no state, as for the padding of a bucket.
                if not shards[parameter].own:
                    del state[parameter]
                    continue
                shard = shards[parameter]
                state[parameter] = {
                    # Moments have the parameter's shape, and are split like it. Counts are not.
                    key: shard.of(value) if _has_shape(value, shard.shape) else value
                    for key, value in state[parameter].items()
                }
        with torch.no_grad():
            for parameter, shard in shards.items():
                # Assign `.data`, because optimizers and the user hold the parameter object.
                parameter.data = shard.of(parameter.detach())
        self._set_spans(spans)

    def _spans_of(self, name: str, layer: Layer) -> list[Span]:
        """Return each rank's experts [first, end). The numbers of experts differ by at most 1."""
        number, size = _number_of(layer), self.group.size
        if number < size:
            raise ModelError(
                f"--expert {size}: {name or 'the layer'} has only {number} expert(s), so some "
                f"workers would hold none. Use --expert {number} or less."
            )
        edges = [number * rank // size for rank in range(size + 1)]
        return list(pairwise(edges))

    def _shards_of(
        self, name: str, expert: nn.Module, holder: int, known: Mapping[nn.Parameter, Shard]
    ) -> dict[nn.Parameter, Shard]:
        """Return the shards of an expert's parameters. Rank `holder` holds all rows."""
        for path, _ in expert.named_buffers():
            raise ModelError(
                f"--expert {self.group.size}: {name} has a buffer, {path}, which would differ "
                "between workers. Use experts without buffers (such as BatchNorm's), or start "
                "without --expert."
            )
        shards = {}
        for path, parameter in expert.named_parameters():
            if parameter in known:
                raise ModelError(
                    f"--expert {self.group.size}: {name}.{path} is also a parameter of another "
                    "expert, which another worker may hold. Give each expert its own parameters."
                )
            if not parameter.ndim:
                raise ModelError(
                    f"--expert {self.group.size}: {name}.{path} has no dims. Give it shape (1,)."
                )
            shape = tuple(parameter.shape)
            everything = ((0, shape[0]),)
            ranges = tuple(everything if r == holder else () for r in range(self.group.size))
            shards[parameter] = Shard(shape, 0, ranges, self.group.rank)
        return shards

    def _set_spans(self, spans: Mapping[Layer, list[Span]]) -> None:
        for _, layer in self.layers:
            layer.spans = spans.get(layer, [(0, _number_of(layer))] * self.group.size)
            layer.holds_all = layer not in spans

    # -- gathering ------------------------------------------------------------------------

    def whole(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """Gather the full tensor of `parameter` from each rank's `part`. Collective."""
        shard = self.shards[parameter]
        near = part.detach()
        near = near if part.device.type != "cpu" else near.to(self.group.small_device)
        shapes = [shard.part_shape(rank) for rank in range(self.group.size)]
        edges = [0]
        for shape in shapes:
            edges.append(edges[-1] + torch.Size(shape).numel())
        flat = near.new_empty(edges[-1])
        flat[edges[self.group.rank] : edges[self.group.rank + 1]] = near.reshape(-1)
        self.group.all_gather(flat, edges).wait()
        parts = [flat[a:b].view(s) for (a, b), s in zip(pairwise(edges), shapes, strict=True)]
        return shard.joined(parts).to(part.device)

    @contextmanager
    def wholes(
        self,
        chosen: Iterable[nn.Parameter],
        *,
        write: bool,
        is_here: Callable[[nn.Parameter], bool],
        group: Collectives | None = None,
    ) -> Iterator[None]:
        """Context manager that gathers the expert parameters among `chosen`. Collective.

        Inside the block, each rank runs all experts itself.

        Args:
            chosen: The parameters to gather. Parameters outside experts are ignored.
            write: True to keep values written inside the block.
            is_here: Returns whether this rank's pipeline stage has a parameter. Others stay as they
                are.
            group: If given, the values written by this group's first rank are kept.
        """
        # Keep the same order on all ranks, because each gather is collective.
        split = [p for p in dict.fromkeys(chosen) if p in self.shards and is_here(p)]
        parts = {p: p.data for p in split}
        with torch.no_grad():
            for parameter in parts:
                parameter.data = self.whole(parameter, parameter.data)
        found = any(p in self.shards for p in chosen)
        if found:
            self._gathered(whole=True)
            self._versions = {parameter: parameter._version for parameter in parts}
            self.writes = write
        try:
            yield
            if write:
                self._keep_writes(parts, group)
        finally:
            if found:
                self._gathered(whole=False)
                self._versions = {}
            for parameter, part in parts.items():
                parameter.data = part

    def _gathered(self, *, whole: bool) -> None:
        self.is_whole = whole
        for _, layer in self.layers:
            layer.holds_all = whole

    def written(self) -> list[nn.Parameter]:
        """Return the gathered parameters that have been written to since `wholes` gathered them."""
        return [p for p, version in self._versions.items() if p._version != version]

    def _keep_writes(self, parts: Mapping[nn.Parameter, Tensor], group: Collectives | None) -> None:
        with torch.no_grad():
            for parameter, part in parts.items():
                value = parameter.data.contiguous()
                # Ranks may have written different values, for example from a random initialisation.
                if group is not None:
                    group.broadcast(value.view(-1)).wait()
                # Copy into the part's old memory, because flat buckets refer to it.
                part.copy_(self.shards[parameter].of(value))

    def whole_states(
        self, optimizer: optim.Optimizer, held: Mapping[Any, dict[str, Any]]
    ) -> dict[Any, dict[str, Any]]:
        """Return this rank's optimizer state `held`, extended to all experts. Collective."""
        groups = optimizer.param_groups
        order = [p for group in groups for p in group["params"] if p in self.shards]
        # A rank without elements of a parameter has no state for it, so all ranks learn from its
        # holder which entries there are.
        mine = {
            index: {k: v.cpu() if isinstance(v, Tensor) else v for k, v in held[p].items()}
            for index, p in enumerate(order)
            if p in held and self.shards[p].own
        }
        gathered = self.group.gather_objects(mine)
        states = dict(held)
        for index, parameter in enumerate(order):
            shard = self.shards[parameter]
            parts = {rank: own[index] for rank, own in enumerate(gathered) if index in own}
            if parts:
                states[parameter] = _placed(_joined_state(shard, parts), parameter)
        return states

    # -- restoring ------------------------------------------------------------------------

    def undo(
        self, optimizers: Iterable[optim.Optimizer], is_here: Callable[[nn.Parameter], bool]
    ) -> None:
        """Restore the full models and optimizer state on every rank. Collective.

        Only parameters for which `is_here` returns true are on this rank's pipeline stage.
        """
        for optimizer in optimizers:
            state: dict[Any, Any] = optimizer.state
            state.update(self.whole_states(optimizer, state))
        with torch.no_grad():
            for parameter in filter(is_here, self.shards):
                parameter.data = self.whole(parameter, parameter.data)
        self._set_spans({})
        self.shards, self.layers = {}, []

    def describe(self) -> str:
        """Return a description of the layers, such as "8 experts in each of 2 layers"."""
        numbers = sorted({_number_of(layer) for _, layer in self.layers})
        words = " or ".join(map(str, numbers))
        count = len(self.layers)
        return f"{words} experts in {f'each of {count} layers' if count > 1 else '1 layer'}"


def _number_of(layer: Layer) -> int:
    return layer.number if isinstance(layer, FusedExperts) else len(layer.experts)


def _modules_of(layer: Layer) -> Iterable[nn.Module]:
    """Return the modules that hold the experts' parameters."""
    return (layer.module if isinstance(layer, FusedExperts) else layer.experts).modules()


def _has_shape(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == shape


def _joined_state(shard: Shard, parts: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a full parameter's optimizer state, joined from `parts` (a map of rank to state)."""
    first = next(iter(parts.values()))
    state: dict[str, Any] = {}
    for key, value in first.items():
        rank = next(iter(parts))
        if not _has_shape(value, shard.part_shape(rank)):
            state[key] = value
            continue
        pieces = [
            parts[r][key] if r in parts else value.new_empty(shard.part_shape(r))
            for r in range(len(shard.ranges))
        ]
        state[key] = shard.joined(pieces)
    return state


def _placed(state: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """Return `state` with its tensors on the parameter's device, except scalars (step counts)."""
    return {
        key: value.to(parameter.device) if isinstance(value, Tensor) and value.ndim else value
        for key, value in state.items()
    }


def _check_sharing(
    shards: Mapping[nn.Parameter, Shard],
    layers: Sequence[tuple[str, Layer]],
    models: Sequence[nn.Module],
) -> None:
    """Raise ModelError if an expert's parameter is also used outside that expert."""
    uses: dict[nn.Parameter, int] = {}
    for module in dict.fromkeys(module for model in models for module in model.modules()):
        for parameter in module._parameters.values():
            if parameter is not None and parameter in shards:
                uses[parameter] = uses.get(parameter, 0) + 1
    inside = {module for _, layer in layers for module in _modules_of(layer)}
    for model in models:
        for name, module in model.named_modules(remove_duplicate=False):
            for key, parameter in module._parameters.items():
                tied = parameter is not None and uses.get(parameter, 0) > 1
                if tied or (parameter is not None and parameter in shards and module not in inside):
                    raise ModelError(
                        f"--expert: {name}.{key} is a parameter of an expert, and of another "
                        "module too. Only some workers would hold it: use separate parameters."
                    )
