"""The run as one process sees it: who am I, who are the others, and what all may agree on."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise import collectives, config, launch, randomness, repeatable, timeline_control
from shardwise.batch_rows import BatchRows
from shardwise.collectives import Collectives, GatherOrder, Solo
from shardwise.common_draws import CommonDraws
from shardwise.current_batch import Feed
from shardwise.errors import ConfigError, LaunchError, UsageError
from shardwise.launch import report
from shardwise.launch.identity import Identity
from shardwise.launch.progress import Telling
from shardwise.mesh import Mesh
from shardwise.preemption import Preemption
from shardwise.randomness import GeneratorStates
from shardwise.step_log import StepLog
from shardwise.sum_tree import MicroShards
from shardwise.tiers import heap
from shardwise.unstepped import Unstepped
from shardwise.watch import whereabouts
from shardwise.watch.watchdog import Sentry
from shardwise.without_engine import WithoutEngine

T = TypeVar("T")

_current: World | None = None


class World(BatchRows):
    """The group of ranks that trains together; made by `shardwise.init`.

    Attributes: `rank`, `size`, `local_rank`, `local_size`, `device` (torch.device), `is_main`
    (rank 0), `seed`, `launcher`, `settings`.

    Where a model is split (`--tensor`, `--pipeline`), several ranks make one replica of it:
    `data_rank` of `data_size` says which replica this rank is of, and so which part of the data it
    gets; `tensor_rank` of `tensor_size` which part of every split layer it has, `pipeline_rank` of
    `pipeline_size` which layers.
    """

    def __init__(
        self,
        identity: Identity,
        group: Collectives,
        device: torch.device,
        telling: Telling | None = None,
    ) -> None:
        self.rank = identity.rank
        self.size = identity.size
        self.local_rank = identity.local_rank
        self.local_size = identity.local_size
        self.launcher = identity.launcher
        self.device = device
        self.is_main = identity.rank == 0
        self.host = socket.gethostname()
        self.seed = 0
        self.seed_source = "not given"
        """Where the seed comes from, in words."""
        self.settings = config.Settings()
        self.collectives = group
        self.mesh = Mesh(identity.size)
        self.data = group
        """The ranks that have the same part of the other replicas: all, where nothing is split."""
        self.tensor: Collectives = Solo()
        """The ranks of this one's replica that have parts of the same layers."""
        self.pipeline: Collectives = Solo()
        """The ranks of this one's replica that have other layers, in their order."""
        self.stage = group
        """The ranks of all replicas that have these layers: all, where all have all."""
        self.feed = Feed()
        self.telling = telling or Telling({})
        self.preemption = Preemption(self.telling, self.print)
        self.feed.watch(self.preemption.before_batch)
        self.draws = CommonDraws(device)
        self.feed.watch(self.draws.before_batch)
        self.step_log = StepLog(None, self.rank)
        self.engines = 0
        self.stepped_last = -1
        """The number of the engine whose step came last."""
        self.steps_made = 0
        """How many steps the engines of this process have made, all together."""
        self.unstepped = Unstepped()
        self.without_engine: WithoutEngine | None = None
        self.sentry: Sentry | None = None
        self._groups: dict[tuple[tuple[int, ...], ...], Collectives] = {}
        self._keywords: dict[str, Any] = {}
        self._said: set[str] = set()

    @cached_property
    def side_channel(self) -> Collectives:
        """The ranks of `data` over channels of their own, for collectives inside forward and
        backward, whose order against those of the engines may differ. Made at first use, by all
        ranks."""
        return self.data.second_group()

    @cached_property
    def gather_order(self) -> GatherOrder:
        """The order of those that all engines' units and BatchNorms take turns in."""
        return GatherOrder(self.data.size, lambda: self.side_channel)

    def cut(self, mesh: Mesh) -> None:
        """Take a place in `mesh`. Collective where it has more than the data axis."""
        self.mesh = mesh
        if not mesh.is_flat:
            self.data = self.collectives.split(mesh.data_groups)
            self.tensor = self.collectives.split(mesh.tensor_groups)
        if mesh.pipeline > 1:
            self.pipeline = self.collectives.split(mesh.pipeline_groups)
            self.stage = self.collectives.split(mesh.stage_groups)

    @property
    def data_rank(self) -> int:
        """Which replica of the model this rank is of."""
        return self.mesh.data_of(self.rank)

    @property
    def data_size(self) -> int:
        """How many replicas there are."""
        return self.size // self.mesh.replica

    @property
    def tensor_rank(self) -> int:
        """Which part of every split layer this rank has."""
        return self.mesh.tensor_of(self.rank)

    @property
    def tensor_size(self) -> int:
        """Over how many ranks layers are split."""
        return self.mesh.tensor

    @property
    def pipeline_rank(self) -> int:
        """Which of the workers that share out the layers this one is."""
        return self.mesh.stage_of(self.rank)

    @property
    def pipeline_size(self) -> int:
        """How many workers share out the layers."""
        return self.mesh.pipeline

    @property
    def counts(self) -> bool:
        """Whether this rank speaks for its replica, all of which have the same batches."""
        return self.rank % self.mesh.replica == 0

    def any(self, flag: bool | Tensor) -> bool:
        """Whether `flag` holds on any rank; for stopping early on all of them alike."""
        self.feed.check_even("world.any")
        row = torch.tensor([float(bool(flag))], device=self.collectives.small_device)
        return bool(self.collectives.gather_rows(row).any())

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block on rank 0 before the others (a download, a cache to fill)."""
        if not self.is_main:
            self.barrier()
        try:
            yield
        finally:
            if self.is_main:
                self.barrier()

    def barrier(self) -> None:
        """Return when every rank has come."""
        self.feed.check_even("world.barrier")
        self.collectives.barrier()

    def broadcast_object(self, value: T, source: int = 0) -> T:
        """Rank `source`'s `value` (picklable), on every rank."""
        self.feed.check_even("world.broadcast_object")
        gathered = self.collectives.gather_objects(value if self.rank == source else None)
        return gathered[source]  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        """Every rank's `value` (picklable), in rank order, on every rank."""
        self.feed.check_even("world.gather")
        return self.collectives.gather_objects(value)

    def sum(self, value: Tensor, groups: Sequence[Sequence[int]] | None = None) -> Tensor:
        """`value` (any shape, alike on all ranks) summed over all ranks, or over groups of them.

        With `groups`, disjoint lists of ranks, each rank gets its own group's sum; a rank in no
        group keeps its value. Raises UsageError for a rank that is listed twice.
        """
        self.feed.check_even("world.sum")
        group = self.collectives
        if groups is not None:
            key = tuple(tuple(members) for members in groups)
            if key not in self._groups:
                self._groups[key] = group.split(groups)
            group = self._groups[key]
        total = value.detach().clone(memory_format=torch.contiguous_format)
        if value.device.type == "cpu":  # NCCL moves only what is on a GPU
            total = total.to(group.small_device)
        group.all_reduce(total.view(-1)).wait()
        return total.to(value.device)

    def print(self, *values: Any, **options: Any) -> None:
        """`print`, on rank 0 alone."""
        if self.is_main:
            print(*values, **{"flush": True} | options)

    def expect_no_engine(self) -> None:
        """There is an engine, or another way to train: steps by hand need no word."""
        if self.without_engine is not None:
            self.without_engine.forget()

    def settle(self, **keywords: Any) -> config.Settings:
        """The settings of this run given a script's keywords; says once what overrides what."""
        settings, overrides = config.load(self._keywords | keywords)
        for line in overrides:
            self.say_once(line)
        return settings

    def settle_engine(self, keywords: dict[str, Any]) -> config.Settings:
        """The same for an engine with its `keywords`. Raises ConfigError for a flag that has no
        effect on it; of others this says so."""
        settings = self.settle(**keywords)
        found = config.sources(os.environ, self._keywords | keywords)
        for line in config.idle(found, settings, config.OF_AN_ENGINE):
            self.say_once(line)
        return settings

    def say_once(self, line: str) -> None:
        """On stderr, on rank 0 alone; a line that was said before is not said again."""
        if line not in self._said:
            self._said.add(line)
            self.print(f"shardwise: {line}", file=sys.stderr)


