"""The guard of one engine. `engine/guarded.py` calls it around the engine's own backward and step.

before a backward pass   second run, in one step of K
before the reduction     check the sums of all states, with --guard-memory
after the update         one small collective in one step of K: digests of copies, findings
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from shardwise.checkpoint.spec_view import SpecView, StatesView
from shardwise.comm import Collectives
from shardwise.config import Settings
from shardwise.errors import ConfigError, GuardError
from shardwise.guard import copies
from shardwise.guard.findings import GRADIENT, OUTPUT, PARAMETER, Finding
from shardwise.guard.memory import MemorySeals, Piece, other_pieces, pieces_of
from shardwise.guard.second_run import SecondRun
from shardwise.states.parameters.parameters import Parameters
from shardwise.world.world import World


class GuardedEngine(Protocol):
    """The part of an engine that its guard uses."""

    @property
    def world(self) -> World: ...
    @property
    def spec(self) -> SpecView: ...
    @property
    def states(self) -> StatesView: ...
    @property
    def steps(self) -> int: ...


class GuardedResidency(Protocol):
    """The part of the residency of sharded parameters that a second run uses."""

    def set_aside(self) -> Callable[[], None]:
        """Set the recorded forward passes aside. Returns a function that restores them."""


def check(settings: Settings) -> None:
    """Raise ConfigError if the guard cannot be combined with another setting."""
    refused = (
        ("--pipeline", settings.pipeline > 1, "a stage cannot compute a step twice on its own"),
        ("--tensor", settings.tensor > 1, "ranks of a replica hold different parts of a layer"),
        ("--islands", settings.islands not in (1, None), "islands hold different weights"),
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
        set_suspects_aside: Renames the checkpoints that were written after a step.
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
        self._shard_group = shard_group
        self._residency = residency
        self._set_suspects_aside = set_suspects_aside
        self._every = settings.guard
        self._action = settings.guard_action
        self._seals = MemorySeals() if settings.guard_memory else None
        models = [
            (prefix or type(model).__name__, model)
            for prefix, model in zip(engine.spec.prefixes, engine.spec.models, strict=True)
        ]
        self.second_run = SecondRun(models, engine.world.device, self._apart)
        self._sealed: tuple[Parameters, int] | None = None
        self._found: list[Finding] = []
        self._clean = engine.steps
        """The last step after which all checks passed."""
        self._said: set[tuple[object, ...]] = set()
        self._unstable: set[tuple[str, str]] = set()
        """Kind and name of results that differ between two runs on all ranks."""
        self._arm_if_due()

    @property
    def is_due(self) -> bool:
        """True if the current step is checked."""
        return (self._engine.steps + 1) % self._every == 0

    @property
    def skips(self) -> bool:
        """True if a step that must not be applied is skipped, and training continues."""
        return self._action == "restore"

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
        """Compute the gradients of `loss` for the first time, if this step is checked."""
        named = [(each.name, each.parameter) for each in self._engine.states.parameters.named]
        self.second_run.before_backward(loss, seed, named, passes)

    # -- memory -------------------------------------------------------------------------------

    def check_memory(self) -> None:
        """Check that no state has changed since the last update. Called before each reduction.

        Collective with --guard-memory. Raises GuardError on all ranks, before the wrong values
        enter the update.
        """
        if self._seals is None:
            return
        self._look_at_memory()
        group = self._group
        flag = torch.tensor([float(bool(self._found))], device=group.small_device)
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
            self._found += self._seals.check(engine.steps + 1, self._group.rank, pieces)
        self._seals.open()

    # -- after a step -------------------------------------------------------------------------

    def after_step(self) -> None:
        """Check the step that has just ended. Collective in one step of K.

        Raises GuardError on all ranks if something is wrong and the action is "stop", or "restore"
        without an intact copy.
        """
        engine, step = self._engine, self._engine.steps
        if step % self._every == 0:
            self._check(step)
        if self._seals is not None:
            self._seals.seal(pieces_of(engine.spec, engine.states))
            self._sealed = engine.states.parameters, engine.states.parameters.changes
        self._arm_if_due()

    def explain_nonfinite(self) -> None:
        """Check everything now, because the gradient of the current step is not finite. Collective.

        A flipped bit often makes a number huge, and then the gradient infinite, long before the
        next check.
        """
        self._look_at_memory()
        self._check(self._engine.steps + 1)

    def _check(self, step: int) -> None:
        engine = self._engine
        self._found += self.second_run.findings(step, self._group.rank)
        pieces = pieces_of(engine.spec, engine.states)
        copied = [*pieces, *other_pieces(engine.spec, engine.states)]
        found = self._exchange(step, copied)
        self._report_incomparable()
        if found:
            self._act(step, found, copied)
        else:
            self._clean = step

    def _exchange(self, step: int, pieces: Sequence[Piece]) -> list[Finding]:
        """Return the findings of all ranks. Collective."""
        group = self._group
        digests = [copies.digest(pieces, is_shard=False), copies.digest(pieces, is_shard=True)]
        values = [*digests, float(self._shard_group.rank), float(bool(self._found))]
        # Keep digests on the device: one copy to the host, with those of all ranks.
        row = torch.stack(
            [torch.as_tensor(v, dtype=torch.float64, device=group.small_device) for v in values]
        )
        rows = group.read(group.gather_rows(row)).tolist()
        own, self._found = self._found, []
        found: list[Finding] = []
        # The rows are the same on all ranks, so all of them take part in the next collectives.
        if any(flag for *_, flag in rows):
            gathered = group.gather_plain([each.plain() for each in own])
            found = [Finding.of_plain(each) for mine in gathered for each in mine]
            found = self._without_unstable(found)
        suspects = [each.rank for each in found if each.rank is not None]
        if len({whole for whole, *_ in rows}) > 1:
            sums = group.gather_plain(copies.checksums(pieces, is_shard=False))
            found += copies.differences(step, dict(enumerate(sums)), suspects)
        by_shard: dict[float, list[float]] = {}
        for _, shard, place, _ in rows:
            by_shard.setdefault(place, []).append(shard)
        if any(len(set(digests_of_shard)) > 1 for digests_of_shard in by_shard.values()):
            sums = group.gather_plain(copies.checksums(pieces, is_shard=True))
            for place in by_shard:
                ranks = [rank for rank, row_of_rank in enumerate(rows) if row_of_rank[2] == place]
                found += copies.differences(step, {r: sums[r] for r in ranks}, suspects)
        return found

    def _without_unstable(self, found: Sequence[Finding]) -> list[Finding]:
        """Leave out results that differ between two runs on every rank.

        A defect of one device does not show on all ranks in the same step. An operation that is not
        deterministic does.
        """
        computed = [each for each in found if each.kind in (GRADIENT, OUTPUT)]
        by_name: dict[tuple[str, str], set[int | None]] = {}
        for each in computed:
            for name in each.names:
                by_name.setdefault((each.kind, name), set()).add(each.rank)
        size = self._group.size
        new = {key for key, ranks in by_name.items() if size > 1 and len(ranks) == size}
        if new - self._unstable:
            names = ", ".join(sorted(name for _, name in new - self._unstable)[:4])
            self._engine.world.say_once(
                f"guard: {names} differ between two runs on all ranks, so an operation is not "
                "deterministic. They are not compared: not proved. To compare them: "
                "torch.use_deterministic_algorithms(True)"
            )
            self._unstable |= new
        kept = [each for each in found if each.kind not in (GRADIENT, OUTPUT)]
        for each in computed:
            names_left = tuple(n for n in each.names if (each.kind, n) not in self._unstable)
            if names_left:
                kept.append(Finding(each.step, each.kind, names_left, each.rank, each.evidence))
        return kept

    def _report_incomparable(self) -> None:
        if self.second_run.reason is not None:
            self._engine.world.say_once(
                f"guard: steps are not computed twice, because {self.second_run.reason}: not proved"
            )

    # -- actions ------------------------------------------------------------------------------

    def _act(self, step: int, found: Sequence[Finding], pieces: Sequence[Piece]) -> None:
        """Warn, repair or stop. Collective."""
        engine = self._engine
        new = [each for each in found if (each.kind, each.names, each.rank) not in self._said]
        self._said |= {(each.kind, each.names, each.rank) for each in found}
        lines = [f"guard: {each}" for each in new]
        if self._action == "warn":
            for line in lines:
                engine.world.print(f"shardwise: {line}")
            return
        if self._action == "restore" and self._repair(found, pieces):
            for each in found:
                engine.world.print(f"shardwise: guard: {each}. Copied from an intact rank")
            return
        advice = (
            f"The last check without an error was after step {self._clean}: checkpoints of later "
            "steps may contain the error."
        )
        if self._action == "restore":
            aside = self._set_suspects_aside(self._clean) if engine.world.is_main else []
            moved = f" Renamed {', '.join(aside)}." if aside else ""
            advice = (
                "No rank has an intact copy, so the run must continue from a checkpoint: start it "
                "with --restarts N and engine.resume(folder). The last check without an error was "
                f"after step {self._clean}.{moved}"
            )
        ranks = sorted({each.rank for each in found if each.rank is not None})
        shown = "; ".join(str(each) for each in found)
        raise GuardError(f"The guard found an error. {shown}. {advice}").blaming(ranks)

    def _repair(self, found: Sequence[Finding], pieces: Sequence[Piece]) -> bool:
        """Copy wrong states from a rank that has the right ones. Collective.

        Returns False if a wrong state has no intact copy, or the wrong rank is unknown.
        """
        bad = {each.rank for each in found}
        names = {name for each in found for name in each.names}
        kinds = {each.kind for each in found}
        # A wrong computation has already entered the sum of all ranks' gradients.
        if None in bad or kinds & {GRADIENT, OUTPUT}:
            return False
        intact = [rank for rank in range(self._group.size) if rank not in bad]
        wanted = [p for p in pieces if any(name in names for name, *_ in p.names)]
        if not intact or any(piece.is_shard for piece in wanted):
            return False
        # With sharded optimizer state, the owner of a parameter has already sent its wrong value
        # to all ranks in the update.
        if any(PARAMETER in each.kind and "differs" not in each.evidence for each in found) and (
            self._engine.spec.placement.is_sharded("optimizer")
        ):
            return False
        copies.copy_from(self._group, intact[0], wanted)
        self._engine.states.parameters.settle()
        self._said.clear()
        return True

    def describe(self) -> str:
        """Return the start line."""
        share = 100 / self._every
        rows = self._engine.spec.placement
        compared = "parameters, optimizer state and buffers"
        if rows.is_sharded("optimizer"):
            compared = "parameters and buffers"
        if rows.is_sharded("parameters"):
            compared = "buffers"
        memory = ", memory of all states checked in each step" if self._seals else ""
        copies_of = f"compares {compared} across ranks" if self._group.size > 1 else "has no copies"
        return (
            f"guard every {self._every} steps: {copies_of}{memory}; one step in {self._every} is "
            f"computed twice (about {share:.2g} % of the time); on an error: {self._action}"
        )
