"""The guard of one engine, which `engine/guarded.py` calls in the engine's `backward` and `step`.

before a backward pass   every K steps: compute the step twice
before the reduction     with --guard-memory: verify the checksums of all states
after the update         every K steps: exchange digests of copies, and findings
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.checkpoint.spec_view import SpecView, StatesView
from shardwise.comm import Collectives
from shardwise.config import Settings
from shardwise.errors import ConfigError
from shardwise.guard.checks import Checks
from shardwise.guard.findings import BUFFER, Finding
from shardwise.guard.memory import MemorySeals, Piece, other_pieces, pieces_of
from shardwise.guard.second_run import SecondRun
from shardwise.guard.spikes import Spikes
from shardwise.guard.step_times import FORWARD, StepTimes, Stragglers
from shardwise.model.module_hooks import attach
from shardwise.states.parameters.parameters import Parameters
from shardwise.timeline import Row, recorder
from shardwise.timeline.recorder import TimelineEvent
from shardwise.world.world import World


class GuardedEngine(Protocol):
    """The attributes of an engine that its guard uses."""

    @property
    def world(self) -> World: ...
    @property
    def spec(self) -> SpecView: ...
    @property
    def states(self) -> StatesView: ...
    @property
    def steps(self) -> int: ...


class GuardedResidency(Protocol):
    """The part of the sharded-parameter residency interface that a second run needs."""

    def set_aside(self) -> Callable[[], None]:
        """Set the recorded forward passes aside, and return a function that restores them."""


def check(settings: Settings) -> None:
    """Raise ConfigError if the guard cannot be combined with another setting."""
    refused = (
        ("--pipeline", settings.pipeline > 1, "a stage cannot compute a step twice on its own"),
        ("--tensor", settings.tensor > 1, "ranks of a replica hold different parts of a layer"),
        ("--islands", settings.islands not in (1, None), "islands hold different weights"),
        ("--behind", settings.behind is not None, "the applied gradients are of an earlier step"),
        ("--expert", settings.expert > 1, "ranks hold different experts"),
        ("--exact", settings.exact is not None, "a micro-shard has its own random state"),
    )
    for flag, is_on, why in refused:
        if is_on:
            raise ConfigError(
                f"--guard {settings.guard} cannot be combined with {flag}: {why}. Remove one of "
                "them."
            )


class EngineGuard:
    """Checks the steps of one engine. All ranks call its methods at the same points.

    Args:
        engine: The engine's state.
        group: Ranks that step together.
        shard_group: Ranks across which states are sharded.
        residency: Gathers sharded parameters; None if they are replicated.
        set_suspects_aside: Renames the checkpoints that were written after a given step.
    """

    def __init__(
        self,
        engine: GuardedEngine,
        group: Collectives,
        shard_group: Collectives,
        residency: Callable[[], GuardedResidency | None],
        set_suspects_aside: Callable[[int], list[str]],
    ) -> None:
        settings = engine.spec.settings
        check(settings)
        assert settings.guard is not None
        self._engine = engine
        self._group = group
        self._residency = residency
        self._set_suspects_aside = set_suspects_aside
        self._every = settings.guard
        self._seals = MemorySeals() if settings.guard_memory else None
        models = [
            (prefix or type(model).__name__, model)
            for prefix, model in zip(engine.spec.prefixes, engine.spec.models, strict=True)
        ]
        world = engine.world
        self.second_run = SecondRun(
            models,
            world.device,
            self._apart,
            world.draws.begin,
            # An error of one rank reaches the others within a pass. It would look like an operation
            # that is not deterministic, which all ranks see.
            impossible="--context exchanges tokens in each pass" if settings.context > 1 else None,
        )
        waits = world.collectives.status_server.waits
        self.times = StepTimes(lambda: waits.seconds)
        self.spikes = Spikes()
        self.spike_action = settings.guard_spikes
        self._stragglers = Stragglers(group, (world.host, str(world.device)), world.print)
        self._hooks = [
            attach(model.register_forward_pre_hook, self._enter_forward)
            for _, model in models
            # Hooks on a compiled module would become part of its graph.
            if model._compiled_call_impl is None
        ]
        self._sealed: tuple[Parameters, int] | None = None
        self._checks = Checks(
            group,
            float(shard_group.rank),
            settings.guard_action,
            world.print,
            world.say_once,
            engine.steps,
        )
        self._arm_if_due()

    @property
    def is_due(self) -> bool:
        """True if the current step is checked."""
        return (self._engine.steps + 1) % self._every == 0

    @property
    def skips(self) -> bool:
        """True if a step with an error is skipped instead of ending the run."""
        return self._checks.action == "restore"

    def close(self) -> None:
        """Remove all hooks from the models."""
        self.second_run.disarm()
        while self._hooks:
            self._hooks.pop().remove()

    def _enter_forward(self, *_: Any) -> None:
        # Not in an evaluation or a recomputation.
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self.times.enter(FORWARD)

    def _arm_if_due(self) -> None:
        self.second_run.disarm()
        if self.is_due:
            self.second_run.arm()

    @contextmanager
    def _apart(self) -> Iterator[None]:
        residency = self._residency()
        bring_back = None if residency is None else residency.set_aside()
        try:
            yield
        finally:
            if bring_back is not None:
                bring_back()

    def before_backward(
        self,
        loss: Tensor,
        seed: Tensor | None,
        passes: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """If this step is checked, compute the gradients of `loss` once more than training does."""
        named = [(each.name, each.parameter) for each in self._engine.states.parameters.named]
        self.second_run.before_backward(loss, seed, named, passes)

    # -- memory -------------------------------------------------------------------------------

    def check_memory(self) -> None:
        """Check that no state has changed since the last update. Call this before each reduction.

        Collective with --guard-memory. Raises GuardError on all ranks, before the wrong values
        can affect the update.
        """
        if self._seals is None:
            return
        self._look_at_memory()
        group = self._group
        flag = torch.tensor([float(bool(self._checks.found))], device=group.small_device)
        # One more small collective per step. Otherwise a rank could raise while others wait for it.
        if group.read(group.gather_rows(flag)).any():
            self._check(self._engine.steps + 1)

    def _look_at_memory(self) -> None:
        if self._seals is None:
            return
        engine = self._engine
        # User code may write to parameters between steps. The engine then updates masters and other
        # ranks' copies from them, so nothing can be compared.
        parameters = engine.states.parameters
        if self._sealed == (parameters, parameters.changes) and not parameters.written():
            pieces = pieces_of(engine.spec, engine.states)
            self._checks.found += self._seals.check(engine.steps + 1, self._group.rank, pieces)
        self._seals.open()

    # -- after a step -------------------------------------------------------------------------

    def after_step(self) -> None:
        """Check the completed step. Collective every K steps.

        Raises GuardError on all ranks if an error was found and the action is "stop", or if it is
        "restore" and no rank has an intact copy.
        """
        engine, step = self._engine, self._engine.steps
        self.times.end_step()
        if step % self._every == 0:
            self._check(step)
        if self._seals is not None:
            self._seals.seal(pieces_of(engine.spec, engine.states))
            self._sealed = engine.states.parameters, engine.states.parameters.changes
        self._arm_if_due()
        self.times.begin_step()

    def explain_nonfinite(self) -> None:
        """Run all checks now, because the current step's gradient is not finite. Collective.

        A flipped bit often makes a number huge, so the gradient becomes infinite long before the
        next regular check.
        """
        self._look_at_memory()
        self._check(self._engine.steps + 1)

    def _check(self, step: int) -> None:
        engine, checks = self._engine, self._checks
        checks.found += self.second_run.findings(step, self._group.rank)
        pieces = pieces_of(engine.spec, engine.states)
        if step == engine.steps:
            # Within a step, running statistics differ between ranks until the exchange.
            pieces += other_pieces(engine.spec, engine.states)
        found = checks.exchange(step, pieces, self.times.row())
        self._name_straggler(step)
        if self.second_run.reason is not None:
            engine.world.say_once(
                f"guard: steps are not computed twice, because {self.second_run.reason}: not proved"
            )
        if found:
            # A bit that flips in memory shared by ranks looks like a write of user code.
            engine.states.parameters.forget_writes()
            checks.act(found, partial(self._repair, found, pieces), self._advice)

    def _name_straggler(self, step: int) -> None:
        """Print, at most once, which rank the others wait for. Collective if there is one."""
        slow = self._stragglers.name(step, self._checks.times)
        recording = recorder.active
        if slow is not None and recording is not None and self._group.rank == slow.rank:
            now = time.monotonic_ns()
            name = f"straggler: {slow.phase}"
            about = {"own ms": round(slow.own * 1e3), "others ms": round(slow.usual * 1e3)}
            recording.notes.append(TimelineEvent(Row.COMPUTE, name, now, now, about))

    # -- actions ------------------------------------------------------------------------------

    def _repair(self, found: Sequence[Finding], pieces: Sequence[Piece], source: int) -> bool:
        """Copy wrong states from rank `source`. Return False if it has no copy. Collective."""
        names = {name for each in found for name in each.names}
        wanted = [piece for piece in pieces if any(name in names for name, *_ in piece.names)]
        placement = self._engine.spec.placement
        # With sharded optimizer state, the owner of a parameter sends its value to all ranks in
        # each update, so their copies are not independent.
        if placement.is_sharded("optimizer") and any(each.kind != BUFFER for each in found):
            return False
        for piece in wanted:
            # A transport needs contiguous memory, and some pieces are copies of it.
            sent = piece.flat.clone()
            self._group.broadcast(sent, source).wait()
            piece.flat.copy_(sent)
        self._engine.states.parameters.settle()
        return True

    def _advice(self) -> str:
        """Return what the user can do if no rank has an intact copy."""
        clean = self._checks.clean
        last = f"The last check without an error was after step {clean}"
        if self._checks.action != "restore":
            return f"{last}: checkpoints of later steps may contain the error."
        aside = self._set_suspects_aside(clean) if self._engine.world.is_main else []
        moved = f" Renamed to suspect-*: {', '.join(aside)}." if aside else ""
        return (
            "No rank has an intact copy, so the run must continue from a checkpoint: start it with "
            f"--restarts N, and write engine.resume(folder). {last}.{moved}"
        )

    def describe(self) -> str:
        """Return the line about the guard in the startup summary."""
        share = 100 / self._every
        rows = self._engine.spec.placement
        compared = "parameters, optimizer state and buffers"
        if rows.is_sharded("optimizer"):
            compared = "parameters and buffers"
        if rows.is_sharded("parameters"):
            compared = "buffers"
        memory = ", memory of all states checked in each step" if self._seals else ""
        copies_of = f"compares {compared} across ranks" if self._group.size > 1 else "has no copies"
        twice = f"; one step in {self._every} is computed twice (about {share:.2g} % of the time)"
        if not self.second_run.is_possible:
            twice = f"; no step is computed twice, because {self.second_run.reason}"
        return (
            f"guard every {self._every} steps: {copies_of}{memory}{twice}; on an error: "
            f"{self._checks.action}"
        )
