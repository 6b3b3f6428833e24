"""With `--survive`, repeats the current step on the remaining ranks after a rank is lost.

The engine and the Loader communicate only through this module's `Survival` object:

    Loader   returns the rows of a step             ─▶ `begins`
    engine   loses a rank in a backward pass        ─▶ `noticing`: the rest of the step is skipped
    Loader   is asked for more after the last rows  ─▶ `must_repeat` ─▶ the engine reduces and
             confirms the step, or connects to the remaining ranks
    Loader   divides the same rows again, if the step must be repeated

In a plain loop over a Loader, the engine confirms the step in `engine.step()`. If the step must be
repeated, `engine.step()` returns stats with `repeated` set, and the Loader returns the rows again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from shardwise.comm import Divisions, Loss, SurvivorGroup
from shardwise.config import Settings
from shardwise.errors import CollectiveError, ConfigError, PeerLost, UsageError
from shardwise.layout import sum_tree
from shardwise.messages.printable import many, ranks_in_words
from shardwise.net import environment
from shardwise.net.identity import Identity
from shardwise.world.current_batch import LoaderStream
from shardwise.world.mesh import Mesh


class Survival:
    """The state of a run that may lose ranks.

    A *plain* loop iterates over the Loader itself, rather than over `loader.steps()`.

    Args:
        group: All remaining ranks.
        say: Prints a line on the main rank.

    Attributes:
        group: All remaining ranks.
        loss: The error that reported a lost rank in the current step, or None.
        in_step: True from the first rows of a training step until the step is confirmed.
        has_counted: True if a loop without gradients has used this rank's rows, and no collective
            has combined the ranks' results since.
        repeated: Number of steps that were repeated.
        follow: Makes the engine use the remaining ranks. Set by the engine. Called with `rebuilds`
            if `lay_out` follows with the full states.
        lay_out: Divides sharded states among the remaining ranks. Set by the engine. With the full
            states as argument, divides these among all ranks.
        confirm: Reduces and confirms the current step, if there is one, and returns True if it must
            be repeated. Called with True in a plain loop. Set by the engine.
        remember: Called with `plain` when a loop starts a step. Set by the engine.
        admit: Called before a Loader returns the first rows of a training step, with the Loader's
            stream. Spares may join then. Set by the engine.
        return_tracked: Called after the body of a plain loop, before the step is repeated. Undoes
            the body's changes to schedulers. Set by the engine.
    """

    def __init__(self, group: SurvivorGroup, say: Callable[[str], None]) -> None:
        self.group = group
        group.between_steps = self.continue_between_steps
        group.tolerates = self._tolerates
        self._say = say
        self.loss: PeerLost | None = None
        self.in_step = self.has_counted = False
        self.repeated = 0
        self.follow: Callable[..., None] | None = None
        self.lay_out: Callable[..., None] | None = None
        self.confirm: Callable[[bool], bool] | None = None
        self.remember: Callable[..., None] | None = None
        self.return_tracked: Callable[[], None] | None = None
        self.admit: Callable[[LoaderStream], None] | None = None
        self._is_due = False
        self._is_noticing = self._is_strict = False
        self._open: str | None = None
        """The kind of the loop whose step is in progress: "plain" or "steps"."""

    # -- called by the Loader -----------------------------------------------------------------

    def before_step(self, stream: LoaderStream) -> None:
        """Admit waiting spares, before `stream` returns the rows of the next training step."""
        self.in_step = False  # if a step is repeated, no rank has its rows now
        if self.admit is not None:
            self.admit(stream)

    def begins(self, *, plain: bool) -> None:
        """Record that a Loader returns the first rows of a training step.

        `plain` is True in a loop over the Loader itself rather than over `loader.steps()`.
        """
        self._open = "plain" if plain else "steps"
        self.in_step, self.has_counted = True, False
        if self.remember is not None:
            self.remember(plain=plain)

    def must_repeat(self) -> bool:
        """Return whether the rows of the step must be returned again. Collective.

        Called when a loop requests more rows after the last ones of a training step.
        """
        plain = self._open == "plain"
        if plain:
            self._open = None
        if self._is_due:  # `engine.step()` has already joined the ranks that are left
            self._is_due = False
            if self.return_tracked is not None:
                self.return_tracked()
            return True
        repeats = self.confirm is not None and self.confirm(plain)
        if repeats and plain and self.return_tracked is not None:
            self.return_tracked()
        self.in_step = False
        return repeats

    # -- called by the engine -----------------------------------------------------------------

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Store the error about a lost rank instead of raising it. The step is repeated later."""
        outer, self._is_noticing = self._is_noticing, True
        try:
            yield
        except PeerLost as error:
            self.loss = error
        finally:
            self._is_noticing = outer

    @contextmanager
    def strictly(self) -> Iterator[None]:
        """Raise the error about a lost rank, even in a step, instead of continuing without it."""
        outer, self._is_strict = self._is_strict, True
        try:
            yield
        finally:
            self._is_strict = outer

    def _tolerates(self, error: PeerLost) -> bool:
        """Return whether a forward or backward pass may continue without the lost rank.

        If so, `error` is stored, and the pass is part of a step that is repeated later. Otherwise,
        the text of `error` says so, unless it is in a step.
        """
        if not (self._is_noticing or (self.in_step and not self._is_strict)):
            # Several calls may raise the same error.
            if not self.in_step and not str(error).endswith(_OUTSIDE):
                error.args = (f"{error} {_OUTSIDE}",)
            return False
        self.loss = error
        return True

    def check_loop(self) -> None:
        """Raise UsageError if `engine.step()` is called outside a loop that can repeat the step."""
        if self._open == "plain":
            return
        if self._open == "steps":
            raise UsageError(
                "With --survive, take the micro-batches of a step in the loop: for x, y in step: "
                "engine.backward(...), and call engine.step() after that loop. A list of them, or "
                "a break, cannot be repeated after a loss."
            )
        raise UsageError(
            "engine.step() outside a loop over a sw.Loader, with --survive: only a Loader can hand "
            "out the rows of a step again after a loss. Train in a loop over a Loader, or start "
            "without --survive."
        )

    def repeat_later(self) -> None:
        """Make the Loader of a plain loop return the rows of this step again."""
        self._is_due = True

    def replace_group(self, step: int, *, is_updated: bool = False) -> bool:
        """Connect to the remaining ranks. Return whether `step` is complete. Collective.

        If `step` is not complete, it must be repeated. `is_updated` is True if this rank has
        already applied the update of `step`.
        """
        self.loss = None
        loss = self.group.replace()
        if self.follow is not None:
            self.follow()
        stands = loss.stands or is_updated
        self.repeated += not stands
        if loss.lost:  # otherwise a call within the step has already said so
            self._announce(
                loss.lost, loss.seconds, f"in step {step}: the step is {_how(stands=stands)}"
            )
        return stands

    def continue_between_steps(self, loss: Loss) -> None:
        """Continue on the remaining ranks after a loss outside a step, such as in a save."""
        if self.follow is not None:
            self.follow()
        if self.has_counted:
            raise CollectiveError(
                f"Lost {ranks_in_words(loss.lost)} after an evaluation whose rows the ranks had "
                "shared out, and no world.sum, world.gather or sw.Metrics has joined their "
                "results since. Start again from the last checkpoint."
            ).blaming(loss.lost)
        if self.lay_out is not None:
            self.lay_out()
        if self.in_step:
            # The rows of this step were shared out among all ranks, and gradients were on their
            # way. So run it again.
            self.loss = PeerLost("A rank was lost in a call within the step.")
        how = _how(stands=loss.stands)
        self._announce(loss.lost, loss.seconds, f"outside of a step: the call is {how}")

    def announce_joined(self, ranks: Sequence[int], loss: Loss, step: int) -> None:
        """Print which spares have joined after step `step`, and which ranks were lost meanwhile."""
        if loss.lost:
            self._announce(loss.lost, loss.seconds, f"after step {step}")
        if ranks:
            size = self.group.size
            self._say(
                f"shardwise: {ranks_in_words(ranks)} joined after step {step}, and {size} workers "
                "continue"
            )

    def announce_left(self, ranks: Sequence[int]) -> None:
        """Print that `ranks` have left, because they could not train with the others."""
        group = self.group
        self._say(
            f"shardwise: {ranks_in_words(ranks)} left, because {group.divisions.reason} trains on "
            f"{group.size} of the remaining workers"
        )

    def _announce(self, lost: Sequence[int], seconds: float, what: str) -> None:
        size = self.group.size
        workers = "1 worker continues" if size == 1 else f"{size} workers continue"
        self._say(
            f"shardwise: lost {ranks_in_words(lost)} {what}, and {workers} after {seconds:.2f} s"
        )


