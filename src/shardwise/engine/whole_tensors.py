"""Provides full parameters to read, write or export, under any placement."""

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
        if write and not spec.takes_writes:
            raise UsageError(
                "full_parameters(write=True) of split layers inside full_parameters(): pass "
                "write=True to the outer block."
            )
        yield  # already gathered; the outer block stores the writes
        return
    shown = states.shown
    written: set[int] = set()
    if module is not None and (
        spec.pipeline is not None or any(spec.shard_of(p) is not None for p in module.parameters())
    ):
        # A forward pass runs all layers either unsplit or split, so gather all of them.
        module = None
    # Writes into leaves that require gradients are allowed inside, as in plain PyTorch.
    with torch.no_grad():
        numbers = unit_assignment.units_in(shown.sections, module) if shown is not None else []
        if write and shown is not None and shown.residency.in_block:
            if not shown.residency.is_writable(numbers):
                raise UsageError(
                    "full_parameters(write=True) inside a full_parameters() block that is "
                    "read-only, or that gathers another part of the model: pass write=True and "
                    "the same module to the outer block, or leave it first."
                )
            yield  # the outer block stores the writes
            return
        whole: Any = nullcontext({})
        if shown is not None:
            whole = shown.residency.whole(numbers, write=write)
        with whole as buckets:
            group = _writers(spec, states)
            with _joined(spec, module, group, write=write):  # unsplits the layers
                yield
                if not write:
                    _check_unwritten(spec, states)
            if not write and shown is not None:
                shown.residency.check_unwritten(buckets)
            elif write:
                states.parameters.check_places()
                written = _spread_writes(spec, states, group)
                states.parameters.meet()
                for slab, flat in buckets.items():
                    if spec.placement.is_sharded("parameters"):  # otherwise they have no masters
                        written |= set(slab.written(flat))
                    slab.store(flat)
        if write:
            states.parameters.settle()
            states.optimizer.refresh_masters(written)
            # `settle` has recorded the writes, so the next step would not find them.
            if shown is None and states.copies is not None:
                states.copies.take_in_writes(written)


def _writers(spec: EngineSpec, states: States) -> Collectives:
    """Return the group in which the first rank broadcasts after a write.

    The group consists of all ranks or, once islands have taken a step, of this island's ranks.
    """
    has_own = states.hooks is not None and states.hooks.have_own_weights
    return spec.step_group if has_own else spec.world_group


def _spread_writes(spec: EngineSpec, states: States, group: Collectives) -> set[int]:
    """Broadcast unsplit parameters and buffers from the first rank of `group`. Collective.

    Returns the indices of the parameters that user code has written to.
    """
    if spec.pipeline is not None:  # `_joined` has broadcast them while each rank had all stages
        return set(range(len(states.parameters.named)))
    written: set[int] = group.gather_objects(states.parameters.written())[0]
    # Skip released parameters: they hold NaN.
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
    """Context manager that gathers the full model if it is split within a replica.

    Does nothing unless `here` is true. If `write` is true, all ranks of `group` end up with the
    values of its first rank.
    """
    if not here:
        yield
        return
    line, split = spec.pipeline, spec.tensor
    several = spec.models if module is None else (module,)
    # Collect these before the layers are unsplit, while they still have their split parameters.
    parameters = [p for each in several for p in each.parameters()]
    with ExitStack() as stack:
        if line is not None or any(spec.shard_of(p) is not None for p in parameters):
            stack.enter_context(spec.parameter_uses.suspended())
        if split is not None:
            whom = group if write and line is None else None
            stack.enter_context(
                split.wholes(parameters, write=write, group=whom, is_here=spec.is_here)
            )
        if spec.experts is not None:
            whom = group if write and line is None else None
            stack.enter_context(
                spec.experts.wholes(parameters, write=write, group=whom, is_here=spec.is_here)
            )
        if line is not None:
            shapes = {p: s.shape for p in parameters if (s := spec.shard_of(p)) is not None}
            stack.enter_context(
                line.ownership.wholes(spec.models[0], parameters, shapes, write=write)
            )
        yield
        # Broadcast while every rank has all stages. Later each rank could send only its own.
        if write and line is not None:
            initial_values.make_alike(consistency.everything(spec), group)


def _check_unwritten(spec: EngineSpec, states: States) -> None:
    """Raise BrokenView on all ranks if a split parameter was written to in a read-only block.

    Collective.
    """
    splits = [split for split in (spec.tensor, spec.experts) if split is not None]
    if not splits:
        return
    mine = [
        (named.name, split.group.size)
        for split in splits
        if (written := set(split.written()))
        for named in spec.located()
        if named.parameter in written
    ]
    for name, size in itertools.chain.from_iterable(spec.step_group.gather_objects(mine)):
        if states.shown is not None:
            states.parameters.remember()  # do not report the same write again
        raise BrokenView(
            f"{name} is split over {size} ranks, and was written to in a "
            "read-only block, so the write is lost. To write parameters: with "
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
                reason = failure_report.os_error_sentence(error, Path(path))
                raise CheckpointError(f"The model was not exported. {reason}") from None


def model_state_dict(spec: EngineSpec, states: States, model: nn.Module | None) -> dict[str, Any]:
    """See Engine.model_state_dict."""
    with _on_the_first(spec, states, model, "model_state_dict(model)") as whole:
        return plain_state(whole) if spec.world_group.rank == 0 else {}


@contextmanager
def _on_the_first(
    spec: EngineSpec, states: States, model: nn.Module | None, call: str
) -> Iterator[nn.Module]:
    """Context manager that gathers the full `model` (default: the only one) on rank 0.

    Collective.
    """
    if model is None:
        if len(spec.models) != 1:
            raise UsageError(f"This engine has several models: pass one, engine.{call}.")
        model = spec.models[0]
    # Other replicas participate in the gathers, but don't need to hold the full model.
    # The first replica, or the first replicas that together hold every expert.
    holders = 1 if spec.experts is None else spec.experts.group.size // spec.tensor_size
    shown, here = states.shown, spec.data_group.rank < holders
    if spec.is_whole:
        whole: Any = nullcontext()
        here = False
    elif shown is None:
        whole = nullcontext()
    else:
        whole = shown.residency.whole(unit_assignment.units_in(shown.sections, model), here=here)
    with whole, _joined(spec, model, spec.step_group, write=False, here=here):
        yield model
