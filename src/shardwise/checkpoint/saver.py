"""Saves an engine as a checkpoint: at once, or copied first and written by a thread.

save_tensors.plan       which tensors there are, in which files               all ranks
Draft.begin, create     a hidden folder with files of full length             rank 0
lend ─▶ Writer          each rank writes its byte ranges and sums them        all ranks
documents               checksums of whole tensors, checkpoint.json           rank 0
Draft.finish            fsync, rename: the checkpoint is there                rank 0
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakMethod, finalize

import torch

from shardwise import __version__
from shardwise.checkpoint import (
    atomic_folders,
    engine_fields,
    optimizer_fields,
    save_tensors,
    schema,
)
from shardwise.checkpoint.agreement import agree
from shardwise.checkpoint.atomic_folders import Draft
from shardwise.checkpoint.background import BackgroundSave, Copies, reserve
from shardwise.checkpoint.engine_view import EngineView
from shardwise.checkpoint.folder_lock import FolderClaim, take
from shardwise.checkpoint.save_tensors import SavePlan, Sums
from shardwise.checkpoint.tensors import EngineTensors
from shardwise.checkpoint.tracking import Tracking
from shardwise.checkpoint.writer import Writer, create
from shardwise.errors import CheckpointError, CheckpointNotWritten, FolderInUse, UsageError
from shardwise.timeline import Row, span
from shardwise.world import exit_handlers
from shardwise.world.world import leave


class CheckpointSaver:
    """Saves an engine: tensors, fields, and the objects that are `tracked`."""

    def __init__(self, state: EngineView, tracked: Tracking) -> None:
        self._state = state
        self._world = state.world
        self._spec = state.spec
        self._objects = state.objects
        self._tracked = tracked
        self._copies = Copies()
        self._job: BackgroundSave | None = None
        self._claims: dict[Path, FolderClaim] = {}
        self._is_awaited_at_exit = False
        # An engine that is dropped without `close` must not keep its folders from other jobs.
        finalize(self, _release, self._claims)

    # -- saving ---------------------------------------------------------------------------

    def save(self, folder: Path, *, keep: int | None, background: bool, split: int) -> Path:
        """See Engine.save. Raises CheckpointNotWritten even if training may continue without."""
        group = self._spec.world_group
        # Groups that come and go write at once: one that ended meanwhile would leave a save
        # without its part, and the save would have to begin again.
        behind = background and not group.comes_and_goes

        def save() -> Path:
            return self._save(folder, keep=keep, background=behind, split=split)

        with span("save", Row.CHECKPOINT):
            return group.steadily(save)

    def _save(self, folder: Path, *, keep: int | None, background: bool, split: int) -> Path:
        if keep is not None and keep < 1:
            raise UsageError(f"keep takes how many checkpoints to keep, 1 or more, not {keep}.")
        # One save at a time: `Draft.begin` removes drafts, also one that a thread still writes.
        self.wait()
        self._objects.check_passes()
        self._objects.look_for_changes()
        for line in self._tracked.lacks(
            self._spec.optimizers, self._world.current_batch.training_streams()
        ):
            self._world.say_once(line)
        for line in self._objects.attributes.lacks():
            self._world.say_once(line)
        # Before any work: a second job in the folder has to fail at once, not after a long copy.
        self.claim(folder)
        # The model of a checkpoint is what all groups of ranks have in common.
        with self._state.anchored():
            return self._save_model(folder, keep=keep, background=background, split=split)

    def _save_model(self, folder: Path, *, keep: int | None, background: bool, split: int) -> Path:
        state, spec, group = self._state, self._spec, self._spec.world_group
        self._objects.states.optimizer.return_common_state()
        attributes = [self._objects.attributes.changed(each) for each in spec.optimizers]
        tensors = EngineTensors(spec, self._objects.states, state.extra_sets, attributes)
        scaling = engine_fields.SCALING.value(state)
        made = save_tensors.plan(tensors, state.extra_sets, scaling, split)
        # Only rank 0 writes these: what users track may be large, and one copy is saved.
        is_first = group.rank == 0
        # Any rank may have a value that cannot be saved: islands have optimizers of their own.
        fields, more, failure = self._fields(tensors, made) if is_first else ({}, {}, made.failure)
        # Before the draft: a value that cannot be saved must leave no trace on the disk.
        agree(group, failure)
        draft = Draft(folder, state.steps, made.nbytes)
        kept = partial(self._world.progress.kept, state.number, state.steps)
        finish = partial(_finish, made, fields, more, draft, keep, kept, self._world.say_once)
        try:
            self._begin(draft, made)
            name, about = ("copy" if background else "write"), {"bytes": made.nbytes}
            with span(name, Row.CHECKPOINT, about):
                how = self._copy_and_start if background else self._write
                how(tensors, made, draft, finish)
        except CheckpointNotWritten:
            if group.rank == 0:
                draft.discard()  # a part of it would only take up room
            raise
        return draft.final

    def _fields(
        self, tensors: EngineTensors, made: SavePlan
    ) -> tuple[dict[str, Any], dict[str, bytes], str | None]:
        """Return the fields of checkpoint.json, the small files, and why a value cannot be saved,
        if so. For rank 0."""
        spec = self._spec
        try:
            tracked, files = self._tracked.states()
            optimizers = optimizer_fields.encoded(tensors)
            if made.failure is not None:
                raise CheckpointError(made.failure)
        except CheckpointError as error:
            return {}, {}, str(error)
        # For people to read: no load looks at it.
        written_by = {
            "shardwise": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "workers": self._world.size,
            "placement": spec.placement.name,
            "precision": spec.settings.precision,
        }
        of_engine = engine_fields.values(self._state)
        required = {name: value for name, value in of_engine.items() if name in schema.FIELDS}
        fields = {"optimizers": optimizers, "state": made.state, "borders": made.borders}
        fields |= made.extra_fields | {"step": self._state.steps} | required
        fields |= {"tracked": tracked, "written_by": written_by} | of_engine
        for model in spec.models if len(spec.models) == 1 else ():
            config: Any = getattr(model, "config", None)
            if callable(getattr(config, "to_json_string", None)):  # a model of transformers
                if not getattr(config, "architectures", None):
                    config.architectures = [type(model).__name__]
                files["config.json"] = config.to_json_string().encode()
        return fields, files, None

    def _begin(self, draft: Draft, made: SavePlan) -> None:
        """Make the draft's folder and its files, on rank 0; all ranks must see them. Collective.

        Raises CheckpointNotWritten, or CheckpointError if they do not, on all ranks.
        """
        group, failure = self._spec.world_group, None
        if group.rank == 0:
            try:
                draft.begin()
                create(draft.path, made.files)
            except OSError as error:
                failure = draft.refused(error)
        agree(group, failure, CheckpointNotWritten)
        # Rank 0 takes a temporary folder if the file system knows no writes at an offset.
        draft.path = group.gather_objects(draft.path)[0]
        # The path may exist on every host and be another disk there: look for what rank 0 made.
        seen = group.gather_objects((socket.gethostname(), draft.path.is_dir()))
        blind = sorted({host for host, there in seen if not there})
        if blind:
            if group.rank == 0:
                draft.discard()
            raise CheckpointError(
                f"{draft.folder} is not the same folder everywhere: {', '.join(blind)} cannot see "
                "what rank 0 made there. Save into a folder on a file system that all hosts share."
            )

    def _write(
        self,
        tensors: EngineTensors,
        made: SavePlan,
        draft: Draft,
        finish: Callable[[Sequence[Sums]], None],
    ) -> None:
        """Write all of it, and return when it is complete. Collective.

        Raises CheckpointNotWritten on all ranks.
        """
        group, failure = self._spec.world_group, None
        writer = Writer(draft.path, made.sets)
        sums: Sums = {}
        try:
            # An OSError in here is not the checkpoint's disk but that of an offloaded state.
            save_tensors.lend(tensors, made, writer)
            try:
                sums = writer.finish()
            except OSError as error:
                failure = draft.refused(error)
        finally:
            writer.close()
        # Two rounds: rank 0 may complete the checkpoint only once every part is on the disk.
        agree(group, failure, CheckpointNotWritten)
        several = group.gather_objects(sums)
        if group.rank == 0:
            try:
                finish(several)
            except OSError as error:
                failure = draft.refused(error)
        agree(group, failure, CheckpointNotWritten)

    def _copy_and_start(
        self,
        tensors: EngineTensors,
        made: SavePlan,
        draft: Draft,
        finish: Callable[[Sequence[Sums]], None],
    ) -> None:
        """Copy all of it, and start a thread that writes the copy. Collective."""
        group, failure = self._spec.world_group, None
        self._copies.begin()
        save_tensors.lend(tensors, made, self._copies)
        # The note of a failure must find room even if the thread fills the disk.
        try:
            reserve(draft.path, group.rank)
        except OSError as error:
            failure = draft.refused(error)
        agree(group, failure, CheckpointNotWritten)
        self._job = BackgroundSave(
            self._copies,
            Writer(draft.path, made.sets),
            draft,
            finish,
            rank=group.rank,
            size=group.size,
            limit=self._world.settings.timeout,
        )
        if not self._is_awaited_at_exit:
            self._is_awaited_at_exit = True
            # Weak, so that the handler does not keep a dropped engine and its memory.
            _await_at_exit(WeakMethod(self.wait))
        self._job.start()

    # -- the folder -------------------------------------------------------------------------

    def claim(self, folder: Path) -> None:
        """Keep other jobs out of `folder`, into which this one saves. Collective.

        Raises FolderInUse on all ranks if another job has it already. A folder that cannot be
        written is for the save to report.
        """
        failure = None
        held = self._claims.get(folder)
        # A folder that was removed since has lost its lock.
        if self._spec.world_group.rank == 0 and (held is None or not held.holds()):
            try:
                with suppress(OSError):  # as of a disk that may only be read
                    if held is not None:
                        held.release()
                    claim = self._claims[folder] = take(folder)
                    if not claim.locked:
                        self._world.say_once(
                            f"the file system of {folder} has no locks: see that no other job "
                            "saves there."
                        )
            except FolderInUse as error:
                failure = str(error)
        agree(self._spec.world_group, failure, FolderInUse)

    def end_removals(self, folder: Path) -> None:
        """Finish removals in `folder` that a kill interrupted.

        A run that has nothing more to train makes no save that would do so.
        """
        if self._spec.world_group.rank == 0 and folder in self._claims:
            atomic_folders.end_removals(folder)

    def leave(self) -> None:
        """Release the folders to other jobs."""
        _release(self._claims)

    def tolerate(self, error: CheckpointNotWritten) -> None:
        """Report that a checkpoint is missing if training may continue without it; else raise."""
        if self._spec.settings.save_failure == "stop":
            raise error
        self._world.print(f"shardwise: {error} Training goes on.", file=sys.stderr)

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that the save in the background failed."""
        return self._job is not None and not self._job.is_alive() and bool(self._job.failure)

    # -- leaving at a step boundary ---------------------------------------------------------

    def mark_boundary(self) -> None:
        """Keep the model's buffers as they are now, for a save between this step and the next."""
        self._objects.buffers.keep()

    def go_back_to_boundary(self) -> None:
        """Undo the changes of forwards since the last step.

        Outside of a loop over a Loader, restore the common random stream too. In such a loop the
        body of the last batch is done, so its draws count.
        """
        self._objects.buffers.restore()
        if not self._world.current_batch.in_loop():
            self._world.draws.go_back_to_boundary()

    def at_boundary(self) -> AbstractContextManager[None]:
        """Context manager for a save that other ranks load. Rewinds the common random stream to the
        last boundary, because those ranks repeat what this process has drawn since."""
        in_loop = self._world.current_batch.in_loop()
        return nullcontext() if in_loop else self._world.draws.at_boundary()

    def wait(self) -> None:
        """Wait for the save in the background.

        Raises CheckpointNotWritten on all ranks if it failed, unless training continues without.
        """
        if self._job is not None:
            job, self._job = self._job, None
            with span("wait for the save before", Row.CHECKPOINT):
                job.join()
            if job.failure is not None:
                self.tolerate(CheckpointNotWritten(job.failure))


def _finish(
    made: SavePlan,
    fields: Mapping[str, Any],
    more: Mapping[str, bytes],
    draft: Draft,
    keep: int | None,
    kept: Callable[[], None],
    say: Callable[[str], None],
    several: Sequence[Sums],
) -> None:
    """Complete a checkpoint from the checksums of all ranks, then remove the oldest ones. For
    rank 0, maybe in a thread."""
    draft.finish(save_tensors.documents(made, several, fields, more))
    kept()
    if keep is not None:
        draft.prune(keep)
    for line in draft.left:  # this one is complete, whatever is left beside it
        say(line)


def _release(claims: dict[Path, FolderClaim]) -> None:
    while claims:
        claims.popitem()[1].release()


def _await_at_exit(wait: WeakMethod[Callable[[], None]]) -> None:
    """Wait for the save in the background before the process ends.

    If it failed, the process ends with exit code 1: at that point no caller can catch an error.
    """

    def last() -> None:
        try:
            if (call := wait()) is not None:
                call()
        except CheckpointError as error:
            print(f"shardwise: {error}", file=sys.stderr, flush=True)
            leave()
            sys.stdout.flush()
            os._exit(1)

    exit_handlers.register(last)
