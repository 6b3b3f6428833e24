"""Checkpoints of an engine: saving, loading and resuming."""

from __future__ import annotations

import atexit
import os
import platform
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakMethod, finalize

import torch

from shardwise.checkpoint import folders
from shardwise.checkpoint.background import Copies, Job, reserve
from shardwise.checkpoint.folder_lock import Claim, take
from shardwise.checkpoint.folders import Draft, Found
from shardwise.checkpoint.writer import Writer
from shardwise.engine import consistency, loading, optimizer_numbers, saving, usage_checks
from shardwise.engine.checkpoint_tensors import Lending
from shardwise.engine.exact_mean import Seeds
from shardwise.engine.tracking import Tracking
from shardwise.engine.user_objects import Takeover
from shardwise.errors import (
    BrokenCheckpoint,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotWritten,
    FolderInUse,
    UsageError,
)
from shardwise.model.precision import LossScale
from shardwise.randomness import GeneratorStates
from shardwise.timeline import Row, span
from shardwise.world import World, leave

T = TypeVar("T")


class Checkpoints:
    """Saves and loads what `held` has, with the numbers beside it and what is tracked.

    `number` is the engine's in this process.
    """

    def __init__(
        self, world: World, held: Takeover, scale: LossScale, seeds: Seeds, number: int
    ) -> None:
        self._world = world
        self._held = held
        self._scale = scale
        self._seeds = seeds
        self._number = number
        self.tracking = Tracking()
        self._said: set[str] = set()
        self._copies = Copies()
        self._job: Job | None = None
        self._claims: dict[Path, Claim] = {}
        finalize(self, _release, self._claims)

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._world.print(f"shardwise: {line}", file=sys.stderr)

    # -- saving ---------------------------------------------------------------------------

    def save(
        self, folder: Path, steps: int, *, keep: int | None, background: bool, split: int
    ) -> Path:
        """See Engine.save; raises CheckpointNotWritten whatever the settings say."""
        with span("save", Row.CHECKPOINT):
            return self._save(folder, steps, keep=keep, background=background, split=split)

    def _save(
        self, folder: Path, steps: int, *, keep: int | None, background: bool, split: int
    ) -> Path:
        if keep is not None and keep < 1:
            raise UsageError(f"keep takes how many checkpoints to keep, 1 or more, not {keep}.")
        self.wait()
        self._held.look_for_changes()
        for line in self.tracking.lacks(
            self._held.recipe.optimizers, self._world.feed.training_streams()
        ):
            self._say(line)
        recipe, states = self._held.recipe, self._held.states
        self.claim(folder)
        lending = Lending(recipe, states)
        made = saving.plan(lending, split)
        fields, more, failure = self._beside(lending, made, steps)
        consistency.agree(recipe.run, failure)
        draft = Draft(folder, steps, made.nbytes)
        kept = partial(self._world.progress.kept, self._number, steps)
        finish = partial(_finish, made, fields, more, draft, keep, kept, self._say)
        try:
            saving.begin(draft, made, recipe.run)
            name, about = ("copy" if background else "write"), {"bytes": made.nbytes}
            with span(name, Row.CHECKPOINT, about):
                how = self._start if background else self._write
                how(lending, made, draft, finish)
        except CheckpointNotWritten:
            if recipe.run.rank == 0:
                draft.discard()  # a part of it would only take up room
            raise
        return draft.final

    def claim(self, folder: Path) -> None:
        """Keep other jobs out of `folder`, where this one saves. Collective.

        Raises FolderInUse, on all ranks alike, where one has it already. That nothing can be
        written there is for the save to tell.
        """
        failure = None
        if self._held.recipe.run.rank == 0:
            try:
                with suppress(OSError):  # as of a disk that may only be read
                    self._take(folder)
            except FolderInUse as error:
                failure = str(error)
        consistency.agree(self._held.recipe.run, failure, FolderInUse)

    def _take(self, folder: Path) -> None:
        held = self._claims.get(folder)
        if held is not None and held.holds():
            return
        if held is not None:
            held.release()
        claim = self._claims[folder] = take(folder)
        if not claim.locked:
            self._say(
                f"the file system of {folder} has no locks: see that no other job saves there."
            )

    def leave(self) -> None:
        """Let other jobs save where this engine did."""
        _release(self._claims)

    def _write(
        self,
        lending: Lending,
        made: saving.Plan,
        draft: Draft,
        finish: Callable[[Any], None],
    ) -> None:
        """Write all of it, and return when it is complete."""
        group = lending.recipe.run
        sums = saving.write(lending, made, draft)
        failure = None
        if group.rank == 0:
            failure = saving.told_of(lambda: finish([sums]), draft)
        consistency.agree(group, failure, CheckpointNotWritten)

    def tolerate(self, error: CheckpointNotWritten) -> None:
        """Say that a checkpoint is missing, where training goes on without; else raise."""
        if self._held.recipe.settings.save_failure == "stop":
            raise error
        self._world.print(f"shardwise: {error} Training goes on.", file=sys.stderr)

    def _beside(
        self, lending: Lending, made: saving.Plan, steps: int
    ) -> tuple[dict[str, Any], dict[str, bytes], str | None]:
        """What stands beside the tensors, and why it cannot be told; on rank 0."""
        if lending.recipe.run.rank > 0:
            return {}, {}, None
        try:
            tracked, files = self.tracking.states()
            fields = saving.state_fields(lending, made)
        except CheckpointError as error:
            return {}, {}, str(error)
        fields |= {
            "step": steps,
            "seed": self._world.seed,
            "scaling": self._scale.state()
            | {"unit": self._seeds.unit, "wide": self._held.states.gradients.wide},
            "tracked": tracked,
            "written_by": _writer(self._world, lending),
        }
        if (draws := self._world.draws.state()) is not None:
            fields["draws"] = draws
        return fields, files | _config_of(lending), None

    def _start(
        self,
        lending: Lending,
        made: saving.Plan,
        draft: Draft,
        finish: Callable[[Any], None],
    ) -> None:
        """Copy what is to be written, and let a thread write it."""
        group = lending.recipe.run
        self._copies.begin()
        saving.lend(lending, made, self._copies)
        failure = saving.told_of(lambda: reserve(draft.path, group.rank), draft)
        consistency.agree(group, failure, CheckpointNotWritten)
        self._job = Job(
            self._copies,
            Writer(draft.path, made.sets),
            draft,
            finish,
            rank=group.rank,
            size=group.size,
            limit=self._world.settings.timeout,
        )
        _at_exit(self)
        self._job.start()

    @property
    def has_failed(self) -> bool:
        """Whether a save in the background is known, on this rank, to have failed."""
        return self._job is not None and not self._job.is_alive() and bool(self._job.failure)

    # -- leaving at a step boundary ---------------------------------------------------------

    def mark_boundary(self) -> None:
        """Take the model's buffers, and the place in what ranks draw in common, as they are now
        for those of a save to come."""
        self._held.buffers.keep()
        self._world.draws.mark_boundary()

    def go_back_to_boundary(self) -> None:
        """Undo what a forward has done since, that no step will follow. Without a loop over a
        Loader that is also what was drawn for it in common; in one, the body has been finished."""
        self._held.buffers.restore()
        if not self._world.feed.in_loop():
            self._world.draws.go_back_to_boundary()

    def wait(self) -> None:
        """Return when no save is on its way. Raises CheckpointNotWritten, on all ranks alike, if it
        has failed, unless training goes on without."""
        if self._job is not None:
            job, self._job = self._job, None
            with span("wait for the save before", Row.CHECKPOINT):
                job.join()
            if job.failure is not None:
                self.tolerate(CheckpointNotWritten(job.failure))

    # -- loading --------------------------------------------------------------------------

    def found(self, folder: Path) -> tuple[list[Found], list[Found]]:
        """The complete checkpoints in `folder`, and what only looks like one: newest first, alike
        on all ranks. Collective.

        Raises CheckpointError where `folder` cannot be read, or is itself a checkpoint.
        """
        self.wait()
        mine: tuple[list[Found], list[Found]] = [], []
        failure = None
        if self._held.recipe.run.rank == 0:
            try:
                mine = folders.complete(folder)[::-1], folders.lost(folder)[::-1]
            except OSError as error:
                failure = f"{folder} cannot be looked into: {error.strerror or error}."
            if os.path.lexists(folder / folders.DOCUMENT) or folders.lacks_document(folder):
                failure = (
                    f"{folder} is a checkpoint itself, and resume takes the folder of all: write "
                    f'engine.resume("{folder.parent}"), or engine.load("{folder}") for just this.'
                )
        consistency.agree(self._held.recipe.run, failure)
        told: tuple[list[Found], list[Found]] = self._world.broadcast_object(mine)
        return told

    def load(self, path: Path, *, strict: bool, model_only: bool) -> int | None:
        """See Engine.load; returns the number of steps, where `path` says it.

        What raises BrokenCheckpoint has changed nothing, and raises it on all ranks alike.
        """
        self.wait()
        self._held.look_for_changes()
        lending = Lending(self._held.recipe, self._held.states)
        with ExitStack() as stack:
            stack.enter_context(span("load", Row.CHECKPOINT))
            examine = partial(self._examine, path, lending, stack, strict=strict, alone=model_only)
            source, beside = self._alike(path, examine)
            if model_only and not source.fields and folders.lacks_document(path):
                self._say(
                    f"{path} has lost its {folders.DOCUMENT}: whether its weights are those that "
                    "were written cannot be told."
                )
            if self._held.make_room_for_averages(source.averaged):
                lending = Lending(self._held.recipe, self._held.states)
            loading.fill_model(lending, source)
            self._held.buffers.remember()
            if self._held.recipe.line is not None:
                self._held.recipe.line.loans.changed()
            if beside is None:
                return None
            loading.fill_optimizers(lending, source, beside.optimizers)
        self._scale.restore(beside.scaling)
        self._seeds.unit = beside.scaling["unit"]
        if beside.scaling["wide"] and self._held.recipe.settings.reduce_dtype == "fp32":
            self._held.states.gradients.widen()
        self._take_seed(beside.seed)
        if beside.draws is not None:
            self._world.draws.restore(beside.draws)
        self.tracking.give(beside.tracked)
        if beside.step:
            usage_checks.tell_schedulers(self._held.recipe.optimizers)
        self._world.progress.stepped(self._number, beside.step)
        self._world.progress.kept(self._number, beside.step)
        return beside.step

    def _examine(
        self, path: Path, lending: Lending, stack: ExitStack, *, strict: bool, alone: bool
    ) -> tuple[loading.Source, _Beside | None]:
        """What `path` has, of which this rank has read its part to the end.

        The second is None where only the model is wanted (`alone`) or there is no more.
        """
        source = loading.open_source(path, lending, strict=strict, alone=alone, stack=stack)
        if not source.fields:
            return source, None
        loading.verify(path, source, lending.recipe.run.rank, lending.recipe.run.size)
        if alone:
            return source, None
        beside = _beside(path, source.fields, self.tracking)
        optimizer_numbers.check(lending, source.fields, beside.optimizers)
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
        told = self._held.recipe.run.gather_objects(failure)
        for kind in (BrokenCheckpoint, CheckpointMismatch, CheckpointError):
            for rank, each in enumerate(told):
                if each is not None and each[0] == kind.__name__:
                    known = all(other == each for other in told)
                    raise kind(each[1] if known else f"Rank {rank}: {each[1]}")
        assert result is not None
        return result

    def _take_seed(self, seed: int) -> None:
        """Go on with the seed that was drawn, unless this run has chosen one."""
        chosen = self._world.settings.seed
        if chosen is None:
            self._world.seed = seed
        elif chosen != seed:
            self._say(
                f"this run has the seed {chosen} and the checkpoint {seed}: data order and "
                f"dropout are not those of the run that wrote it. Write --seed {seed} for those."
            )


