"""Loads a checkpoint, whatever row and size wrote it, into an engine."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from shardwise.checkpoint import atomic_folders
from shardwise.checkpoint.atomic_folders import DOCUMENT, Found, lacks_document
from shardwise.checkpoint.deepspeed.folders import find as of_deepspeed
from shardwise.engine import (
    consistency,
    load_tensors,
    optimizer_fields,
    usage_checks,
)
from shardwise.engine.checkpoint_source import CheckpointSource
from shardwise.engine.checkpoint_tensors import EngineTensors
from shardwise.engine.engine_state import EngineState
from shardwise.engine.tracking import Tracking
from shardwise.errors import BrokenCheckpoint, CheckpointError, CheckpointMismatch
from shardwise.islands import checkpoint_sets
from shardwise.islands.checkpoint_tensors import FIELD
from shardwise.timeline import Row, span
from shardwise.world.randomness import GeneratorStates

T = TypeVar("T")


class CheckpointLoader:
    """Reads checkpoints into the engine's tensors, the numbers beside them, and what is
    `tracked`."""

    def __init__(self, state: EngineState, tracked: Tracking) -> None:
        self._state = state
        self._world = state.world
        self._spec = state.spec
        self._objects = state.objects
        self._tracked = tracked

    def found(self, folder: Path) -> tuple[list[Found], list[Found]]:
        """The complete checkpoints in `folder`, and what only looks like one: newest first, alike
        on all ranks. Collective.

        Raises CheckpointError where `folder` cannot be read, or is itself a checkpoint.
        """
        mine: tuple[list[Found], list[Found]] = [], []
        failure = None
        if self._spec.world_group.rank == 0:
            try:
                mine = atomic_folders.complete(folder)[::-1], atomic_folders.lost(folder)[::-1]
            except OSError as error:
                failure = f"{folder} cannot be looked into: {error.strerror or error}."
            if os.path.lexists(folder / DOCUMENT) or lacks_document(folder):
                failure = (
                    f"{folder} is a checkpoint itself, and resume takes the folder of all: write "
                    f'engine.resume("{folder.parent}"), or engine.load("{folder}") for just this.'
                )
            elif not mine[0] and of_deepspeed(folder):
                failure = (
                    f"{folder} holds what DeepSpeed saved, and resume takes checkpoints of ours: "
                    f'write engine.load("{folder}"), and resume and save in another folder.'
                )
        consistency.agree(self._spec.world_group, failure)
        everywhere: tuple[list[Found], list[Found]] = self._world.broadcast_object(mine)
        return everywhere

    def load(self, path: Path, *, strict: bool, model_only: bool) -> int | None:
        """See Engine.load; returns the number of steps, where `path` says it.

        What raises BrokenCheckpoint has changed nothing, and raises it on all ranks alike.
        """
        self._objects.look_for_changes()
        engine_tensors = EngineTensors(self._spec, self._objects.states)
        with ExitStack() as stack:
            stack.enter_context(span("load", Row.CHECKPOINT))
            examine = partial(
                self._examine, path, engine_tensors, stack, strict=strict, alone=model_only
            )
            source, beside = self._alike(path, examine)
            if model_only and not source.fields and lacks_document(path):
                self._world.say_once(
                    f"{path} has lost its {DOCUMENT}: whether its weights are those that "
                    "were written cannot be told."
                )
            if self._objects.make_room_for_averages(source.averaged):
                engine_tensors = EngineTensors(self._spec, self._objects.states)
            # What strict=False leaves as it is has to be the same on all groups that step apart.
            hooks = self._spec.hooks
            if hooks is not None:
                hooks.restore_common_weights()
            load_tensors.fill_model(engine_tensors, source)
            self._objects.buffers.remember()
            if self._spec.pipeline is not None:
                self._spec.pipeline.tied_weights.invalidate()
            if beside is None:
                if hooks is not None:
                    hooks.begin_anew()
                return None
            load_tensors.fill_islands(engine_tensors, source, beside.step)
            load_tensors.fill_delayed(engine_tensors, source)
            load_tensors.fill_optimizers(
                engine_tensors,
                source,
                beside.optimizers,
                self._objects.attributes,
                self._world.say_once,
            )
            self._say_islands(source)
        self._state.scale.restore(beside.scaling)
        self._state.weighting.unit = beside.scaling["unit"]
        if beside.scaling["wide"] and self._spec.settings.reduce_dtype == "fp32":
            self._objects.states.gradients.widen()
        self._take_seed(beside.seed)
        if beside.draws is not None:
            self._world.draws.restore(beside.draws)
        if source.foreign is not None and (anew := self._tracked.left_out(beside.tracked)):
            self._world.say_once(
                f"a save of DeepSpeed has no state of {', '.join(anew)}, tracked here: it stays as "
                "it is."
            )
        self._tracked.give(beside.tracked)
        if beside.step:
            usage_checks.mark_schedulers(self._spec.optimizers)
        self._world.progress.stepped(self._state.number, beside.step)
        self._world.progress.kept(self._state.number, beside.step)
        return beside.step

    def _examine(
        self,
        path: Path,
        engine_tensors: EngineTensors,
        stack: ExitStack,
        *,
        strict: bool,
        alone: bool,
    ) -> tuple[CheckpointSource, _Beside | None]:
        """What `path` has, of which this rank has read its part to the end.

        The second is None where only the model is wanted (`alone`) or there is no more.
        """
        source = load_tensors.open_source(
            path, engine_tensors, strict=strict, alone=alone, stack=stack
        )
        if not source.fields and source.foreign is None:
            return source, None
        load_tensors.verify(
            path, source, engine_tensors.spec.world_group.rank, engine_tensors.spec.world_group.size
        )
        if alone or not source.fields:
            return source, None
        beside = _beside(path, source, self._tracked)
        optimizer_fields.check(engine_tensors, source.fields, beside.optimizers)
        return source, beside

    def _alike(self, path: Path, work: Callable[[], T]) -> T:
        """What `work` returns; where it fails on a rank, the same is raised on all: that files are
        broken before that they are another's. Collective."""
        result, failure = None, None
        try:
            result = work()
        except CheckpointError as error:
            failure = type(error).__name__, str(error)
        except OSError as error:
            failure = BrokenCheckpoint.__name__, f"{path} cannot be read: {error}."
        failures = self._spec.world_group.gather_objects(failure)
        for kind in (BrokenCheckpoint, CheckpointMismatch, CheckpointError):
            for rank, each in enumerate(failures):
                if each is not None and each[0] == kind.__name__:
                    known = all(other == each for other in failures)
                    raise kind(each[1] if known else f"Rank {rank}: {each[1]}")
        assert result is not None
        return result

    def _say_islands(self, source: CheckpointSource) -> None:
        """Say once what becomes of other islands than those that there are now."""
        if source.fields.get(FIELD, {}).get("waiting") and self._spec.staleness is None:
            self._world.say_once(
                "the checkpoint has gradients that islands were to use yet (--behind): this run "
                "leaves them out."
            )
        saved, here = checkpoint_sets.count(source.fields), self._spec.apart.size
        if saved not in (1, here):
            self._world.say_once(
                f"the checkpoint is of {saved} islands, and here {'is' if here == 1 else 'are'} "
                f"{here}: their weights and optimizer states become the mean of those."
            )

    def _take_seed(self, seed: int | None) -> None:
        """Go on with the seed that was drawn, unless this run has chosen one."""
        chosen = self._world.settings.seed
        if seed is None:
            return
        if chosen is None:
            self._world.seed = seed
        elif chosen != seed:
            self._world.say_once(
                f"this run has the seed {chosen} and the checkpoint {seed}: data order and "
                f"dropout are not those of the run that wrote it. Write --seed {seed} for those."
            )


