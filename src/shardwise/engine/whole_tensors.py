"""Makes parameters whole for the user, to read, write or export, whatever the placement."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.export import plain_state, write_model
from shardwise.comm import Collectives
from shardwise.engine import consistency, initial_values, unit_assignment
from shardwise.engine.build import States
from shardwise.engine.engine_spec import EngineSpec
from shardwise.errors import BrokenView, CheckpointError, UsageError
from shardwise.launch import failure_report


@contextmanager
def full_parameters(
    spec: EngineSpec, states: States, module: nn.Module | None, *, write: bool
) -> Iterator[None]:
    """See Engine.full_parameters."""
    if spec.is_whole:
        _check_inner(write=write, outer=spec.takes_writes)
        yield  # all is whole already; what is written here is the outer block's to take in
        return
    shown = states.shown
    written: set[int] = set()
    if module is not None and (
        spec.pipeline is not None or any(spec.shard_of(p) is not None for p in module.parameters())
    ):
        module = None  # forwards are the plain ones everywhere or nowhere
    with torch.no_grad():
        numbers = unit_assignment.units_in(shown.sections, module) if shown is not None else []
        if write and shown is not None and shown.residency.in_block:
            _check_writable(shown.residency.is_writable(numbers))
            yield  # what is written here is the outer block's to store
            return
        whole: Any = nullcontext({})
        if shown is not None:
            whole = shown.residency.whole(numbers, write=write)
        with whole as buckets:
            group = _writers(spec, states)
            with _joined(spec, module, group, write=write):
                yield
                if not write:
                    _check_unwritten(spec, states)
            if not write and shown is not None:
                shown.residency.check_unwritten(buckets)
            elif write:
                states.parameters.check_places()
                written = _made_alike(spec, states, group)
                states.parameters.meet()
                for slab, flat in buckets.items():
                    written |= set(slab.written(flat))
                    slab.store(flat)
        if write:
            states.parameters.settle()
            states.optimizer.refresh_masters(written)


def _writers(spec: EngineSpec, states: States) -> Collectives:
    """The ranks that what the first of them writes is for: all, but where islands make steps of
    their own those of this island, from its first step on."""
    has_own = states.islands is not None and states.islands.begun
    return spec.step_group if has_own else spec.world_group


def _made_alike(spec: EngineSpec, states: States, group: Collectives) -> set[int]:
    """Give every rank of `group` its first one's values of what is whole; which parameters were
    written to."""
    if spec.pipeline is not None:  # done while all of it was there
        return set(range(len(states.parameters.named)))
    written: set[int] = group.gather_objects(states.parameters.written())[0]
    resting = [] if states.shown is None else states.shown.residency.resting()
    kept = [t for t in consistency.everything(spec) if spec.shard_of(t) is None]
    initial_values.make_alike([t for t in kept if not any(t is r for r in resting)], group)
    return written


@contextmanager
def _joined(
    spec: EngineSpec,
    module: nn.Module | None,
    group: Collectives,
    *,
    write: bool,
    here: bool = True,
) -> Iterator[None]:
    """Inside the block a model that a replica has in parts is whole, where wanted `here`; what the
    first of `group` writes is for all of it."""
    if not here:
        yield
        return
    line, split = spec.pipeline, spec.tensor
    several = spec.models if module is None else (module,)
    parameters = [p for each in several for p in each.parameters()]
    with ExitStack() as stack:
        if line is not None or any(spec.shard_of(p) is not None for p in parameters):
            stack.enter_context(spec.parameter_uses.suspended())
        if split is not None:
            whom = group if write and line is None else None
            stack.enter_context(
                split.wholes(parameters, write=write, group=whom, is_here=spec.is_here)
            )
        if line is not None:
            shapes = {p: s.shape for p in parameters if (s := spec.shard_of(p)) is not None}
            stack.enter_context(
                line.ownership.wholes(spec.models[0], parameters, shapes, write=write)
            )
        yield
        if write and line is not None:
            initial_values.make_alike(consistency.everything(spec), group)


def _check_inner(*, write: bool, outer: bool) -> None:
    """Raise UsageError for a block that is to write inside one that is not."""
    if write and not outer:
        raise UsageError(
            "full_parameters(write=True) inside full_parameters() of layers that are split: give "
            "the outer block write=True."
        )


def _check_writable(writable: bool) -> None:
    """Raise UsageError for a block that is to write more than the block around it may."""
    if not writable:
        raise UsageError(
            "full_parameters(write=True) inside a full_parameters() block that is there to read, "
            "or that has a part of the model: give the outer block write=True and the same "
            "module, or leave it before."
        )


def _check_unwritten(spec: EngineSpec, states: States) -> None:
    """Raise BrokenView, on all ranks alike, where a split parameter was written to."""
    if spec.tensor is None:
        return
    written = set(spec.tensor.written())
    mine = [named.name for named in spec.located() if named.parameter in written]
    for name in itertools.chain.from_iterable(spec.step_group.gather_objects(mine)):
        if states.shown is not None:
            states.parameters.remember()  # told once
        raise BrokenView(
            f"{name} is split over {spec.tensor.group.size} ranks and was written while it was "
            "whole to be read, which reaches nothing. To write parameters: with "
            "engine.full_parameters(write=True)."
        )


def export(
    spec: EngineSpec, states: States, path: str | PathLike[str], model: nn.Module | None
) -> None:
    """See Engine.export."""
    with _on_the_first(spec, states, model, "export(path, model)") as whole:
        if spec.world_group.rank == 0:
            try:
                write_model(whole, Path(path))
            except OSError as error:
                said = failure_report.os_error_sentence(error, Path(path))
                raise CheckpointError(f"The model was not exported. {said}") from None


def model_state_dict(spec: EngineSpec, states: States, model: nn.Module | None) -> dict[str, Any]:
    """See Engine.model_state_dict."""
    with _on_the_first(spec, states, model, "model_state_dict(model)") as whole:
        return plain_state(whole) if spec.world_group.rank == 0 else {}


@contextmanager
def _on_the_first(
    spec: EngineSpec, states: States, model: nn.Module | None, call: str
) -> Iterator[nn.Module]:
    """Inside the block `model` (default: the only one) is whole on rank 0. Collective."""
    if model is None:
        if len(spec.models) != 1:
            raise UsageError(f"This engine has several models: say which, engine.{call}.")
        model = spec.models[0]
    shown, here = states.shown, spec.data_group.rank == 0  # the first replica
    if spec.is_whole:
        whole: Any = nullcontext()
        here = False
    elif shown is None:
        whole = nullcontext()
    else:
        whole = shown.residency.whole(unit_assignment.units_in(shown.sections, model), here=here)
    with whole, _joined(spec, model, spec.step_group, write=False, here=here):
        yield model