@dataclass(frozen=True)
class _Beside:
    """What stands in a checkpoint beside the tensors, as it is given back."""

    step: int
    seed: int
    scaling: Mapping[str, Any]
    tracked: Mapping[str, Any]
    optimizers: optimizer_numbers.Numbers
    draws: GeneratorStates | None


def _beside(path: Path, fields: Mapping[str, Any], tracking: Tracking) -> _Beside:
    """Raises BrokenCheckpoint for what cannot be read."""
    tracked = tracking.read(path, fields)
    numbers = optimizer_numbers.read(fields)
    step, seed, scaling = fields["step"], fields["seed"], fields["scaling"]
    return _Beside(step, seed, scaling, tracked, numbers, _draws(path, fields.get("draws")))


def _draws(path: Path, told: dict[str, Any] | None) -> GeneratorStates | None:
    """Where what ranks draw in common goes on. Raises BrokenCheckpoint for what is none."""
    try:
        return None if told is None else GeneratorStates.of_plain(told)
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise BrokenCheckpoint(
            f"{path} does not tell where draws go on ({type(error).__name__}: {error}). Take "
            "another checkpoint."
        ) from error


def _finish(
    made: saving.Plan,
    fields: Mapping[str, Any],
    more: Mapping[str, bytes],
    draft: Draft,
    keep: int | None,
    kept: Callable[[], None],
    say: Callable[[str], None],
    several: Any,
) -> None:
    """Give a checkpoint its name, then remove those that are too many."""
    sums = saving.merged(several)
    draft.finish(saving.documents(made, sums, fields, more))
    kept()
    if keep is not None:
        draft.prune(keep)
    for line in draft.left:  # this one is complete, whatever is left beside it
        say(line)


