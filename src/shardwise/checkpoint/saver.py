"""Saves an engine, in the foreground or from a copy that a background thread writes.

save_tensors.plan       assign the tensors to files                           all ranks
Draft.begin, create     create a hidden folder with files of full length      rank 0
lend ─▶ Writer          write this rank's byte ranges, with checksums         all ranks
documents               combine the checksums, build checkpoint.json          rank 0
Draft.finish            fsync, then rename to publish the checkpoint          rank 0
"""

from __future__ import annotations

import json
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
from shardwise.checkpoint.attribute_values import AttributeValues
from shardwise.checkpoint.background import BackgroundSave, Copies, reserve
from shardwise.checkpoint.engine_view import EngineView
from shardwise.checkpoint.folder_lock import FolderClaim, take
from shardwise.checkpoint.save_tensors import SavePlan, Sums
from shardwise.checkpoint.tensor_names import listed
from shardwise.checkpoint.tensors import EngineTensors
from shardwise.checkpoint.tracking import Tracking
from shardwise.checkpoint.writer import Writer, create
from shardwise.errors import CheckpointError, CheckpointNotWritten, FolderInUse, UsageError
from shardwise.timeline import Row, span
from shardwise.world import exit_handlers
from shardwise.world.world import leave


class CheckpointSaver:
    """Saves an engine's tensors, fields and tracked objects."""

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
        self.reports_untracked = False
        # Release the folders for other jobs even if the engine is dropped without `close`.
        finalize(self, _release, self._claims)

    # -- saving ---------------------------------------------------------------------------

    def save(self, folder: Path, *, keep: int | None, background: bool, split: int) -> Path:
        """See Engine.save. Raises CheckpointNotWritten even with `--save-failure continue`."""
        group = self._spec.world_group
        # With elastic groups, write in the foreground. If a group left during a background save,
        # its part would be missing, and the save would have to be repeated.
        changes = group.has_changing_ranks or self._world.survival is not None
        in_background = background and not changes

        def save() -> Path:
            return self._save(folder, keep=keep, background=in_background, split=split)

        # If elastic groups change during the save, `steadily` repeats it with the new ranks.
        with span("save", Row.CHECKPOINT):
            return group.steadily(save)

    def report_untracked(self) -> None:
        """After the first step since a resume, warn of objects that the resume did not restore."""
        if not self.reports_untracked:
            return
        self.reports_untracked = False
        streams = self._world.current_batch.training_streams()
        for line in self._tracked.describe_untracked(self._spec.optimizers, streams):
            self._world.say_once(f"engine.resume did not restore all objects: {line}")

    def _save(self, folder: Path, *, keep: int | None, background: bool, split: int) -> Path:
        if keep is not None and keep < 1:
            raise UsageError(f"keep={keep}: must be the number of checkpoints to keep, 1 or more.")
        # Run one save at a time, because `Draft.begin` removes all drafts, including one that a
        # thread is still writing.
        self.wait()
        # Report an error in a forward pass since the last step now, before anything is written.
        self._objects.check_passes()
        self._objects.look_for_changes()
        for line in self._tracked.describe_losses(
            self._spec.optimizers, self._world.current_batch.training_streams()
        ):
            self._world.say_once(line)
        for line in self._objects.attributes.describe_losses():
            self._world.say_once(line)
        # Claim the folder before any work, so that a second job in it fails at once.
        self.claim(folder)
        # A checkpoint contains one model, the weights that all groups of ranks last agreed on.
        with self._state.anchored():
            return self._save_model(folder, keep=keep, background=background, split=split)

    def _save_model(self, folder: Path, *, keep: int | None, background: bool, split: int) -> Path:
        state, spec, group = self._state, self._spec, self._spec.world_group
        # Internal copies of the user's optimizer apply the updates. The state that belongs to no
        # parameter is saved from the user's optimizer, so move it back there.
        self._objects.states.optimizer.return_common_state()
        attributes = [self._objects.attributes.changed(optimizer) for optimizer in spec.optimizers]
        if spec.peers.size > 1:
            self._report_unequal_attributes(attributes)
        tensors = EngineTensors(spec, self._objects.states, state.extra_sets, attributes)
        scaling = engine_fields.SCALING.value(state)
        save_plan = save_tensors.plan(tensors, state.extra_sets, scaling, split)
        # Only rank 0 encodes the fields, because tracked objects may be large.
        is_first = group.rank == 0
        # A value that cannot be saved may be on any rank, because islands have separate optimizers.
        fields, small_files, failure = (
            self._fields(tensors, save_plan) if is_first else ({}, {}, save_plan.failure)
        )
        # Raise the error before the draft is created, so that nothing is left on disk.
        agree(group, failure)
        # From here on, disk errors become CheckpointNotWritten, which `tolerate` may accept.
        draft = Draft(folder, state.steps, save_plan.nbytes)
        report_kept = partial(self._world.progress.kept, state.number, state.steps, draft.final)
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
                draft.discard()  # a partial checkpoint is useless
            raise
        return draft.final

    def _report_unequal_attributes(self, attributes: Sequence[AttributeValues | None]) -> None:
        """Report attributes that differ between groups of ranks with separate optimizers.

        The checkpoint contains only rank 0's attributes, so all groups would resume with those.
        Collective.
        """
        own = [{} if values is None else values.digests() for values in attributes]
        groups = self._spec.peers.gather_objects(own)
        for optimizer, digests in zip(
            self._spec.optimizers, zip(*groups, strict=True), strict=True
        ):
            names = {name for each in digests for name in each}
            unequal = sorted(n for n in names if len({each.get(n) for each in digests}) > 1)
            if unequal:
                self._world.say_once(
                    f"the islands have different values in the attributes {listed(unequal)} of "
                    f"{type(optimizer).__name__}. A checkpoint contains those of island 0, so all "
                    "islands continue with them after a resume."
                )

    def _fields(
        self, tensors: EngineTensors, save_plan: SavePlan
    ) -> tuple[dict[str, Any], dict[str, bytes], str | None]:
        """Encode the contents of the small files. Called on rank 0.

        Returns:
            The fields of checkpoint.json, the contents of the other small files by name, and None.
            If a value cannot be saved, two empty dicts and an error message instead.
        """
        spec = self._spec
        try:
            tracked, files = self._tracked.states()
            optimizers = optimizer_fields.encode_optimizers(tensors)
            if save_plan.failure is not None:
                raise CheckpointError(save_plan.failure)
        except CheckpointError as error:
            return {}, {}, str(error)
        # For human readers only. No load uses these, so a checkpoint is never rejected for them.
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
        # transformers' from_pretrained needs a config.json next to model.safetensors. With several
        # models, tensor names have prefixes, so from_pretrained could not load them anyway.
        for model in spec.models if len(spec.models) == 1 else ():
            config: Any = getattr(model, "config", None)
            if callable(getattr(config, "to_json_string", None)):  # a model of transformers
                if not getattr(config, "architectures", None):
                    config.architectures = [type(model).__name__]
                files["config.json"] = config.to_json_string().encode()
            adapters: Any = getattr(model, "peft_config", None)
            if isinstance(adapters, dict) and list(adapters) == ["default"]:  # a model of PEFT
                of_adapter = adapters["default"].to_dict() | {"inference_mode": True}
                text = json.dumps(of_adapter, indent=2, default=_plain)
                files["adapter_config.json"] = text.encode() + b"\n"
        return fields, files, None

    def _begin(self, draft: Draft, save_plan: SavePlan) -> None:
        """Create the draft's files on rank 0, and check that all ranks see them. Collective.

        Raises CheckpointNotWritten on all ranks if the disk fails, and CheckpointError if a rank
        does not see the folder.
        """
        group, failure = self._spec.world_group, None
        if group.rank == 0:
            try:
                draft.begin()
                create(draft.path, save_plan.files)
            except OSError as error:
                failure = draft.describe_error(error)
        agree(group, failure, CheckpointNotWritten)
        # Rank 0 may have chosen a temporary folder (see Draft), so use its path on all ranks.
        draft.path = group.gather_objects(draft.path)[0]
        # The parent folder may exist on every host but on different disks, so check the draft.
        seen = group.gather_objects((socket.gethostname(), draft.path.is_dir()))
        blind = sorted({host for host, is_visible in seen if not is_visible})
        if blind:
            # Not all ranks can write to this draft, so it will never be complete.
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
        """Write and publish the checkpoint. Collective.

        Raises CheckpointNotWritten on all ranks if a disk fails.
        """
        group, failure = self._spec.world_group, None
        writer = Writer(draft.path, save_plan.sets)
        sums: Sums = {}
        try:
            # Do not catch OSErrors here. They are errors in reading offloaded state, because the
            # writer raises its errors only in `finish`.
            save_tensors.lend(tensors, save_plan, writer)
            try:
                sums = writer.finish()
            except OSError as error:
                failure = draft.describe_error(error)
        finally:
            writer.close()
        # Rank 0 may publish the checkpoint only once every rank's part is on disk.
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
        """Copy this rank's part, and start a thread that writes it. Collective."""
        group, failure = self._spec.world_group, None
        self._copies.begin()
        save_tensors.lend(tensors, save_plan, self._copies)
        # Reserve space for an error note now, because the tensors may fill the disk.
        try:
            reserve(draft.path, group.rank)
        except OSError as error:
            failure = draft.describe_error(error)
        # If a rank has failed, raise on all ranks now. They would wait for its note until the
        # timeout.
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
            # Use a weak reference, so that the handler does not keep a dropped engine alive.
            _await_at_exit(WeakMethod(self.wait))
        self._job.start()

    # -- the folder -------------------------------------------------------------------------

    def claim(self, folder: Path) -> None:
        """Lock `folder`, so that no other job saves into it. Collective.

        Raises FolderInUse on all ranks if another job holds the lock. If the folder is not
        writable, does nothing, because the save reports the error.
        """
        failure = None
        held = self._claims.get(folder)
        # Only rank 0 locks the folder, on behalf of the job. If the folder has been removed since,
        # its lock is gone, so lock it again.
        if self._spec.world_group.rank == 0 and (held is None or not held.holds()):
            try:
                with suppress(OSError):  # for example, a read-only disk
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
        """Finish removing checkpoints in `folder` if a previous run was killed while removing them.

        Every save does this as well, but a run that has no steps left may never save.
        """
        if self._spec.world_group.rank == 0 and folder in self._claims:
            atomic_folders.end_removals(folder)

    def leave(self) -> None:
        """Release the locks on all folders, so that other jobs can save there."""
        _release(self._claims)

    def tolerate(self, error: CheckpointNotWritten) -> None:
        """Print `error` if training may continue without the checkpoint, otherwise raise it."""
        if self._spec.settings.save_failure == "stop":
            raise error
        self._world.print(f"shardwise: {error} Training continues.", file=sys.stderr)

    @property
    def has_failed(self) -> bool:
        """Whether the background save has failed, as far as this rank knows."""
        return self._job is not None and not self._job.is_alive() and bool(self._job.failure)

    # -- saving at a step boundary ----------------------------------------------------------

    def mark_boundary(self) -> None:
        """Copy the model's buffers at a step boundary, in case a save precedes the next step."""
        self._objects.buffers.keep()

    def go_back_to_boundary(self) -> None:
        """Undo the effects of forward passes since the last step.

        Outside a loop over a Loader, this also rewinds the common random stream. Inside such a
        loop, the stream is not rewound, because the loop body has finished with the last batch.
        """
        self._objects.buffers.restore()
        if not self._world.current_batch.in_loop():
            self._world.draws.go_back_to_boundary()

    def at_boundary(self) -> AbstractContextManager[None]:
        """Return a context manager for a save that other ranks will load.

        Within it, the common random stream is rewound to the last step boundary. This process may
        have drawn numbers after the boundary, and the other ranks will repeat these draws.
        """
        in_loop = self._world.current_batch.in_loop()
        return nullcontext() if in_loop else self._world.draws.at_boundary()

    def wait(self) -> None:
        """Wait for the background save.

        If the save failed, raises CheckpointNotWritten on all ranks, unless training may continue
        without the checkpoint.
        """
        if self._job is not None:
            # Clear it first, so that the next save does not report an error again.
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
    """Publish a checkpoint with all ranks' checksums, and then remove old checkpoints.

    Runs on rank 0, possibly in the background thread.
    """
    draft.finish(save_tensors.documents(save_plan, sums_by_rank, fields, small_files))
    # Report after the rename, because a restart cannot use the checkpoint earlier. Prune last, so
    # that a kill in between leaves too many checkpoints rather than too few.
    report_kept()
    if keep is not None:
        draft.prune(keep)
    for line in draft.warnings:  # the checkpoint itself is complete
        say(line)


def _release(claims: dict[Path, FolderClaim]) -> None:
    while claims:
        claims.popitem()[1].release()


def _await_at_exit(wait: WeakMethod[Callable[[], None]]) -> None:
    """Register a handler that waits for the background save before the process exits.

    If the save failed, the handler exits with code 1, because no caller can catch an exception.
    """

    def last() -> None:
        try:
            if (call := wait()) is not None:
                call()
        except CheckpointError as error:
            print(f"shardwise: {error}", file=sys.stderr, flush=True)
            # os._exit skips all other exit handlers, so leave the group of ranks first.
            leave()
            sys.stdout.flush()
            os._exit(1)

    exit_handlers.register(last)


def _plain(value: Any) -> Any:
    """Convert a value to JSON: a set to a list (PEFT has sets of module names), others to text."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)
