"""From the user's models and optimizers to the three states, and back again for a rebuild."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn, optim

from shardwise import layout
from shardwise.collectives import Collectives
from shardwise.config import Settings
from shardwise.engine import habits
from shardwise.errors import ModelError, ModelMismatch
from shardwise.model.precision import NARROW
from shardwise.placement import Placement
from shardwise.states.averages import Averages
from shardwise.states.gathering import Gathering
from shardwise.states.gradients import Gradients
from shardwise.states.optimizer_state import GroupOf, OptimizerState
from shardwise.states.optimizer_trial import examine
from shardwise.states.parameters import ReplicatedParameters, Tracked, locate


@dataclass(frozen=True)
class Recipe:
    """What the states are made from; the same after a rebuild."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[optim.Optimizer, ...]
    placement: Placement
    settings: Settings
    group: Collectives

    @cached_property
    def prefixes(self) -> tuple[str, ...]:
        """What stands before the names of each model: nothing when there is one."""
        several = len(self.models) > 1
        return tuple(f"models[{i}]" if several else "" for i in range(len(self.models)))

    def located(self) -> list[Tracked]:
        """Every parameter of the models, and those that only an optimizer knows."""
        found = locate(self.models, self.prefixes)
        known = {tracked.parameter for tracked in found}
        for number, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                for index, parameter in enumerate(group["params"]):
                    if parameter not in known:
                        known.add(parameter)
                        found.append(Tracked(f"optimizers[{number}].params[{index}]", parameter))
        return found

    def shape(self) -> list[Any]:
        """What a change of means that the states must be rebuilt."""
        counts = [len(g["params"]) for o in self.optimizers for g in o.param_groups]
        return counts + [p.requires_grad for m in self.models for p in m.parameters()]


@dataclass(frozen=True)
class States:
    """The three states of training, laid out and connected, and the average where one is kept."""

    parameters: ReplicatedParameters
    gradients: Gradients
    optimizer: OptimizerState
    gathering: Gathering
    averages: Averages | None

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, gradients, optimizer state and averages on this rank now."""
        flats = sum(flat.numel() * flat.element_size() for flat in self.parameters.flats)
        averages = self.averages.state_bytes if self.averages is not None else 0
        return flats + self.gradients.reduction.state_bytes + self.optimizer.state_bytes + averages

    def expected_bytes(self, moments: int) -> int:
        """The same once the optimizer has `moments` state tensors for each master element."""
        later = sum(
            moments * part.master.numel() * part.master.element_size()
            for part in self.optimizer.parts
        )
        masters = sum(
            part.master.numel() * part.master.element_size()
            for part in self.optimizer.parts
            if part.master is not part.target
        )
        return self.state_bytes - self.optimizer.state_bytes + masters + later


def assemble(
    recipe: Recipe,
    masters: Mapping[nn.Parameter, Tensor],
    averages: Mapping[nn.Parameter, Tensor] | None = None,
) -> States:
    """Lay out and take over what `recipe` names.

    `masters` are values in the master dtype for 16-bit parameters, where they are known better
    than the parameters themselves say; `averages` those to go on with.
    """
    owners = _owners(recipe)
    located = recipe.located()
    tracked = [t for t in located if t.parameter in owners and t.parameter.requires_grad]
    _check_trainable(located, tracked, main=recipe.group.rank == 0)
    buckets = _buckets(recipe, tracked, owners)
    parameters = ReplicatedParameters(tracked, buckets, recipe.group)
    scattered = recipe.placement.is_sharded("optimizer")
    gradients = Gradients(
        parameters,
        recipe.placement,
        recipe.group,
        overlap=recipe.settings.overlap,
        exact_sum=recipe.settings.reduce_dtype == "fp32",
        stray=habits.stray_backward,
    )
    own = [rest.own for rest in gradients.reduction.rests]
    groups = [owners[tracked[bucket.slots[0].parameter].parameter] for bucket in buckets]
    separate = [_master(parameters, i, own[i], masters) for i in range(len(buckets))]
    optimizer = OptimizerState(parameters, groups, own, separate)
    decay = recipe.settings.ema_decay
    return States(
        parameters,
        gradients,
        optimizer,
        Gathering(parameters, optimizer, recipe.group, scattered=scattered),
        None
        if decay is None
        else Averages(parameters, optimizer, decay, scattered=scattered, start=averages),
    )


def disassemble(
    recipe: Recipe, states: States
) -> tuple[dict[Any, Tensor], dict[Any, Tensor] | None]:
    """Give everything back to the user's objects; returns masters and averages by parameter."""
    masters = states.gathering.masters()
    averages = states.gathering.tensors(states.averages.tensors) if states.averages else None
    for parameter, state in states.gathering.optimizer_state().items():
        for face in recipe.optimizers:
            if any(parameter is p for group in face.param_groups for p in group["params"]):
                face.state[parameter] = state
    states.gradients.detach()
    states.parameters.release()
    return masters, averages


