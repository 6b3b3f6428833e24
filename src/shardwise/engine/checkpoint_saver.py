"""Saves an engine as a checkpoint: at once, or copied first and written by a thread."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakMethod, finalize

import torch

from shardwise import __version__
from shardwise.checkpoint import atomic_folders
from shardwise.checkpoint.atomic_folders import Draft
from shardwise.checkpoint.background import BackgroundSave, Copies, reserve
from shardwise.checkpoint.folder_lock import FolderClaim, take
from shardwise.checkpoint.writer import Writer
from shardwise.engine import consistency, save_tensors
from shardwise.engine.checkpoint_tensors import EngineTensors
from shardwise.engine.engine_state import EngineState
from shardwise.engine.tracking import Tracking
from shardwise.errors import CheckpointError, CheckpointNotWritten, FolderInUse, UsageError
from shardwise.timeline import Row, span
from shardwise.world import exit_handlers
from shardwise.world.world import World, leave


class CheckpointSaver:
    """Writes checkpoints: the engine's tensors, the numbers beside them, and what is `tracked`."""

    def __init__(self, state: EngineState, tracked: Tracking) -> None:
        self._state = state
        self._world = state.world
        self._spec = state.spec
        self._objects = state.objects
        self._tracked = tracked
        self._copies = Copies()
        self._job: BackgroundSave | None = None
        self._claims: dict[Path, FolderClaim] = {}
        self._is_awaited_at_exit = False
        finalize(self, _release, self._claims)

    # -- saving ---------------------------------------------------------------------------

    def save(self, folder: Path, *, keep: int | None, background: bool, split: int) -> Path:
        """See Engine.save; raises CheckpointNotWritten whatever the settings say."""
        group = self._spec.world_group
        # Elastic islands write at once: one that ended meanwhile would leave a save without its
        # part, which is begun anew then.
        behind = background and not group.comes_and_goes

        def save() -> Path:
            return self._save(folder, keep=keep, background=behind, split=split)

        with span("save", Row.CHECKPOINT):
            return group.steadily(save)

    def _save(self, folder: Path, *, keep: int | None, background: bool, split: int) -> Path:
        if keep is not None and keep < 1:
            raise UsageError(f"keep takes how many checkpoints to keep, 1 or more, not {keep}.")
        self.wait()
        self._objects.check_passes()
        self._objects.look_for_changes()
        for line in self._tracked.lacks(
            self._spec.optimizers, self._world.current_batch.training_streams()
        ):
            self._world.say_once(line)
        for line in self._objects.attributes.lacks():
            self._world.say_once(line)
        self.claim(folder)
        with self._state.anchored():
            return self._save_model(folder, keep=keep, background=background, split=split)

    def _save_model(self, folder: Path, *, keep: int | None, background: bool, split: int) -> Path:
        """Save what the parameters hold now: the model, of islands their anchor."""
        spec, steps = self._spec, self._state.steps
        self._objects.states.optimizer.return_common_state()
        attributes = [self._objects.attributes.changed(each) for each in spec.optimizers]
        engine_tensors = EngineTensors(spec, self._objects.states, attributes)
        made = save_tensors.plan(engine_tensors, split)
        scalings = spec.peers.gather_plain(self._scaling())
        for island, scaling in zip(made.islands, scalings, strict=False):
            island["scaling"] = scaling
        fields, more, failure = self._beside(engine_tensors, made)
        consistency.agree(spec.world_group, failure)
        draft = Draft(folder, steps, made.nbytes)
        kept = partial(self._world.progress.kept, self._state.number, steps)
        finish = partial(_finish, made, fields, more, draft, keep, kept, self._world.say_once)
        try:
            save_tensors.begin(draft, made, spec.world_group)
            name, about = ("copy" if background else "write"), {"bytes": made.nbytes}
            with span(name, Row.CHECKPOINT, about):
                how = self._start if background else self._write
                how(engine_tensors, made, draft, finish)
        except CheckpointNotWritten:
            if spec.world_group.rank == 0:
                draft.discard()  # a part of it would only take up room
            raise
        return draft.final

    def claim(self, folder: Path) -> None:
        """Keep other jobs out of `folder`, where this one saves. Collective.

        Raises FolderInUse, on all ranks alike, where one has it already. That nothing can be
        written there is for the save to report.
        """
        failure = None
        if self._spec.world_group.rank == 0:
            try:
                with suppress(OSError):  # as of a disk that may only be read
                    self._take(folder)
            except FolderInUse as error:
                failure = str(error)
        consistency.agree(self._spec.world_group, failure, FolderInUse)

    def _take(self, folder: Path) -> None:
        held = self._claims.get(folder)
        if held is not None and held.holds():
            return
        if held is not None:
            held.release()
        claim = self._claims[folder] = take(folder)
        if not claim.locked:
            self._world.say_once(
                f"the file system of {folder} has no locks: see that no other job saves there."
            )

    def end_removals(self, folder: Path) -> None:
        """Remove what a killed run left half removed in `folder`: a run that has nothing more to
        train makes no save that would."""
        if self._spec.world_group.rank == 0 and folder in self._claims:
            atomic_folders.end_removals(folder)

    def leave(self) -> None:
        """Let other jobs save where this engine did."""
        _release(self._claims)

    def _write(
        self,
        engine_tensors: EngineTensors,
        made: save_tensors.SavePlan,
        draft: Draft,
        finish: Callable[[Any], None],
    ) -> None:
        """Write all of it, and return when it is complete."""
        group = engine_tensors.spec.world_group
        sums = save_tensors.write(engine_tensors, made, draft)
        failure = None
        if group.rank == 0:
            failure = save_tensors.disk_error_of(lambda: finish([sums]), draft)
        consistency.agree(group, failure, CheckpointNotWritten)

    def tolerate(self, error: CheckpointNotWritten) -> None:
        """Say that a checkpoint is missing, where training goes on without; else raise."""
        if self._spec.settings.save_failure == "stop":
            raise error
        self._world.print(f"shardwise: {error} Training goes on.", file=sys.stderr)

    def _beside(
        self, engine_tensors: EngineTensors, made: save_tensors.SavePlan
    ) -> tuple[dict[str, Any], dict[str, bytes], str | None]:
        """What stands beside the tensors, and why it cannot be known; on rank 0."""
        if engine_tensors.spec.world_group.rank > 0:
            return {}, {}, None
        try:
            tracked, files = self._tracked.states()
            fields = save_tensors.state_fields(engine_tensors, made)
        except CheckpointError as error:
            return {}, {}, str(error)
        fields |= {
            "step": self._state.steps,
            "seed": self._world.seed,
            "scaling": self._scaling(),
            "tracked": tracked,
            "written_by": _writer(self._world, engine_tensors),
        }
        if (draws := self._world.draws.state()) is not None:
            fields["draws"] = draws
        return fields, files | _config_of(engine_tensors), None

    def _scaling(self) -> dict[str, Any]:
        """How gradients are scaled."""
        unit, wide = self._state.weighting.unit, self._objects.states.gradients.wide
        return self._state.scale.state() | {"unit": unit, "wide": wide}

    def _start(
        self,
        engine_tensors: EngineTensors,
        made: save_tensors.SavePlan,
        draft: Draft,
        finish: Callable[[Any], None],
    ) -> None:
        """Copy what is to be written, and let a thread write it."""
        group = engine_tensors.spec.world_group
        self._copies.begin()
        save_tensors.lend(engine_tensors, made, self._copies)
        failure = save_tensors.disk_error_of(lambda: reserve(draft.path, group.rank), draft)
        consistency.agree(group, failure, CheckpointNotWritten)
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
            _await_at_exit(WeakMethod(self.wait))
        self._job.start()

    @property
    def has_failed(self) -> bool:
        """Whether a save in the background is known, on this rank, to have failed."""
        return self._job is not None and not self._job.is_alive() and bool(self._job.failure)

    # -- leaving at a step boundary ---------------------------------------------------------

    def mark_boundary(self) -> None:
        """Take the model's buffers as they are now for those of a save to come."""
        self._objects.buffers.keep()

    def go_back_to_boundary(self) -> None:
        """Undo what a forward has done since, that no step will follow. Without a loop over a
        Loader that is also what was drawn for it in common; in one, the body has been finished."""
        self._objects.buffers.restore()
        if not self._world.current_batch.in_loop():
            self._world.draws.go_back_to_boundary()

    def at_boundary(self) -> AbstractContextManager[None]:
        """Around a save for others, who draw again what this process has drawn for the step that it
        goes on to make."""
        in_loop = self._world.current_batch.in_loop()
        return nullcontext() if in_loop else self._world.draws.at_boundary()

    def wait(self) -> None:
        """Return when no save is on its way. Raises CheckpointNotWritten, on all ranks alike, if it
        has failed, unless training goes on without."""
        if self._job is not None:
            job, self._job = self._job, None
            with span("wait for the save before", Row.CHECKPOINT):
                job.join()
            if job.failure is not None:
                self.tolerate(CheckpointNotWritten(job.failure))