def init(seed: int | None = None, **settings: Any) -> World:
    """Join the other ranks, whoever launched them; alone, be a group of one.

    With a `seed`, torch, numpy and random are seeded with it on every rank: what is drawn from here
    on, before the first batch or forward to train on, is what one plain process draws that is
    seeded so. Without one, every rank goes on from where rank 0's generators are, and
    `torch.initial_seed()` of rank 0 is the seed. With `reseed=False` generators stay where they
    are, here and at every step: a script that seeds and saves them itself goes on doing so.
    `settings` are keywords of `shardwise.config.Settings`, overridden by the TOML file, the
    environment and the flags. Calling it twice is an error.

    Raises ConfigError for a setting that is wrong, LaunchError when the others cannot be reached.
    """
    found = config.sources(os.environ, settings)
    report.watch_exceptions()
    idle = config.idle(found, config.resolve(found)[0], config.OF_A_RUN)
    world = enter(seed, settings)
    for line in idle:
        world.say_once(line)
    return world


def enter(
    seed: int | None, settings: dict[str, Any], on_meeting: collectives.OnMeeting | None = None
) -> World:
    """What `init` does; `on_meeting` is for `collectives.connect`."""
    global _current
    if _current is not None:
        raise UsageError("shardwise.init was called twice; call it once, at the top of the script.")
    given = dict(settings) | ({"seed": seed} if seed is not None else {})
    report.watch_exceptions()
    found = config.sources(os.environ, given)
    chosen, _ = config.resolve(found)
    identity = launch.detect(os.environ)
    device = _device(identity, chosen.device, sharing=chosen.transport == "gloo")
    if device.type == "cpu":
        heap.keep(os.environ)
    group = collectives.connect(
        identity, device, chosen.timeout, chosen.transport, chosen.rendezvous, on_meeting
    )
    world = World(identity, group, device, Telling(os.environ))
    world._keywords = dict(settings)
    world.settings = world.settle(**given)
    world.cut(_mesh(world.settings, world.size))
    folder = None if world.settings.record is None else Path(world.settings.record)
    world.step_log = StepLog(folder, world.rank, world.settings.stop_after, counts=world.counts)
    _share_cores(world)
    if identity.launcher == "torchrun" and (line := collectives.exposed()) and not chosen.quiet:
        world.say_once(line)
    if chosen.exact is not None:
        MicroShards(chosen.exact, world.size, world.rank)  # refuses what cannot be
        repeatable.fix_arithmetic(device)
    _begin_alike(world, given)
    whereabouts.show_on_signal()
    if world.size > 1:
        world.without_engine = WithoutEngine(world.size, world.say_once)
        world.sentry = Sentry(group.lookout, chosen.warn_after, chosen.timeout)
    atexit.register(_leave)
    _current = world
    if chosen.timeline is not None:
        start_timeline(chosen.timeline)
    return world


