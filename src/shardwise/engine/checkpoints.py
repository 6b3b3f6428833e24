"""Checkpoints of an engine: what is tracked beside it, saving, loading and resuming."""

from __future__ import annotations

import atexit
import io
import os
import platform
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakMethod

import torch
from torch import optim

from shardwise import world as worlds
from shardwise.checkpoint import folders, plain
from shardwise.checkpoint.background import Copies, Job, reserve
from shardwise.checkpoint.folders import Draft
from shardwise.checkpoint.writer import Writer
from shardwise.engine import habits, loading, saving
from shardwise.engine.exact_mean import Seeds
from shardwise.engine.inventory import Lending
from shardwise.engine.takeover import Takeover
from shardwise.errors import (
    BrokenCheckpoint,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotWritten,
    UsageError,
)
from shardwise.model.precision import LossScale
from shardwise.world import World


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
        self._tracked: dict[str, Any] = {}
        self._pending: dict[str, Any] = {}
        self._said: set[str] = set()
        self._copies = Copies()
        self._job: Job | None = None

    # -- what is tracked ------------------------------------------------------------------

    def track(self, objects: Mapping[str, Any]) -> None:
        """Save and load `objects` too, by name; a state that was loaded before is theirs now."""
        for name, each in objects.items():
            if name in self._tracked and self._tracked[name] is not each:
                raise UsageError(f"{name} is tracked already: give each object a name of its own.")
            if not all(callable(getattr(each, m, None)) for m in ("state_dict", "load_state_dict")):
                raise UsageError(
                    f"engine.track({name}=...) takes an object with state_dict() and "
                    f"load_state_dict(), not {type(each).__name__}."
                )
            self._tracked[name] = each
            if name in self._pending:
                each.load_state_dict(self._pending.pop(name))

    def _states_of_tracked(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Their states: as JSON, and as files of torch.save where they hold larger tensors."""
        fields: dict[str, Any] = {}
        files: dict[str, bytes] = {}
        for name, each in self._tracked.items():
            state = each.state_dict()
            try:
                fields[name] = plain.encode(state)
            except plain.NotPlain as error:
                fields[name] = {"$file": f"tracked-{name}.pt"}
                files[f"tracked-{name}.pt"] = _pickled(name, state, str(error))
        return fields, files

    def _say_what_lacks(self) -> None:
        """Say, once, what a resume from this save would start anew."""
        known = [*self._tracked.values()]
        for face in self._held.recipe.optimizers:
            scheduled = any("initial_lr" in group for group in face.param_groups)
            if scheduled and not any(_schedules(each, face) for each in known):
                self._say(
                    f"a learning-rate scheduler acts on {type(face).__name__} and is not tracked: "
                    "a resume would start it anew. Write engine.track(scheduler=scheduler)."
                )
        names = {getattr(each, "name", None) for each in known}
        for stream in self._world.feed.training_streams():
            if not stream.passing and stream.name not in names:
                self._say(
                    f"{stream.name} is not tracked: a resume would begin its data anew. Write "
                    "engine.track(loader=loader)."
                )
        for name in self._pending:
            self._say(
                f"the checkpoint that was loaded has the state of {name}, which was not tracked "
                f"since: this one is without. Write engine.track({name}=...)."
            )

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._world.print(f"shardwise: {line}", file=sys.stderr)

    # -- saving ---------------------------------------------------------------------------

    def save(
        self, folder: Path, steps: int, *, keep: int | None, background: bool, split: int
    ) -> Path:
        """See Engine.save; raises CheckpointNotWritten whatever the settings say."""
        if keep is not None and keep < 1:
            raise UsageError(f"keep takes how many checkpoints to keep, 1 or more, not {keep}.")
        self.wait()
        self._held.look_for_changes()
        self._say_what_lacks()
        recipe, states = self._held.recipe, self._held.states
        lending = Lending(recipe, states)
        made = saving.plan(lending, split)
        fields, more, failure = self._beside(lending, made, steps)
        saving.agree(recipe.group, failure)
        draft = Draft(folder, steps, made.nbytes)
        kept = partial(self._world.telling.kept, self._number, steps)
        finish = partial(_finish, made, fields, more, draft, keep, kept)
        try:
            saving.begin(draft, made, recipe.group)
            if background:
                self._start(lending, made, draft, finish)
            else:
                self._write(lending, made, draft, finish)
        except CheckpointNotWritten:
            if recipe.group.rank == 0:
                draft.discard()  # a part of it would only take up room
            raise
        return draft.final

    def _write(
        self,
        lending: Lending,
        made: saving.Plan,
        draft: Draft,
        finish: Callable[[Any], None],
    ) -> None:
        """Write all of it, and return when it is complete."""
        group = lending.recipe.group
        sums = saving.write(lending, made, draft)
        failure = None
        if group.rank == 0:
            failure = saving.told_of(lambda: finish([sums]), draft)
        saving.agree(group, failure, CheckpointNotWritten)

    def tolerate(self, error: CheckpointNotWritten) -> None:
        """Say that a checkpoint is missing, where training goes on without; else raise."""
        if self._held.recipe.settings.save_failure == "stop":
            raise error
        self._world.print(f"shardwise: {error} Training goes on.", file=sys.stderr)

    def _beside(
        self, lending: Lending, made: saving.Plan, steps: int
    ) -> tuple[dict[str, Any], dict[str, bytes], str | None]:
        """What stands beside the tensors, and why it cannot be told; on rank 0."""
        if lending.recipe.group.rank > 0:
            return {}, {}, None
        try:
            tracked, files = self._states_of_tracked()
            fields = saving.state_fields(lending, made.told)
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
        return fields, files | _config_of(lending), None

    def _start(
        self,
        lending: Lending,
        made: saving.Plan,
        draft: Draft,
        finish: Callable[[Any], None],
    ) -> None:
        """Copy what is to be written, and let a thread write it."""
        group = lending.recipe.group
        self._copies.begin()
        saving.lend(lending, made, self._copies)
        failure = saving.told_of(lambda: reserve(draft.path, group.rank), draft)
        saving.agree(group, failure, CheckpointNotWritten)
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

    def look(self) -> None:
        """Notice how a save in the background has ended, once; raise CheckpointNotWritten if it
        has failed, unless training goes on without."""
        if self._job is not None and not self._job.is_alive():
            job, self._job = self._job, None
            job.join()
            if job.failure is not None:
                self.tolerate(CheckpointNotWritten(job.failure))

    # -- leaving at a step boundary ---------------------------------------------------------

    def mark_boundary(self) -> None:
        """Take the model's buffers as they are now for those of a save to come."""
        self._held.buffers.keep()

    def go_back_to_boundary(self) -> None:
        """Undo what a forward has done since, that no step will follow."""
        self._held.buffers.restore()

    def wait(self) -> None:
        """Return when no save is on its way. Raises as `look` does."""
        if self._job is not None:
            self._job.join()
            self.look()

    # -- loading --------------------------------------------------------------------------

    def newest(self, folder: Path) -> Path | None:
        """The newest complete checkpoint in `folder`, alike on all ranks. Collective."""
        self.wait()
        found = folders.complete(folder)
        mine = found[-1].path if found else None
        newest: Path | None = self._world.broadcast_object(mine)
        return newest

    def load(self, path: Path, *, strict: bool, model_only: bool) -> int | None:
        """See Engine.load; returns the number of steps, where `path` says it."""
        self.wait()
        self._held.look_for_changes()
        lending = Lending(self._held.recipe, self._held.states)
        with ExitStack() as stack:
            source = loading.open_source(path, lending, strict=strict, stack=stack)
            if source.fields:
                group = lending.recipe.group
                wrong = loading.verify(path, source, group.rank, group.size)
                saving.agree(group, wrong, BrokenCheckpoint)
            if source.fields and not model_only:
                loading.check_optimizers(lending, source.fields)
                self._check_tracked(path, source.fields["tracked"])
            loading.fill_model(lending, source)
            self._held.buffers.remember()
            if model_only or not source.fields:
                return None
            loading.fill_optimizers(lending, source)
        fields = source.fields
        try:
            self._scale.restore(fields["scaling"])
            self._seeds.unit = fields["scaling"]["unit"]
            if fields["scaling"]["wide"] and self._held.recipe.settings.reduce_dtype == "fp32":
                self._held.states.gradients.widen()
        except (KeyError, TypeError, ValueError) as error:
            raise BrokenCheckpoint(f"{path} does not tell the loss scale: {error}.") from error
        self._take_seed(fields["seed"])
        self._give_tracked(path, fields["tracked"])
        steps: int = fields["step"]
        if steps:
            habits.tell_schedulers(self._held.recipe.optimizers)
        self._world.telling.stepped(self._number, steps)
        self._world.telling.kept(self._number, steps)
        return steps

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

    def _check_tracked(self, path: Path, told: Mapping[str, Any]) -> None:
        missing = sorted(set(self._tracked) - set(told))
        if missing:
            raise CheckpointMismatch(
                f"{path} has no state of {', '.join(missing)}, which engine.track was given: it "
                f"has {', '.join(sorted(told)) or 'nothing tracked'}. Load the model alone "
                "(engine.load(path, model_only=True)), or track the same objects."
            )

    def _give_tracked(self, path: Path, told: Mapping[str, Any]) -> None:
        for name, value in told.items():
            state = _unpickled(path, value) if _is_file(value) else plain.decode(value)
            if name in self._tracked:
                self._tracked[name].load_state_dict(state)
            else:
                self._pending[name] = state


def _finish(
    made: saving.Plan,
    fields: Mapping[str, Any],
    more: Mapping[str, bytes],
    draft: Draft,
    keep: int | None,
    kept: Callable[[], None],
    several: Any,
) -> None:
    """Give a checkpoint its name, then remove those that are too many."""
    sums = saving.merged(several)
    draft.finish(saving.documents(made, sums, fields, more))
    kept()
    if keep is not None:
        draft.prune(keep)


def _schedules(each: Any, face: optim.Optimizer) -> bool:
    """Whether `each` is, or may wrap, a scheduler of `face`."""
    if hasattr(each, "get_last_lr"):
        return getattr(each, "optimizer", face) is face or hasattr(each, "_schedulers")
    return False


def _pickled(name: str, state: Any, odd: str) -> bytes:
    """A state as torch.save writes it, if it can be read without running code."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    if unsafe:
        raise CheckpointError(
            f"The state of {name} holds {odd}, and reading {', '.join(unsafe)} could run code, "
            "which a checkpoint never does. Let its state_dict() return tensors, numbers, text, "
            "and lists and maps of those."
        )
    return buffer.getvalue()


def _is_file(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"$file"}


def _unpickled(path: Path, value: Mapping[str, str]) -> Any:
    name = value["$file"]
    if Path(name).name != name:
        raise BrokenCheckpoint(f"{path} names the file {name!r}, which is not one in its folder.")
    try:
        return torch.load(path / name, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch meets in a file that is not whole
        raise BrokenCheckpoint(f"{path / name} cannot be read: {error}.") from error


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
            worlds._leave()
            sys.stdout.flush()
            os._exit(1)

    if not getattr(checkpoints, "_awaited", False):
        checkpoints._awaited = True  # type: ignore[attr-defined]
        atexit.register(last)