def _finish(
    made: save_tensors.SavePlan,
    fields: Mapping[str, Any],
    more: Mapping[str, bytes],
    draft: Draft,
    keep: int | None,
    kept: Callable[[], None],
    say: Callable[[str], None],
    several: Any,
) -> None:
    """Give a checkpoint its name, then remove those that are too many."""
    sums = save_tensors.merged(several)
    draft.finish(save_tensors.documents(made, sums, fields, more))
    kept()
    if keep is not None:
        draft.prune(keep)
    for line in draft.left:  # this one is complete, whatever is left beside it
        say(line)


def _release(claims: dict[Path, FolderClaim]) -> None:
    while claims:
        claims.popitem()[1].release()


def _config_of(engine_tensors: EngineTensors) -> dict[str, bytes]:
    """The model's config.json, as transformers' models have one."""
    found = {}
    for model in engine_tensors.spec.models if len(engine_tensors.spec.models) == 1 else ():
        config: Any = getattr(model, "config", None)
        if callable(getattr(config, "to_json_string", None)):
            if not getattr(config, "architectures", None):
                config.architectures = [type(model).__name__]
            found["config.json"] = config.to_json_string().encode()
    return found


def _writer(world: World, engine_tensors: EngineTensors) -> dict[str, Any]:
    """Who wrote it: for people to read, and never looked at."""
    return {
        "shardwise": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "workers": world.size,
        "placement": engine_tensors.spec.placement.name,
        "precision": engine_tensors.spec.settings.precision,
    }


def _await_at_exit(wait: WeakMethod[Callable[[], None]]) -> None:
    """Wait for a save in the background before the process ends, and end it with 1 if that fails:
    by then nobody is there to be raised at."""

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