def _begin_alike(world: World, keywords: dict[str, Any]) -> None:
    """Let the generators of all ranks be where those of one process are."""
    chosen, source = config.winning(config.sources(os.environ, keywords)).get("seed", (None, ""))
    group = world.collectives
    world.seed = group.gather_plain(torch.initial_seed() if chosen is None else chosen)[0]
    world.seed_source = source or "torch.initial_seed()"
    if chosen is not None:
        randomness.seed_everything(world.seed)
    elif world.size > 1 and world.settings.reseed:
        states = GeneratorStates.now(world.device).plain() if world.is_main else None
        told = group.gather_plain(states)[0]
        if not world.is_main:
            GeneratorStates.of_plain(told).restore(world.device)


def _mesh(settings: config.Settings, size: int) -> Mesh:
    """The mesh of a run of `size` ranks. Raises ConfigError for one that cannot be."""
    if settings.exact is not None and settings.tensor > 1:
        raise ConfigError(
            f"--exact {settings.exact} and --tensor {settings.tensor} cannot be had together: what "
            "a split layer adds up depends on how many workers it is split over. Leave one of "
            "them out."
        )
    if not settings.reseed and (settings.tensor > 1 or settings.pipeline > 1):
        split = "tensor" if settings.tensor > 1 else "pipeline"
        raise ConfigError(
            f"--no-reseed and --{split} {getattr(settings, split)} cannot be had together: the "
            "workers of a split model draw what they have in common from seeds of the step. Leave "
            "one of them out."
        )
    if settings.exact is not None and settings.pipeline > 1:
        raise ConfigError(
            f"--exact {settings.exact} and --pipeline {settings.pipeline} cannot be had together: "
            "both cut a batch, each in its own way. Leave one of them out."
        )
    return Mesh(size, settings.tensor, settings.pipeline)


