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

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from shardwise.comm import SurvivorGroup
from shardwise.config import Settings
from shardwise.errors import ConfigError, PeerLost, UsageError
from shardwise.net import environment
from shardwise.net.identity import Identity


class Survival:
    """The state of a run that may lose ranks.

    Attributes:
        loss: The error of the loss that this rank has noticed in the current step, or None.
        prepared: Number of steps whose totals this rank knows.
        confirmed: Number of steps of which it knows that every rank was prepared.
        repeated: Number of steps that were repeated.
        confirm: Reduces and confirms the step in progress, if there is one. Returns True if it must
            be repeated. Takes whether the loop is a plain one. The engine sets it.
        remember: Called when a loop begins a step, with `plain`. The engine sets it.
        return_tracked: Called before a plain loop repeats a step, after its body. It undoes what
            the body did to schedulers. The engine sets it.
    """

    def __init__(self, group: SurvivorGroup, follow: Callable[[], None]) -> None:
        self._group = group
        self._follow = follow
        self.loss: PeerLost | None = None
        self.prepared = self.confirmed = self.repeated = 0
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
        return self.confirm is not None and self.confirm(plain)

    # -- called by the engine -----------------------------------------------------------------

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Remember the loss of a rank instead of raising it. The step is then repeated."""
        try:
            yield
        except PeerLost as error:
            self.loss = error

    def check_loop(self) -> None:
        """Raise UsageError if `engine.step()` is called where a step cannot be repeated."""
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

    def replace_group(self) -> tuple[bool, tuple[int, ...], float]:
        """Join the ranks that are left. Collective.

        Returns:
            Whether the step in progress stands; the ranks of the run that were lost; and the
            seconds that it took.
        """
        mine, self.loss = self.confirmed, None
        found = self._group.replace(self.prepared, self.confirmed)
        self._follow()
        self.confirmed = self.prepared = found.decision.confirmed
        stands = found.decision.confirmed > mine
        self.repeated += not stands
        return stands, found.lost, found.seconds


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
