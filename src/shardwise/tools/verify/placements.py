"""Represents placements as command-line flags, and searches for smaller ones. Does no I/O."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from shardwise import config
from shardwise.errors import ShardwiseError

TRAINING = (
    *("precision", "optimizer_state", "reduce_dtype", "exact", "batch", "sync_batch_norm"),
    *("ema_decay", "nonfinite", "seed", "device", "config", "timeout", "warn_after"),
    # The whole loss rounds scores to fp32, also in fp64.
    *("save_failure", "chunked_loss", "frozen_weights"),
)
"""Settings that define the training rather than its placement. The reference uses them too."""

TIERS = ("offload_params", "offload_gradients", "offload_optimizer", "offload_activations")
MICRO = ("micro_batch_size", "microbatches")
LAYERS = ("tensor", "pipeline")
AXES = (*LAYERS, "expert", "context")
OF_LAYERS = ("sequence_parallel", "schedule", "stages", "microbatches", "context_method")


@dataclass(frozen=True, kw_only=True)
class RunPlacement:
    """A placement on `size` ranks (None for the launcher's default number).

    `settings` maps names to values as text. `launcher` contains launcher flags such as -H.
    """

    size: int | None = 1
    settings: Mapping[str, str] = field(default_factory=dict)
    launcher: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """The flags of `shardwise run` for this placement."""
        size = [] if self.size is None else ["-n", str(self.size)]
        return [*size, *self.launcher, *to_flags(self.settings)]

    def __str__(self) -> str:
        return shlex.join(self.words)

    @property
    def passed(self) -> tuple[str, ...]:
        """The launcher flags that forward environment variables (-x), which every run needs."""
        pairs = zip(self.launcher, self.launcher[1:], strict=False)
        return tuple(word for flag, value in pairs if flag == "-x" for word in (flag, value))

    def reference(self) -> RunPlacement:
        """Return the reference's placement: a single rank on this host, -n 1 --zero 0."""
        kept = {name: text for name, text in self.settings.items() if name in TRAINING}
        # All other settings of the placement are left at their defaults.
        alone = {"zero": "0"}
        if "config" in kept:  # override the placement in the config file
            alone |= dict.fromkeys(AXES, "1")
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
        """Whether the settings are compatible with each other and with the number of ranks."""
        try:
            settings, _ = config.resolve([config.SettingsSource(config.FLAG, dict(self._own))])
            settings.placement  # noqa: B018 an illegal row raises
        except ShardwiseError:
            return False
        replica = settings.tensor * settings.pipeline
        sizes = replica, settings.pipeline * settings.expert, settings.context
        return self.size is None or all(self.size % size == 0 for size in sizes)

    @property
    def _own(self) -> dict[str, str]:
        return {name: text for name, text in self.settings.items() if name != "config"}

    @property
    def level(self) -> int:
        settings, _ = config.resolve([config.SettingsSource(config.FLAG, dict(self._own))])
        return settings.placement.level

    @property
    def replica(self) -> int:
        """The number of ranks that hold one replica of the model."""
        sizes = (int(self.settings.get(name, "1")) for name in LAYERS)
        return next(sizes) * next(sizes)


def to_flags(settings: Mapping[str, str]) -> list[str]:
    words: list[str] = []
    for name, text in settings.items():
        flag = config.flag(name)
        if name in config.FIELDS and not config.FIELDS[name].metadata["metavar"]:
            words.append(flag if text == "on" else f"--no-{flag[2:]}")
        else:
            words += [flag, text]
    return words


Differs = Callable[[RunPlacement], bool]
"""Returns whether a run with the placement differs from the reference (False if it fails)."""


def find_smallest(placement: RunPlacement, differs: Differs) -> RunPlacement:
    """Return a simpler variant of `placement` that still differs from the reference.

    The search simplifies, in this order, the ZeRO level, tiers, micro-batches, layer splits, other
    settings and the number of workers. For each of these, it chooses the simplest candidate that
    still differs.
    """
    # A single run decides most cases, because errors in the data or in the use of the number of
    # workers also appear on two ranks with --zero 0.
    quick = replace(placement.reference(), size=2)
    if placement.size != 1 and quick != placement and differs(quick):
        return quick  # it differs without the other settings, so they are not the cause
    tried = [placement, quick]
    for simpler in (rows, tiers, micro_batches, layers, rest, workers):
        for candidate in simpler(placement):
            if candidate in tried or not candidate.is_legal:
                continue
            tried.append(candidate)
            # Continue with the first candidate that still differs.
            if differs(candidate):
                placement = candidate
                break
    return placement


def rows(placement: RunPlacement) -> Iterator[RunPlacement]:
    """Yield a copy of the placement for each lower ZeRO level, with the tiers that it allows."""
    for level in range(placement.level):
        candidate = placement.without("shard", "zero", "shard_within").with_settings(
            zero=str(level)
        )
        for name in TIERS:
            if not candidate.is_legal:
                # A lower level may not support offloading a state that it does not shard.
                candidate = candidate.without(name)
        yield candidate


def tiers(placement: RunPlacement) -> Iterator[RunPlacement]:
    """Yield the placement without any offloading, and then without one kind of it at a time."""
    names = [name for name in TIERS if name in placement.settings]
    for candidate in (placement.without(*names), *(placement.without(name) for name in names)):
        if candidate.is_legal:
            yield candidate


def micro_batches(placement: RunPlacement) -> Iterator[RunPlacement]:
    """Yield the placement without micro-batches."""
    yield placement.without(*MICRO)


def layers(placement: RunPlacement) -> Iterator[RunPlacement]:
    """Yield the placement without any layer splits, and then without one kind of them at a time."""
    for names in (AXES, *((name,) for name in AXES)):
        if any(name in placement.settings for name in names):
            candidate = placement.without(*names)
            if "pipeline" in names:
                candidate = candidate.without("schedule", "stages", "microbatches")
            # Remove flags that are only valid with the axis.
            if "tensor" in names:
                candidate = candidate.without("sequence_parallel")
            if "context" in names:
                candidate = candidate.without("context_method")
            yield candidate


def rest(placement: RunPlacement) -> Iterator[RunPlacement]:
    """Yield the placement without its other distribution settings, and then without one of them."""
    known = {*TRAINING, *AXES, *OF_LAYERS, "zero", "shard", *TIERS, *MICRO}
    names = [name for name in placement.settings if name not in known]
    yield placement.without(*names)
    for name in names:
        yield placement.without(name)


def workers(placement: RunPlacement) -> Iterator[RunPlacement]:
    """Yield the placement with fewer workers, fewest first."""
    if placement.size is None:
        return
    for size in range(1, placement.size):
        # Replicas must be complete. Above 2, try only divisors of the original number of workers,
        # because they divide every batch that the original number divides.
        if size % placement.replica == 0 and (size <= 2 or placement.size % size == 0):
            yield replace(placement, size=size, launcher=placement.passed)