def _release(claims: dict[Path, Claim]) -> None:
    while claims:
        claims.popitem()[1].release()


def _config_of(lending: Lending) -> dict[str, bytes]:
    """The model's config.json, as transformers' models have one."""
    found = {}
    for model in lending.recipe.models if len(lending.recipe.models) == 1 else ():
        config: Any = getattr(model, "config", None)
        if callable(getattr(config, "to_json_string", None)):
            if not getattr(config, "architectures", None):
                config.architectures = [type(model).__name__]
            found["config.json"] = config.to_json_string().encode()
    return found


def _writer(world: World, lending: Lending) -> dict[str, Any]:
    """Who wrote it: for people to read, and never looked at."""
    return {
        "shardwise": version("shardwise"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "workers": world.size,
        "placement": lending.recipe.placement.name,
        "precision": lending.recipe.settings.precision,
    }


def _at_exit(checkpoints: Checkpoints) -> None:
    """Wait for a save in the background before the process ends, and end it with 1 if that fails:
    by then nobody is there to be raised at."""
    held = WeakMethod(checkpoints.wait)

    def last() -> None:
        try:
            if (wait := held()) is not None:
                wait()
        except CheckpointError as error:
            print(f"shardwise: {error}", file=sys.stderr, flush=True)
            leave()
            sys.stdout.flush()
            os._exit(1)

    if not getattr(checkpoints, "_awaited", False):
        checkpoints._awaited = True  # type: ignore[attr-defined]
        atexit.register(last)
