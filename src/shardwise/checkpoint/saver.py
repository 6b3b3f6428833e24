"""Saves of an engine: in the foreground, or copied first and written by a thread.

save_tensors.plan       tensors, and their files                              all ranks
Draft.begin, create     a hidden folder with files of full length             rank 0
lend ─▶ Writer          each rank writes its byte ranges, with checksums      all ranks
documents               checksums of whole tensors, checkpoint.json           rank 0
Draft.finish            fsync, rename: the checkpoint is published            rank 0
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
    """Saves an engine: tensors, fields, and the `tracked` objects."""

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
        # An engine that is dropped without `close` must release its folders for other jobs.
        finalize(self, _release, self._claims)

    # -- saving ---------------------------------------------------------------------------

    def save(self, folder: Path, *, keep: int | None, background: bool, split: int) -> Path:
        """See Engine.save. Raises CheckpointNotWritten even if training may continue without."""
        group = self._spec.world_group
        # With elastic groups, write in the foreground: if a group left during a background save,
        # its part would be missing, and the save would have to start again.
        in_background = background and not group.has_changing_ranks

        def save() -> Path:
            return self._save(folder, keep=keep, background=in_background, split=split)

        # Elastic groups may change during a save: `steadily` then repeats it with the new ranks.
        with span("save", Row.CHECKPOINT):
            return group.steadily(save)

    def _save(self, folder: Path, *, keep: int | None, background: bool, split: int) -> Path:
        if keep is not None and keep < 1:
            raise UsageError(f"keep={keep}: must be the number of checkpoints to keep, 1 or more.")
        # One save at a time: `Draft.begin` removes all drafts, even one that a thread is writing.
        self.wait()
        # An error in a forward since the last step must surface now, before anything is written.
        self._objects.check_passes()
        self._objects.look_for_changes()
        for line in self._tracked.describe_losses(
            self._spec.optimizers, self._world.current_batch.training_streams()
        ):
            self._world.say_once(line)
        for line in self._objects.attributes.describe_losses():
            self._world.say_once(line)
        # Before any work: a second job in the same folder must fail at once, not after a long copy.
        self.claim(folder)
        # The model in a checkpoint is the state that all groups of ranks share.
        with self._state.anchored():
            return self._save_model(folder, keep=keep, background=background, split=split)

    def _save_model(self, folder: Path, *, keep: int | None, background: bool, split: int) -> Path:
        state, spec, group = self._state, self._spec, self._spec.world_group
        # Copies of the user's optimizer make the updates. Return the state that belongs to no
        # parameter to the user's own optimizer, because the save reads it there.
        self._objects.states.optimizer.return_common_state()
        attributes = [self._objects.attributes.changed(optimizer) for optimizer in spec.optimizers]
        tensors = EngineTensors(spec, self._objects.states, state.extra_sets, attributes)
        scaling = engine_fields.SCALING.value(state)
        save_plan = save_tensors.plan(tensors, state.extra_sets, scaling, split)
        # Only rank 0 encodes them: tracked objects may be large, and one copy is enough.
        is_first = group.rank == 0
        # Any rank may hold a value that cannot be saved: islands have separate optimizers.
        fields, small_files, failure = (
            self._fields(tensors, save_plan) if is_first else ({}, {}, save_plan.failure)
        )
        # Before the draft: a value that cannot be saved must leave no trace on disk.
        agree(group, failure)
        # From here on a failure of the disk is CheckpointNotWritten, which `tolerate` may accept.
        draft = Draft(folder, state.steps, save_plan.nbytes)
        report_kept = partial(self._world.progress.kept, state.number, state.steps)
        finish = partial(
            _finish, save_plan, fields, small_files, draft, keep, report_kept, self._world.say_once
        )
        try:
            self._begin(draft, save_plan)
            name, about = ("copy" if background else "write"), {"bytes": save_plan.nbytes}
            with span(name, Row.CHECKPOINT, about):
                write = self._copy_and_start if background else self._write
                write(tensors, save_plan, draft, finish)
        except CheckpointNotWritten:
            if group.rank == 0:
                draft.discard()  # a partial checkpoint would only waste space
            raise
        return draft.final

    def _fields(
        self, tensors: EngineTensors, save_plan: SavePlan
    ) -> tuple[dict[str, Any], dict[str, bytes], str | None]:
        """Return the fields of checkpoint.json, the small files, and an error message or None.

        Called on rank 0.
        """
        spec = self._spec
        try:
            tracked, files = self._tracked.states()
            optimizers = optimizer_fields.encode_optimizers(tensors)
            if save_plan.failure is not None:
                raise CheckpointError(save_plan.failure)
        except CheckpointError as error:
            return {}, {}, str(error)
        # For human readers: no load uses these, so that no version or size is ever rejected.
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
        fields = {"optimizers": optimizers, "state": save_plan.state, "borders": save_plan.borders}
        fields |= save_plan.extra_fields | {"step": self._state.steps} | required
        fields |= {"tracked": tracked, "written_by": written_by} | of_engine
        # from_pretrained needs a config.json next to model.safetensors. With several models their
        # names have prefixes, so no stock reader could use it.
        for model in spec.models if len(spec.models) == 1 else ():
            config: Any = getattr(model, "config", None)
            if callable(getattr(config, "to_json_string", None)):  # a model of transformers
                if not getattr(config, "architectures", None):
                    config.architectures = [type(model).__name__]
                files["config.json"] = config.to_json_string().encode()
        return fields, files, None

    def _begin(self, draft: Draft, save_plan: SavePlan) -> None:
        """Create the draft's folder and files on rank 0, and check that all ranks see them.
        Collective.

        Raises CheckpointNotWritten or CheckpointError on all ranks.
        """
        group, failure = self._spec.world_group, None
        if group.rank == 0:
            try:
                draft.begin()
                create(draft.path, save_plan.files)
            except OSError as error:
                failure = draft.describe_error(error)
        agree(group, failure, CheckpointNotWritten)
        # Rank 0 uses a temporary folder if the file system has no writes at an offset.
        draft.path = group.gather_objects(draft.path)[0]
        # The path may exist on every host and be a different disk there, so look for the draft.
        seen = group.gather_objects((socket.gethostname(), draft.path.is_dir()))
        blind = sorted({host for host, is_visible in seen if not is_visible})
        if blind:
            # Another rank's view is wrong, not the disk: nothing will complete this draft.
            if group.rank == 0:
                draft.discard()
            raise CheckpointError(
                f"{draft.folder} is not a shared folder: {', '.join(blind)} cannot see the draft "
                "that rank 0 created there. Save into a folder on a file system that all hosts "
                "share."
            )

    def _write(
        self,
        tensors: EngineTensors,
        save_plan: SavePlan,
        draft: Draft,
        finish: Callable[[Sequence[Sums]], None],
    ) -> None:
        """Write everything, and return once the checkpoint is complete. Collective.

        Raises CheckpointNotWritten on all ranks.
        """
        group, failure = self._spec.world_group, None
        writer = Writer(draft.path, save_plan.sets)
        sums: Sums = {}
        try:
            # An OSError in here is about the disk of an offloaded state, not the checkpoint's.
            save_tensors.lend(tensors, save_plan, writer)
            try:
                sums = writer.finish()
            except OSError as error:
                failure = draft.describe_error(error)
        finally:
            writer.close()
        # Two rounds: rank 0 may publish the checkpoint only once every part is on disk.
        agree(group, failure, CheckpointNotWritten)
        sums_by_rank = group.gather_objects(sums)
        if group.rank == 0:
            try:
                finish(sums_by_rank)
            except OSError as error:
                failure = draft.describe_error(error)
        agree(group, failure, CheckpointNotWritten)

    def _copy_and_start(
        self,
        tensors: EngineTensors,
        save_plan: SavePlan,
        draft: Draft,
        finish: Callable[[Sequence[Sums]], None],
    ) -> None:
        """Copy everything, and start a thread that writes the copy. Collective."""
        group, failure = self._spec.world_group, None
        self._copies.begin()
        save_tensors.lend(tensors, save_plan, self._copies)
        # Reserve space for the note of a failure now, because the thread may fill the disk.
        try:
            reserve(draft.path, group.rank)
        except OSError as error:
            failure = draft.describe_error(error)
        # A rank that failed must not leave the others waiting for its note until the timeout.
        agree(group, failure, CheckpointNotWritten)
        self._job = BackgroundSave(
            self._copies,
            Writer(draft.path, save_plan.sets),
            draft,
            finish,
            rank=group.rank,
            size=group.size,
            limit=self._world.settings.timeout,
        )
        if not self._is_awaited_at_exit:
            self._is_awaited_at_exit = True
            # Weak, so that the handler does not keep a dropped engine and its memory alive.
            _await_at_exit(WeakMethod(self.wait))
        self._job.start()

    # -- the folder -------------------------------------------------------------------------

    def claim(self, folder: Path) -> None:
        """Lock `folder`, into which this job saves, against other jobs. Collective.

        Raises FolderInUse on all ranks if another job holds it. A folder that cannot be written
        raises nothing here: the save reports it.
        """
        failure = None
        held = self._claims.get(folder)
        # If the folder was removed since, its lock is gone too. Only rank 0 locks: the lock keeps
        # other jobs out, not other ranks of this one.
        if self._spec.world_group.rank == 0 and (held is None or not held.holds()):
            try:
                with suppress(OSError):  # for example a read-only disk
                    if held is not None:
                        held.release()
                    claim = self._claims[folder] = take(folder)
                    if not claim.locked:
                        self._world.say_once(
                            f"the file system of {folder} has no file locks: make sure that no "
                            "other job saves there."
                        )
            except FolderInUse as error:
                failure = str(error)
        agree(self._spec.world_group, failure, FolderInUse)

    def end_removals(self, folder: Path) -> None:
        """Finish removals in `folder` that a kill interrupted.

        A save does this too, but a run that has nothing left to train makes no save.
        """
        if self._spec.world_group.rank == 0 and folder in self._claims:
            atomic_folders.end_removals(folder)

    def leave(self) -> None:
        """Release the folders for other jobs."""
        _release(self._claims)

    def tolerate(self, error: CheckpointNotWritten) -> None:
        """Report a missing checkpoint if training may continue without it; otherwise raise."""
        if self._spec.settings.save_failure == "stop":
            raise error
        self._world.print(f"shardwise: {error} Training continues.", file=sys.stderr)

    @property
    def has_failed(self) -> bool:
        """True once this rank knows that the background save failed."""
        return self._job is not None and not self._job.is_alive() and bool(self._job.failure)

    # -- leaving at a step boundary ---------------------------------------------------------

    def mark_boundary(self) -> None:
        """Keep a copy of the model's buffers, for a save between this step and the next."""
        self._objects.buffers.keep()

    def go_back_to_boundary(self) -> None:
        """Undo the effects of forwards since the last step.

        Outside a loop over a Loader, this rewinds the common random stream too. Inside such a loop
        the body has finished with the last batch, so its draws count.
        """
        self._objects.buffers.restore()
        if not self._world.current_batch.in_loop():
            self._world.draws.go_back_to_boundary()

    def at_boundary(self) -> AbstractContextManager[None]:
        """Return a context manager for a save that other ranks will load.

        It rewinds the common random stream to the last boundary, because those ranks will repeat
        the draws that this process has made since.
        """
        in_loop = self._world.current_batch.in_loop()
        return nullcontext() if in_loop else self._world.draws.at_boundary()

    def wait(self) -> None:
        """Wait for the background save.

        Raises CheckpointNotWritten on all ranks if it failed and training must not continue.
        """
        if self._job is not None:
            # Clear it first: a failure must be reported once, not again by the next save.
            job, self._job = self._job, None
            with span("wait for the save before", Row.CHECKPOINT):
                job.join()
            if job.failure is not None:
                self.tolerate(CheckpointNotWritten(job.failure))


