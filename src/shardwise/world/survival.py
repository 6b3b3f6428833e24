"""Repeats the step in progress on fewer ranks after a loss, with `--survive`.

The engine and the Loader know each other only through this object:

    Loader   hands out the rows of a step           ─▶ `begins`
    engine   loses a rank in a backward pass        ─▶ `noticing`: the rest of the step is left out
    Loader   is asked for more after the last rows  ─▶ `must_repeat` ─▶ the engine reduces and
             confirms the step, or joins the ranks that are left
    Loader   shares out the same rows again, if the step must be repeated

In a plain loop over a Loader the engine confirms the step in `engine.step()`, which then returns
`stats.repeated`, and the Loader only hands out the rows again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from shardwise.comm import Loss, SurvivorGroup
from shardwise.config import Settings
from shardwise.errors import CollectiveError, ConfigError, PeerLost, UsageError
from shardwise.net import environment
from shardwise.net.identity import Identity


class Survival:
    """The state of a run that may lose ranks.

    Args:
        group: All ranks that are left.
        say: Prints a line on the main rank.

    Attributes:
        group: All ranks that are left.
        loss: The error of the loss that this rank has noticed in the current step, or None.
        in_step: True from the first rows of a training step until the step is confirmed.
        has_counted: True if a loop without gradients has used rows of its share, and the results
            of all ranks have not been joined since.
        repeated: Number of steps that were repeated.
        follow: Makes the engine adopt the ranks that are left. The engine sets it.
        lay_out: Lays sharded states out for the ranks that are left. The engine sets it.
        confirm: Reduces and confirms the step in progress, if there is one. Returns True if it must
            be repeated. Takes whether the loop is a plain one. The engine sets it.
        remember: Called when a loop begins a step, with `plain`. The engine sets it.
        return_tracked: Called before a plain loop repeats a step, after its body. It undoes what
            the body did to schedulers. The engine sets it.
    """

    def __init__(self, group: SurvivorGroup, say: Callable[[str], None]) -> None:
        self.group = group
        group.between_steps = self._continue_between_steps
        self._say = say
        self.loss: PeerLost | None = None
        self.in_step = self.has_counted = False
        self.repeated = 0
        self.follow: Callable[[], None] | None = None
        self.lay_out: Callable[[], None] | None = None
        self.confirm: Callable[[bool], bool] | None = None
        self.remember: Callable[..., None] | None = None
        self.return_tracked: Callable[[], None] | None = None
        self._is_due = False
        self._open: str | None = None
        """The kind of the loop whose step is in progress: "plain" or "steps"."""

    # -- called by the Loader -----------------------------------------------------------------

    def begins(self, *, plain: bool) -> None:
        """Record that a Loader hands out the first rows of a training step."""
        self._open = "plain" if plain else "steps"
        self.in_step, self.has_counted = True, False
        if self.remember is not None:
            self.remember(plain=plain)

    def must_repeat(self) -> bool:
        """Return whether the rows of the step must be handed out again. Collective.

        Called when the loop asks for more after the last rows of a training step.
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
        self.in_step = False
        return repeats

    # -- called by the engine -----------------------------------------------------------------

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Remember the loss of a rank instead of raising it. The step is then repeated."""
        try:
            yield
        except PeerLost as error:
            self.loss = error

    def check_loop(self) -> None:
        """Raise UsageError if `engine.step()` is called outside of a loop that can repeat it."""
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
        """Make the Loader of the plain loop hand out the rows of this step again."""
        self._is_due = True

    def replace_group(self, step: int, *, is_updated: bool = False) -> bool:
        """Join the ranks that are left. Return whether `step` in progress stands. Collective.

        `is_updated` is True if this rank has updated in `step`, so that nothing is in progress.
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

    def _continue_between_steps(self, loss: Loss) -> None:
        """Adopt the ranks that are left after a loss in a save or another steady call."""
        if self.follow is not None:
            self.follow()
        if self.has_counted:
            lost = ", ".join(map(str, loss.lost))
            raise CollectiveError(
                f"Ranks {lost} were lost after an evaluation whose rows the ranks had shared out, "
                "and no world.sum, world.gather or sw.Metrics has joined their results since. "
                "Start again from the last checkpoint."
            ).blaming(loss.lost)
        if self.lay_out is not None:
            self.lay_out()
        if self.in_step:
            # The rows of this step were shared out among all ranks, and gradients were on their
            # way. So run it again.
            self.loss = PeerLost("A rank was lost in a call within the step.")
        how = _how(stands=loss.stands)
        self._announce(loss.lost, loss.seconds, f"outside of a step: the call is {how}")

    def _announce(self, lost: Sequence[int], seconds: float, what: str) -> None:
        named = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
        size = self.group.size
        workers = "1 worker continues" if size == 1 else f"{size} workers continue"
        self._say(f"shardwise: lost {named} {what}, and {workers} after {seconds:.2f} s")


def _how(*, stands: bool) -> str:
    return "complete" if stands else "repeated"


def check(
    settings: Settings, identity: Identity, device: torch.device, environ: Mapping[str, str]
) -> None:
    """Raise ConfigError if this run cannot continue after a loss."""
    if not settings.survive or identity.size == 1:
        return
    if environment.SURVIVES_VARIABLE not in environ:
        raise ConfigError(
            f"--survive {settings.survive} needs `shardwise run -n N` on one host, which keeps the "
            f"other workers alive. This run was started by {identity.launcher}. Leave the flag out."
        )
    if device.type != "cpu":
        raise ConfigError(
            f"--survive {settings.survive} is not supported on {device.type} yet: write --device "
            "cpu, or leave the flag out."
        )
    if settings.survive >= identity.size:
        raise ConfigError(
            f"--survive {settings.survive} of {identity.size} workers: at least one must be left. "
            f"Write --survive {identity.size - 1} at most."
        )
