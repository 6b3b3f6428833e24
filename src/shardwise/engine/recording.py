"""Records the results of every engine step, for `shardwise verify` (--record-tensors).

Recording has no cost without the flag. With it, all of this rank's tensors are read after each
step, as a checkpoint would store them. The records therefore do not depend on the placement.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.spec_view import SpecView
from shardwise.checkpoint.tensor_spans import ReportedState, StoredTensors, state_name
from shardwise.checkpoint.tensors import EngineTensors
from shardwise.engine.engine_spec import EngineSpec
from shardwise.engine.engine_state import EngineState
from shardwise.model.module_records import ForwardInputs, Named, other_tensors
from shardwise.states.step_totals import StepStats
from shardwise.world.sequence_parts import lengths_of
from shardwise.world.tensor_log import Part, TensorLog


class Recording:
    """Writes records of an engine's steps to `folder`.

    The constructor and `stepped` are collective, because listing the tensors is.
    """

    def __init__(self, state: EngineState, folder: Path) -> None:
        self._state = state
        self._world = world = state.world
        self._log = TensorLog(folder, world.rank)
        self._inputs = ForwardInputs(
            _named(state.spec), lambda: world.current_batch.batch, recorded=self._records
        )
        self._rows = 0
        self._log.note("rank", {"driver": "engine"})
        # Record step 0, the state before training.
        self._write({})

    def stepped(self, stats: StepStats, weight: float) -> None:
        """Record a completed step. `weight` must not depend on the number of workers."""
        self._rows += 1
        self._write(
            {
                "loss": stats.loss,
                "grad_norm": stats.grad_norm,
                "weight": weight,
                "skipped": stats.skipped,
            }
        )

    def _write(self, figures: dict[str, Any]) -> None:
        spec = self._state.spec
        tensors = EngineTensors(spec, self._state.states, self._state.extra_sets)
        reported = tensors.trained.reported()
        counts = self._world.counts
        fed, samples = self._inputs.taken()
        # Ranks of a replica or context group have the same samples, so only one of them records
        # samples and rows. `_records` chooses the elements.
        fed.rows *= counts
        figures = figures | {
            "lr": [float(g["lr"]) for o in spec.optimizers for g in o.param_groups if "lr" in g],
            "numbers": _numbers(tensors, reported),
            "parameters": _parameters(spec),
            "order": self._inputs.order,
            "fed": vars(fed),
            "samples": samples if counts else [],
        }
        with torch.no_grad():
            self._log.write(self._state.number, self._rows, figures, _parts(tensors, reported))

    def _records(self, tensor: Tensor) -> bool:
        """Return whether this rank records `tensor`, an input of a model.

        The ranks of a replica have the same inputs, so only the first one records them. Each rank
        of a context group records its own parts; the first one also records inputs that are not
        split.
        """
        world, batch = self._world, self._world.current_batch.batch
        if world.counts or batch is None or batch.sequence is None:
            return world.counts
        own = lengths_of(batch.sequence.length, world.context_size)[world.context_rank]
        is_part = batch.sequence.dim_of(tensor, own) is not None
        return is_part and world.rank % world.mesh.replica == 0

    def close(self) -> None:
        """Stop recording, and remove the hooks that record the model's inputs."""
        self._inputs.close()


def _parts(tensors: EngineTensors, reported: ReportedState) -> Iterator[Part]:
    """Yield all tensors, and parts of tensors, that this rank holds."""
    odd = tensors.out_of_order(reported)
    for span in tensors.trained:
        yield from _of_holding(span, odd)
    buffers = tensors.inventory.buffers
    for span in tensors.beside():
        # `other_tensors` records the buffers, under their names in the model.
        kept = {e.tensor for e in span.extents} - buffers.keys()
        yield from _of_holding(span, odd, kept)
    for span in tensors.reordered(reported):
        yield from _of_holding(span, set())
    spec = tensors.spec
    yield from other_tensors(_named(spec), spec.stage_group.rank, spec.runs)


def _named(spec: SpecView) -> Named:
    return list(zip(spec.prefixes, spec.models, strict=True))


def _of_holding(
    span: StoredTensors, odd: set[tuple[str, str]], kept: set[str] | None = None
) -> Iterator[Part]:
    extents = [
        e
        for e in span.extents
        if (span.kind, e.tensor) not in odd and (kept is None or e.tensor in kept)
    ]
    if not extents:
        return
    # Load span by span, so that state on a disk is never in memory all at once.
    flat = span.storage.loaded()
    for extent in extents:
        part = flat[extent.start : extent.end]
        yield Part(span.kind, extent.tensor, part, extent.offset, span.copy)


def _numbers(tensors: EngineTensors, reported: ReportedState) -> dict[str, float]:
    """Return the optimizer state that is one number per parameter, such as a step count."""
    named = tensors.states.parameters.named
    return {
        state_name(named[number].name, key): float(value)
        for number, state in reported.states.items()
        for key, value in state.items()
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    }


def _parameters(spec: EngineSpec) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Return the name and shape of each optimizer's parameters, in the order of its groups."""
    known = {named.parameter: named for named in spec.located()}
    return [
        [
            (known[p].name, tuple(known[p].whole_shape))
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        for optimizer in spec.optimizers
    ]


def recording_of(state: EngineState) -> Recording | None:
    """Create the recording for `shardwise verify`, or return None without --record-tensors.

    Collective.
    """
    folder = state.world.settings.record_tensors
    return None if folder is None else Recording(state, Path(folder))