_OUTSIDE = (
    "Outside of a training step, such as in an evaluation, --survive cannot continue after this "
    "loss. Start again from the last checkpoint."
)


def divisions_of(settings: Settings, mesh: Mesh) -> Divisions:
    """Return the sets of ranks that can continue after a loss."""
    axes = ("tensor", "pipeline", "context", "expert")
    words = [f"--{axis} {size}" for axis in axes if (size := getattr(mesh, axis)) > 1]
    # Adjacent ranks hold a replica, share a sequence, and hold all experts of all stages.
    unit = math.lcm(mesh.replica * mesh.context, mesh.pipeline * mesh.expert)
    sizes: tuple[int, ...] = ()
    if settings.exact is not None:
        words.append(f"--exact {settings.exact}")
        sizes = tuple(size for size in sum_tree.node_sizes(settings.exact) if size % unit == 0)
    return Divisions(unit=unit, sizes=sizes, reason=" ".join(words))


def _how(*, stands: bool) -> str:
    return "complete" if stands else "repeated"


def check(
    settings: Settings, identity: Identity, device: torch.device, environ: Mapping[str, str]
) -> None:
    """Raise ConfigError if this run cannot continue after losing a rank."""
    if settings.spares and environ.get(environment.SURVIVES_VARIABLE) != str(settings.spares):
        raise ConfigError(
            f"--spares {settings.spares} needs two or more workers, and `shardwise run -n N "
            f"--survive K --spares {settings.spares}`, or -H HOST1,HOST2 in place of -n N. This "
            f"run was started by {identity.launcher}, as {many(identity.size, 'worker')}. Leave "
            "the flag out."
        )
    if not settings.survive or identity.size == 1:
        return
    if environment.SPARE_VARIABLE in environ and settings.splits_a_replica:
        raise ConfigError(
            "A worker cannot be added to a run with --tensor, --pipeline, --context or --expert, "
            "because one worker alone cannot run the model."
        )
    if environment.SURVIVES_VARIABLE not in environ:
        flag = f"--survive {settings.survive}"
        instead = f"`shardwise run -n N {flag}`, or -H HOST1,HOST2 in place of -n N"
        if identity.launcher == "Slurm":
            instead = f"`shardwise run {flag}` in the job script, in place of srun"
        elif identity.launcher == "torchrun" and "TORCHELASTIC_RUN_ID" in environ:
            words = f"-m shardwise run --nproc-per-node {identity.local_size} {flag} SCRIPT"
            instead = f"`torchrun ... --nproc-per-node 1 {words}`"
        raise ConfigError(
            f"{flag} needs a launcher that keeps the other workers alive. This run was started by "
            f"{identity.launcher}. Start it with {instead}, or leave --survive out."
        )
    if device.type != "cpu":
        _check_device(settings, device, environ)
    wait = float(environ.get(environment.LOST_AFTER_VARIABLE, 0))
    if settings.timeout <= wait:
        raise ConfigError(
            f"--timeout {settings.timeout:g} is too short for --survive on several hosts: workers "
            f"wait up to {wait:g} s (--host-timeout and 7 s more) for a host that is lost. Write a "
            "longer --timeout, or a shorter --host-timeout."
        )
    if settings.survive >= identity.size:
        raise ConfigError(
            f"--survive {settings.survive} of {identity.size} workers: at least one must be left. "
            f"Write --survive {identity.size - 1} at most."
        )


def _check_device(settings: Settings, device: torch.device, environ: Mapping[str, str]) -> None:
    flag = f"--survive {settings.survive} on {device.type}"
    if settings.transport != "auto":
        raise ConfigError(
            f"{flag} needs NCCL: leave out --transport {settings.transport}, or write --device cpu."
        )
    if settings.spares or environment.SPARE_VARIABLE in environ:
        raise ConfigError(
            f"{flag} does not support --spares and shardwise scale-up yet: leave them out, or "
            "write --device cpu."
        )
    if settings.splits_a_replica:
        raise ConfigError(
            f"{flag} does not support --tensor, --pipeline, --context and --expert yet: leave them "
            "out, or write --device cpu."
        )