def _finish(
    save_plan: SavePlan,
    fields: Mapping[str, Any],
    small_files: Mapping[str, bytes],
    draft: Draft,
    keep: int | None,
    report_kept: Callable[[], None],
    say: Callable[[str], None],
    sums_by_rank: Sequence[Sums],
) -> None:
    """Publish a checkpoint with the checksums of all ranks, then remove the oldest ones.

    Runs on rank 0, possibly in a thread.
    """
    draft.finish(save_tensors.documents(save_plan, sums_by_rank, fields, small_files))
    # After the rename: only now can a restart rely on this checkpoint. Before pruning: a kill
    # between the two leaves too many checkpoints, never too few.
    report_kept()
    if keep is not None:
        draft.prune(keep)
    for line in draft.warnings:  # warnings only: this checkpoint is complete
        say(line)


def _release(claims: dict[Path, FolderClaim]) -> None:
    while claims:
        claims.popitem()[1].release()


def _await_at_exit(wait: WeakMethod[Callable[[], None]]) -> None:
    """Wait for the background save before the process exits.

    If the save failed, exit with code 1: at that point no caller can catch an exception.
    """

    def last() -> None:
        try:
            if (call := wait()) is not None:
                call()
        except CheckpointError as error:
            print(f"shardwise: {error}", file=sys.stderr, flush=True)
            # Skips other exit handlers and the interpreter's shutdown, so leave the group first.
            leave()
            sys.stdout.flush()
            os._exit(1)

    exit_handlers.register(last)
