"""Placements of a run as words of a command line, and the search for a smaller one. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from shardwise import config
from shardwise.errors import ShardwiseError

TRAINING = (
    *("precision", "reduce_dtype", "exact", "batch", "sync_batch_norm", "ema_decay", "nonfinite"),
    *("seed", "device", "config", "timeout", "warn_after", "save_failure"),
)
"""Settings that define the training rather than its placement. The reference has them too."""

TIERS = ("offload_params", "offload_gradients", "offload_optimizer", "offload_activations")
MICRO = ("micro_batch_size", "microbatches")
LAYERS = ("tensor", "pipeline")
OF_LAYERS = ("sequence_parallel", "schedule", "stages", "microbatches")


@dataclass(frozen=True, kw_only=True)
class RunPlacement:
    """A placement on `size` ranks, or on the launcher's default number if that is None.

    `settings` maps names to their text, and `launcher` holds launcher flags such as -H.
    """

    size: int | None = 1
    settings: Mapping[str, str] = field(default_factory=dict)
    launcher: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """The flags of `shardwise run`."""
        size = [] if self.size is None else ["-n", str(self.size)]
        return [*size, *self.launcher, *to_flags(self.settings)]

    def __str__(self) -> str:
        return shlex.join(self.words)

    @property
    def passed(self) -> tuple[str, ...]:
        """The launcher flags that pass on environment variables (-x): they matter on any host."""
        pairs = zip(self.launcher, self.launcher[1:], strict=False)
        return tuple(word for flag, value in pairs if flag == "-x" for word in (flag, value))

    def reference(self) -> RunPlacement:
        """Return the placement of the reference: one rank on this host, -n 1 --zero 0."""
        kept = {name: text for name, text in self.settings.items() if name in TRAINING}
        # Every other setting of the placement is left out, and has its default.
        alone = {"zero": "0"}
        if "config" in kept:  # override the placement in the config file
            alone |= {"tensor": "1", "pipeline": "1"}
        return RunPlacement(size=1, settings=alone | kept, launcher=self.passed)

    def with_settings(self, **settings: str) -> RunPlacement:
        """Return this placement with `settings` added or replaced."""
        return replace(self, settings={**self.settings, **settings})

    def without(self, *names: str) -> RunPlacement:
        """Return this placement without the settings `names`."""
        kept = {name: text for name, text in self.settings.items() if name not in names}
        return replace(self, settings=kept)

    @property
    def is_legal(self) -> bool:
        """Whether the settings can be combined and the number of ranks fits them."""
        try:
            settings, _ = config.resolve([config.SettingsSource(config.FLAG, dict(self._own))])
            settings.placement  # noqa: B018 an illegal row raises
        except ShardwiseError:
            return False
        replica = settings.tensor * settings.pipeline
        return self.size is None or (self.size % replica == 0)

    @property
    def _own(self) -> dict[str, str]:
        return {name: text for name, text in self.settings.items() if name != "config"}

    @property
    def level(self) -> int:
        """The stage number of its row."""
        settings, _ = config.resolve([config.SettingsSource(config.FLAG, dict(self._own))])
        return settings.placement.level

    @property
    def replica(self) -> int:
        """The number of ranks that hold one replica of the model."""
        sizes = (int(self.settings.get(name, "1")) for name in LAYERS)
        return next(sizes) * next(sizes)


def to_flags(settings: Mapping[str, str]) -> list[str]:
    """Return settings as flags of a command line."""
    words: list[str] = []
    for name, text in settings.items():
        flag = config.flag(name)
        if name in config.FIELDS and not config.FIELDS[name].metadata["metavar"]:
            words.append(flag if text == "on" else f"--no-{flag[2:]}")
        else:
            words += [flag, text]
    return words


Differs = Callable[[RunPlacement], bool]
"""Whether a placement trains differently. One that fails does not count."""


def find_smallest(placement: RunPlacement, differs: Differs) -> RunPlacement:
    """Return the smallest placement found that still differs, starting from one that does.

    Reduces in this order: row, tiers, micro-batches, layer splits, other settings, workers. In each
    group it keeps the simplest candidate that still differs.
    """
    # One run decides most cases: errors in the data or the number of workers show at ZERO_0 too.
    quick = replace(placement.reference(), size=2)
    if placement.size != 1 and quick != placement and differs(quick):
        return quick  # it differs without the other settings, so they do not matter
    tried = [placement, quick]
    for simpler in (rows, tiers, micro_batches, layers, rest, workers):
        for candidate in simpler(placement):
            if candidate in tried or not candidate.is_legal:
                continue
            tried.append(candidate)
            # The first that still differs replaces the placement, and the next group starts from
            # it.
            if differs(candidate):
                placement = candidate
                break
    return placement


def rows(placement: RunPlacement) -> Iterator[RunPlacement]:
    """Yield the placement with every lower row, and with the tiers that this row allows."""
    for level in range(placement.level):
        candidate = placement.without("shard", "zero", "shard_within").with_settings(
            zero=str(level)
        )
        for name in TIERS:
            if not candidate.is_legal:
                # A lower row may not allow offloading of a state that it does not shard.
                candidate = candidate.without(name)
        yield candidate


def tiers(placement: RunPlacement) -> Iterator[RunPlacement]:
    """Yield the placement without all tiers, then without each one."""
    names = [name for name in TIERS if name in placement.settings]
    for candidate in (placement.without(*names), *(placement.without(name) for name in names)):
        if candidate.is_legal:
            yield candidate


def micro_batches(placement: RunPlacement) -> Iterator[RunPlacement]:
    """Yield the placement without micro-batches."""
    yield placement.without(*MICRO)


def layers(placement: RunPlacement) -> Iterator[RunPlacement]:
    """Yield the placement with unsplit layers, then with one kind of split fewer."""
    for names in (LAYERS, *((name,) for name in LAYERS)):
        if any(name in placement.settings for name in names):
            candidate = placement.without(*names)
            if "pipeline" in names:
                candidate = candidate.without("schedule", "stages", "microbatches")
            # A flag that refines a split is refused without it.
            if "tensor" in names:
                candidate = candidate.without("sequence_parallel")
            yield candidate


def rest(placement: RunPlacement) -> Iterator[RunPlacement]:
    """Yield the placement without all other settings that distribute it, then without each one."""
    known = {*TRAINING, *LAYERS, *OF_LAYERS, "zero", "shard", *TIERS, *MICRO}
    names = [name for name in placement.settings if name not in known]
    yield placement.without(*names)
    for name in names:
        yield placement.without(name)


def workers(placement: RunPlacement) -> Iterator[RunPlacement]:
    """Yield the placement with fewer workers, the fewest first."""
    if placement.size is None:
        return
    for size in range(1, placement.size):
        # Replicas must be complete. Above 2, divisors only: any batch that the original number of
        # workers can divide, a divisor can divide too.
        if size % placement.replica == 0 and (size <= 2 or placement.size % size == 0):
            yield replace(placement, size=size, launcher=placement.passed)