@dataclass(frozen=True)
class _Beside:
    """What stands in a checkpoint beside the tensors, as it is given back."""

    step: int
    seed: int | None
    """None where it does not say one."""
    scaling: Mapping[str, Any]
    tracked: Mapping[str, Any]
    optimizers: optimizer_fields.OptimizerFields
    draws: GeneratorStates | None


def _beside(path: Path, source: CheckpointSource, tracking: Tracking) -> _Beside:
    """Raises BrokenCheckpoint for what cannot be read."""
    fields = source.fields
    if source.foreign is None:
        tracked = tracking.read(path, fields)
    else:
        tracked = tracking.matched(fields["tracked"])
    numbers = optimizer_fields.read(fields)
    step, seed, scaling = fields["step"], fields["seed"], fields["scaling"]
    return _Beside(step, seed, scaling, tracked, numbers, _draws(path, fields.get("draws")))


def _draws(path: Path, plain: dict[str, Any] | None) -> GeneratorStates | None:
    """Where what ranks draw in common goes on. Raises BrokenCheckpoint for what is none."""
    try:
        return None if plain is None else GeneratorStates.of_plain(plain)
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise BrokenCheckpoint(
            f"{path} does not tell where draws go on ({type(error).__name__}: {error}). Take "
            "another checkpoint."
        ) from error