def current() -> World:
    """The world of this process. Raises UsageError before `shardwise.init`."""
    if _current is None:
        raise UsageError("Call world = shardwise.init() first, at the top of the script.")
    return _current


class _Module(ModuleType):
    """This module, which is `shardwise.world`, and as `shardwise.world()` the one of this process:
    from anywhere in a script, after `shardwise.init`."""

    def __call__(self) -> World:
        """See `current`."""
        return current()


sys.modules[__name__].__class__ = _Module


def start_timeline(path: str | os.PathLike[str]) -> None:
    """Record where time goes into `path`, Chrome's trace JSON, from now on.

    For the ranks that call it; those of one host write one file, which may be opened at any moment.
    What is being recorded into another file ends there. In a file that this run has written before
    it goes on; one of an earlier run is replaced. Raises ConfigError where it cannot be written.
    """
    world = current()
    timeline_control.start(Path(path), world.collectives.lookout)
    if world.is_main and not world.settings.quiet:
        line = timeline_control.where(Path(path), world.collectives.lookout)
        print(f"shardwise: {line}", file=sys.stderr, flush=True)


def stop_timeline() -> None:
    """Write what is left of the timeline, and record no longer; harmless where none is."""
    timeline_control.stop()


def _leave() -> None:
    """Leave the group; the last word of a process, also for tests that join again."""
    global _current
    world, _current = _current, None
    timeline_control.stop()
    if world is not None:
        atexit.unregister(_leave)
        if world.is_main and not world.step_log.ended:
            world.unstepped.tell()
        world.preemption.forget()
        world.step_log.close()
        world.expect_no_engine()
        if world.sentry is not None:
            world.sentry.close()
        side = vars(world).get("side_channel", world.data)
        made = dict.fromkeys((side, world.data, world.tensor, world.pipeline, world.stage))
        for group in made:
            if group is not world.collectives:
                group.close()
        world.collectives.close()
        world.collectives.lookout.close()
        collectives.disconnect()


def _share_cores(world: World) -> None:
    """Let ranks that may run on the same cores divide them; mpirun and srun do not say how.

    Each would else start a thread per core, and all would wait for each other.
    """
    if world.launcher not in ("Open MPI", "MPICH", "MVAPICH", "Slurm", "horovodrun"):
        return
    if "OMP_NUM_THREADS" in os.environ or not hasattr(os, "sched_getaffinity"):
        return
    mine = [world.host, sorted(os.sched_getaffinity(0))]
    alike = world.collectives.gather_plain(mine).count(mine)
    torch.set_num_threads(max(1, len(mine[1]) // alike))


def _device(identity: Identity, wanted: str, *, sharing: bool) -> torch.device:
    """Where a rank computes; with `sharing`, ranks of a host go round its GPUs."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and gpus == 0):
        return torch.device("cpu")
    if gpus < (1 if sharing or identity.own_gpus else identity.local_size):
        shared = "let them share GPUs with --transport gloo, " if gpus else ""
        raise LaunchError(
            f"{identity.local_size} ranks run on this host, but it shows {gpus} GPU(s). "
            f"Start {max(gpus, 1)} rank(s) here, {shared}or train on the CPU with --device cpu."
        )
    device = torch.device("cuda", identity.local_rank % gpus)
    torch.cuda.set_device(device)
    return device
