"""Refuses settings of islands that contradict each other. Pure."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.config.outer_optimizer import Outer
from shardwise.config.settings import Settings, flag
from shardwise.errors import ConfigError

_OF_PARAMETERS = "that is of parameters that are made equal, and --behind makes gradients so"

_BESIDE_BEHIND: dict[str, tuple[Callable[[Settings], bool], str]] = {
    "equal_every": (
        lambda settings: settings.equal_every not in (None, 1),
        f"{_OF_PARAMETERS}, at every step",
    ),
    "outer": (lambda settings: settings.outer != Outer(), _OF_PARAMETERS),
    "late": (lambda settings: settings.late > 0, _OF_PARAMETERS),
    "exact": (
        lambda settings: settings.exact is not None,
        "what islands compute depends on how many there are",
    ),
}

BESIDE_ELASTIC = (
    "{given} and --elastic-islands cannot be had together: an island that ends may have sent what "
    "the others have yet to use. Leave one of them out."
)
"""What there is to say of --late and --behind where islands may end and come back."""


def check_islands(settings: Settings) -> None:
    """Raise ConfigError for a setting that cannot be had beside --behind."""
    if settings.behind is None:
        return
    for name, (is_on, why) in _BESIDE_BEHIND.items():
        if is_on(settings):
            raise ConfigError(
                f"--behind {settings.behind} and {flag(name)} {getattr(settings, name)} cannot be "
                f"had together: {why}. Leave one of them out."
            )
