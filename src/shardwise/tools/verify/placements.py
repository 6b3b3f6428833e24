"""Placements of a run as words of a command line, and how one is made simpler: pure."""

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
"""Settings that say what is trained, not how it is spread: the reference has them too."""

TIERS = ("offload_params", "offload_gradients", "offload_optimizer", "offload_activations")
MICRO = ("micro_batch_size", "microbatches")
LAYERS = ("tensor", "pipeline")
OF_LAYERS = ("sequence_parallel", "schedule", "stages", "microbatches")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How a script is spread: over `size` ranks (None: the launcher's default), with `settings` as
    text and `launcher` flags such as -H."""

    size: int | None = 1
    settings: Mapping[str, str] = field(default_factory=dict)
    launcher: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """The flags of `shardwise run`."""
        size = [] if self.size is None else ["-n", str(self.size)]
        return [*size, *self.launcher, *spelled(self.settings)]

    def __str__(self) -> str:
        return shlex.join(self.words)

    @property
    def passed(self) -> tuple[str, ...]:
        """Of the launcher's flags those that pass variables on (-x), which matter on any host."""
        pairs = zip(self.launcher, self.launcher[1:], strict=False)
        return tuple(word for flag, value in pairs if flag == "-x" for word in (flag, value))

    def reference(self) -> Placement:
        """One rank on this host that trains the same: -n 1 --zero 0."""
        kept = {name: text for name, text in self.settings.items() if name in TRAINING}
        alone = {"zero": "0"}
        if "config" in kept:  # what a file says of the placement is overridden
            alone |= {"tensor": "1", "pipeline": "1"}
        return Placement(size=1, settings=alone | kept, launcher=self.passed)

    def having(self, **settings: str) -> Placement:
        """The same with some settings in place of its own."""
        return replace(self, settings={**self.settings, **settings})

    def without(self, *names: str) -> Placement:
        """The same without some settings."""
        kept = {name: text for name, text in self.settings.items() if name not in names}
        return replace(self, settings=kept)

    @property
    def is_legal(self) -> bool:
        """Whether settings can be had together, and with as many ranks."""
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
        """The stage of its row."""
        settings, _ = config.resolve([config.SettingsSource(config.FLAG, dict(self._own))])
        return settings.placement.level

    @property
    def replica(self) -> int:
        """How many ranks make one replica of the model."""
        sizes = (int(self.settings.get(name, "1")) for name in LAYERS)
        return next(sizes) * next(sizes)


def spelled(settings: Mapping[str, str]) -> list[str]:
    """Settings as words of a command line."""
    words: list[str] = []
    for name, text in settings.items():
        flag = config.flag(name)
        if name in config.FIELDS and not config.FIELDS[name].metadata["metavar"]:
            words.append(flag if text == "on" else f"--no-{flag[2:]}")
        else:
            words += [flag, text]
    return words


Differs = Callable[[Placement], bool]
"""Whether a placement trains differently; one that fails does not."""


def smallest(placement: Placement, differs: Differs) -> Placement:
    """The smallest placement found that still differs, given one that does.

    Rows are made simpler first, then tiers, micro-batches, what splits layers, what else there is,
    and the number of workers last; of each the simplest that still differs is kept.
    """
    quick = replace(placement.reference(), size=2)
    if placement.size != 1 and quick != placement and differs(quick):
        return quick  # what differs on two workers of ZERO_0 owes nothing to the rest
    tried = [placement, quick]
    for simpler in (rows, tiers, micro_batches, layers, rest, workers):
        for candidate in simpler(placement):
            if candidate in tried or not candidate.is_legal:
                continue
            tried.append(candidate)
            if differs(candidate):
                placement = candidate
                break
    return placement


def rows(placement: Placement) -> Iterator[Placement]:
    """Every row before its own, with the tiers that it may have."""
    for level in range(placement.level):
        found = placement.without("shard", "zero", "shard_within").having(zero=str(level))
        for name in TIERS:
            if not found.is_legal:
                found = found.without(name)
        yield found


def tiers(placement: Placement) -> Iterator[Placement]:
    """Without all tiers, then without one each."""
    given = [name for name in TIERS if name in placement.settings]
    for found in (placement.without(*given), *(placement.without(name) for name in given)):
        if found.is_legal:
            yield found


def micro_batches(placement: Placement) -> Iterator[Placement]:
    """With batches as they are."""
    yield placement.without(*MICRO)


def layers(placement: Placement) -> Iterator[Placement]:
    """With layers whole, then split in fewer ways."""
    for names in (LAYERS, *((name,) for name in LAYERS)):
        if any(name in placement.settings for name in names):
            found = placement.without(*names)
            if "pipeline" in names:
                found = found.without("schedule", "stages", "microbatches")
            if "tensor" in names:
                found = found.without("sequence_parallel")
            yield found


def rest(placement: Placement) -> Iterator[Placement]:
    """Without what else spreads it, all of it and then one each."""
    known = {*TRAINING, *LAYERS, *OF_LAYERS, "zero", "shard", *TIERS, *MICRO}
    given = [name for name in placement.settings if name not in known]
    yield placement.without(*given)
    for name in given:
        yield placement.without(name)


def workers(placement: Placement) -> Iterator[Placement]:
    """On fewer workers, the fewest first."""
    if placement.size is None:
        return
    for size in range(1, placement.size):
        if size % placement.replica == 0 and (size <= 2 or placement.size % size == 0):
            yield replace(placement, size=size, launcher=placement.passed)
