"""Loads checkpoints that were saved with any placement and world size into an engine."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.checkpoint import (
    atomic_folders,
    engine_fields,
    load_tensors,
    optimizer_fields,
    source,
)
from shardwise.checkpoint.agreement import agree, read_on_all
from shardwise.checkpoint.atomic_folders import DOCUMENT, StepFolder, lacks_document
from shardwise.checkpoint.engine_view import EngineView
from shardwise.checkpoint.source import CheckpointSource
from shardwise.checkpoint.tensors import EngineTensors
from shardwise.checkpoint.tracking import Tracking
from shardwise.timeline import Row, span


@dataclass(frozen=True)
class _ParsedFields:
    """A checkpoint's fields, parsed and validated before the engine changes."""

    step: int
    engine: dict[str, Any]
    tracked: dict[str, Any]
    optimizers: optimizer_fields.OptimizerFields


class CheckpointLoader:
    """Loads checkpoints into an engine and its tracked objects."""

    def __init__(self, state: EngineView, tracked: Tracking) -> None:
        self._state = state
        self._world = state.world
        self._spec = state.spec
        self._objects = state.objects
        self._tracked = tracked

    def list_checkpoints(self, folder: Path) -> tuple[list[StepFolder], list[StepFolder]]:
        """Return the complete and the incomplete checkpoints in `folder`, newest first. Collective.

        All ranks return the same lists. Raises CheckpointError if `folder` cannot be read, is
        itself a checkpoint, or contains only another library's checkpoint.
        """
        own: tuple[list[StepFolder], list[StepFolder]] = [], []
        failure = None
        # Only rank 0 lists the folder, because other ranks may see a new folder on a network disk
        # later.
        if self._spec.world_group.rank == 0:
            try:
                own = (
                    atomic_folders.complete(folder)[::-1],
                    atomic_folders.incomplete_checkpoints(folder)[::-1],
                )
            except OSError as error:
                failure = f"{folder} cannot be read: {error.strerror or error}."
            if os.path.lexists(folder / DOCUMENT) or lacks_document(folder):
                failure = (
                    f"{folder} is a single checkpoint, but resume takes the folder that contains "
                    f'all of them. Write engine.resume("{folder.parent}"), or '
                    f'engine.load("{folder}") to load just this one.'
                )
            elif not own[0] and (library := _other_library(folder)) is not None:
                failure = (
                    f"{folder} contains a checkpoint of {library}, but resume takes Shardwise "
                    f'checkpoints. Write engine.load("{folder}"), then resume and save in another '
                    "folder."
                )
        agree(self._spec.world_group, failure)
        everywhere: tuple[list[StepFolder], list[StepFolder]] = self._world.broadcast_object(own)
        return everywhere

    def load(self, path: Path, *, strict: bool, model_only: bool) -> int | None:
        """See Engine.load. Returns the checkpoint's step, or None if only weights were loaded.

        If a file is damaged, raises BrokenCheckpoint on every rank before anything is changed.
        """
        state, spec, objects, world = self._state, self._spec, self._objects, self._world
        objects.look_for_changes()
        tensors = EngineTensors(spec, objects.states, state.extra_sets)
        with ExitStack() as stack:
            stack.enter_context(span("load", Row.CHECKPOINT))
            examine = partial(
                self._examine, path, tensors, stack, strict=strict, model_only=model_only
            )
            # All ranks read and verify their part before anything changes. A damaged checkpoint
            # therefore leaves the engine unchanged, and `resume` can try the previous one.
            checkpoint, parsed = read_on_all(spec.world_group, path, examine)
            if model_only and not checkpoint.fields and lacks_document(path):
                world.say_once(
                    f"{path} has no {DOCUMENT}, so the checksums of its weights cannot be checked."
                )
            if objects.make_room_for_averages(checkpoint.averaged):
                tensors = EngineTensors(spec, objects.states, state.extra_sets)
            state.extra_sets.before_model()
            load_tensors.fill_model(tensors, checkpoint)
            # Writes to buffers by this load must not be reported as the user's.
            objects.buffers.remember()
            if spec.pipeline is not None:
                spec.pipeline.tied_weights.invalidate()
            # Only weights were loaded, so step count, optimizers and random streams do not change.
            if parsed is None:
                state.extra_sets.start_again()
                objects.renew_copies()
                self._report_lack(checkpoint, model_only=model_only)
                return None
            fill = partial(load_tensors.fill_spans, tensors, checkpoint)
            state.extra_sets.after_model(checkpoint.read, parsed.step, tensors.extra_places, fill)
            load_tensors.fill_optimizers(
                tensors, checkpoint, parsed.optimizers, objects.attributes, world.say_once
            )
            for line in state.extra_sets.notes(checkpoint.fields):
                world.say_once(line)
        objects.renew_copies()
        engine_fields.restore(state, parsed.engine)
        if checkpoint.foreign is not None:
            for line in checkpoint.foreign.notes:
                world.say_once(line)
            if untouched := self._tracked.names_missing_from(parsed.tracked):
                world.say_once(
                    f"this {checkpoint.foreign.format} checkpoint has no state for the tracked "
                    f"objects {', '.join(untouched)}: they keep their state."
                )
        # Restore tracked objects last, because a scheduler may read the optimizers as it loads.
        self._tracked.restore(parsed.tracked)
        # The launcher must count the progress of this start from the loaded step, not from 0.
        world.progress.stepped(state.number, parsed.step)
        world.progress.kept(state.number, parsed.step, path)
        return parsed.step

    def _report_lack(self, checkpoint: CheckpointSource, *, model_only: bool) -> None:
        """Tell the user what another library's checkpoint lacks, such as the optimizer."""
        foreign = checkpoint.foreign
        if foreign is None or model_only:
            return
        for line in foreign.notes:
            self._world.say_once(line)
        if foreign.step is not None:
            self._world.say_once(
                f"{foreign.path} has no optimizer state: its weights were loaded, and step count "
                "and optimizers keep their state."
            )

    def _examine(
        self,
        path: Path,
        tensors: EngineTensors,
        stack: ExitStack,
        *,
        strict: bool,
        model_only: bool,
    ) -> tuple[CheckpointSource, _ParsedFields | None]:
        """Open `path`, verify this rank's share of the checksums, and parse the fields.

        Returns None in place of the fields if only the model is loaded or the checkpoint has no
        fields.
        """
        group = self._spec.world_group
        extra = self._state.extra_sets
        checkpoint = source.open_source(
            path, tensors, extra, stack, strict=strict, model_only=model_only
        )
        source.verify(path, checkpoint, group.rank, group.size)
        if model_only or not checkpoint.fields:
            return checkpoint, None
        fields = checkpoint.fields
        if checkpoint.foreign is None:
            tracked = self._tracked.read(path, fields)
        else:
            tracked = self._tracked.match_schedulers(fields["tracked"])
        optimizers = optimizer_fields.read(fields)
        parsed = _ParsedFields(
            fields["step"], engine_fields.parse(path, fields), tracked, optimizers
        )
        optimizer_fields.check(tensors, fields, optimizers)
        return checkpoint, parsed


def _other_library(folder: Path) -> str | None:
    """Return the name of another library whose checkpoint `folder` contains, or None."""
    # Import here, because every rank imports this module at its start, and few need a format.
    from shardwise.checkpoint.formats.recognise import training_format

    return training_format(folder)