def _owners(recipe: Recipe) -> dict[nn.Parameter, GroupOf]:
    """Which group trains each parameter. Raises ModelError for one in two groups, and for an
    optimizer that cannot work where its state is sharded."""
    owners: dict[nn.Parameter, GroupOf] = {}
    for face in recipe.optimizers:
        for index, options in enumerate(face.param_groups):
            if not options["params"]:
                continue
            kind = examine(face, options, options["params"][0].device)
            if not kind.separable and recipe.placement.is_sharded("optimizer"):
                raise ModelError(
                    f"{type(face).__name__} looks across tensors, so its state cannot be sharded "
                    f"({recipe.placement.name}). Train it with --zero 0, or choose an optimizer "
                    "that treats each tensor by itself."
                )
            for parameter in options["params"]:
                if parameter in owners:
                    raise ModelError(
                        f"A parameter of shape {tuple(parameter.shape)} is in two parameter groups "
                        f"({type(owners[parameter].face).__name__} and {type(face).__name__}): "
                        "give each parameter to one optimizer."
                    )
                owners[parameter] = GroupOf(face, index, kind)
    return owners


def _check_trainable(located: Sequence[Tracked], tracked: Sequence[Tracked], *, main: bool) -> None:
    if not any(t.parameter.requires_grad for t in located):
        raise ModelError(
            "The model has no trainable parameter (all have requires_grad=False, or there are "
            "none): there is nothing for the engine to train."
        )
    if not tracked:
        raise ModelError(
            "No optimizer holds a trainable parameter of the model: pass model.parameters() to it."
        )
    lost = [t.name for t in located if t.parameter.requires_grad and t not in tracked]
    if lost and main:
        warnings.warn(
            f"{len(lost)} trainable parameter(s) are in no optimizer and will not be trained: "
            f"{', '.join(lost[:5])}{' ...' if len(lost) > 5 else ''}.",
            stacklevel=4,
        )


def _buckets(
    recipe: Recipe, tracked: Sequence[Tracked], owners: Mapping[nn.Parameter, GroupOf]
) -> list[layout.Bucket]:
    specs = []
    for t in tracked:
        parameter, owner = t.parameter, owners[t.parameter]
        face = recipe.optimizers.index(owner.face)
        specs.append(
            layout.Spec(
                name=t.name,
                numel=parameter.numel(),
                itemsize=parameter.element_size(),
                key=(face, owner.index, parameter.dtype, parameter.device),
                whole=not owner.kind.elementwise,
            )
        )
    capacity = int(recipe.settings.bucket_mb * 2**20)
    buckets = layout.lay_out(specs, ranks=recipe.group.size, capacity=capacity)
    layout.check(buckets, specs, recipe.group.size)
    return buckets


def _master(
    parameters: ReplicatedParameters,
    index: int,
    own: tuple[int, int],
    known: Mapping[nn.Parameter, Tensor],
) -> Tensor | None:
    """The fp32 master of bucket `index`, where its parameters are 16-bit."""
    flat, bucket = parameters.flats[index], parameters.buckets[index]
    if flat.dtype not in NARROW:
        return None
    whole = flat.float()
    for slot in bucket.slots:
        parameter = parameters.tracked[slot.parameter].parameter
        if parameter in known:
            view = whole.as_strided(parameter.shape, parameter.stride(), slot.start)
            view.copy_(known[parameter])
    return whole[own[0] : own[1]].clone()


def check_same_model(recipe: Recipe) -> None:
    """Raise ModelMismatch, on all ranks alike, where ranks built different models."""
    mine = _description(recipe)
    all_of_them = recipe.group.gather_objects(hash_of(mine))
    if len(set(all_of_them)) == 1:
        return
    lists = recipe.group.gather_objects(mine)
    for rank, other in enumerate(lists):
        if other != lists[0]:
            here, there = _first_difference(lists[0], other)
            raise ModelMismatch(
                f"Ranks built different models. The first difference: rank 0 has {here}, "
                f"rank {rank} has {there}. Build the model alike on all ranks."
            )


def hash_of(lines: Sequence[str]) -> str:
    """A short digest of `lines`."""
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _description(recipe: Recipe) -> list[str]:
    lines = [
        f"{t.name} {tuple(t.parameter.shape)} {t.parameter.dtype}"
        f"{'' if t.parameter.requires_grad else ' frozen'}"
        for t in recipe.located()
    ]
    for prefix, model in zip(recipe.prefixes, recipe.models, strict=True):
        lines += [
            f"buffer {prefix}{name} {tuple(buffer.shape)} {buffer.dtype}"
            for name, buffer in model.named_buffers()
        ]
    for optimizer in recipe.optimizers:
        for group in optimizer.param_groups:
            lines.append(f"{type(optimizer).__name__} with {len(group['params'])} parameters")
    return lines


def _first_difference(mine: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    for a, b in zip(mine, other, strict=False):
        if a != b:
            return a, b
    longer = mine if len(mine) > len(other) else other
    extra = longer[min(len(mine), len(other))]
    return (extra, "nothing there") if longer is mine else ("nothing there", extra)


def everything(recipe: Recipe) -> list[Tensor]:
    """The parameters and buffers of all models, trained or not."""
    buffers = [buffer for model in recipe.models for buffer in model.buffers()]
    return [*(tracked.parameter for tracked in recipe.located()), *buffers]


def make_alike(tensors: Iterable[Tensor], group: Collectives) -> None:
    """Give every rank rank 0's values of `tensors`. Collective."""
    if group.size == 1:
        return
    with torch.no_grad():
        for tensor in tensors:
            value = tensor.detach().contiguous().clone().view(-1)
            if value.numel():
                group.broadcast(value.view(torch.uint8)).wait()
                tensor.copy_(value.view(tensor.shape))
