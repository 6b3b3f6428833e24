"""Holds the state of the run in one process: its rank, its groups, and what all ranks agree on."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise import comm as collectives
from shardwise import config
from shardwise.comm import Collectives, GatherOrder, Solo, host_key, ranks_by_host
from shardwise.errors import ConfigError, UsageError
from shardwise.messages.other_libraries import HintsAtAttributes
from shardwise.net import error_file
from shardwise.net.identity import Identity
from shardwise.net.progress import ProgressWriter
from shardwise.watch import process_status
from shardwise.watch.watchdog import Watchdog
from shardwise.world import exit_handlers, timeline_control
from shardwise.world.batch_rows import BatchRows
from shardwise.world.common_calls import CommonCalls
from shardwise.world.common_random_stream import CommonRandomStream
from shardwise.world.current_batch import CurrentBatch
from shardwise.world.loop_checks import StepsWithoutEngine, UnsteppedBackwards
from shardwise.world.mesh import Mesh
from shardwise.world.preemption import Preemption
from shardwise.world.step_log import StepLog

T = TypeVar("T")

_current: World | None = None


class World(BatchRows, HintsAtAttributes):
    """The group of ranks that trains together; made by `shardwise.init`.

    Attributes: `rank`, `size`, `local_rank`, `local_size`, `device` (torch.device), `is_main`
    (rank 0), `seed`, `launcher`, `settings`.

    With tensor or pipeline parallelism, several ranks make one replica of the model:
    `data_rank` of `data_size` says which replica this rank is of, and so which part of the data it
    gets; `tensor_rank` of `tensor_size` which part of every split layer it has, `pipeline_rank` of
    `pipeline_size` which layers.

    With `--islands` several replicas make an island, whose ranks make steps of their own:
    `island_rank` of `island_count` says which one this rank is of.
    """

    def __init__(
        self,
        identity: Identity,
        group: Collectives,
        device: torch.device,
        progress: ProgressWriter | None = None,
        keywords: Mapping[str, Any] | None = None,
    ) -> None:
        self.rank = identity.rank
        self.size = identity.size
        self.local_rank = identity.local_rank
        self.local_size = identity.local_size
        self.launcher = identity.launcher
        self.device = device
        self.is_main = group.leads
        self.host = socket.gethostname()
        self.seed = 0
        self.seed_source = "not given"
        """Where the seed comes from, in words."""
        self.settings = config.Settings()
        self.collectives = group
        self.mesh = Mesh(identity.size)
        self.data = group
        """The data-parallel ranks: those with the same part of the other replicas, in this island
        where there are several."""
        self.tensor: Collectives = Solo()
        """The tensor-parallel ranks: those of this replica that have parts of the same layers."""
        self.pipeline: Collectives = Solo()
        """The pipeline-parallel ranks: those of this replica that have other layers, in order."""
        self.stage = group
        """The ranks of all replicas that have these layers: all, where all have all; in this
        island where there are several."""
        self.step_group = group
        """The ranks that make steps together: all, or those of this island."""
        self.peers: Collectives = Solo()
        """The ranks of equal place in all islands, in the order of these."""
        self.current_batch = CurrentBatch()
        self.progress = progress or ProgressWriter({})
        self.preemption = Preemption(self.progress, self.print)
        self.current_batch.watch(self.preemption.before_batch)
        self.draws = CommonRandomStream(device)
        self.current_batch.watch(self.draws.before_batch)
        self.calls = CommonCalls()
        self.step_log = StepLog(None, self.rank)
        self.engines = 0
        self.stepped_last = -1
        """The number of the engine whose step came last."""
        self.steps_made = 0
        """How many steps the engines of this process have made, all together."""
        self.unstepped = UnsteppedBackwards()
        self.without_engine: StepsWithoutEngine | None = None
        self.watchdog: Watchdog | None = None
        self._groups: dict[tuple[tuple[int, ...], ...], Collectives] = {}
        self._former_groups: list[Collectives] = []
        """Those of a mesh before this one."""
        self.keywords = dict(keywords or {})
        """The settings that the script gave."""
        self._said: set[str] = set()
        self._told_stand_in = False
        group.watch_members(self._members_changed)

    @cached_property
    def side_channel(self) -> Collectives:
        """The ranks of `data` over channels of their own, for collectives inside forward and
        backward, whose order against those of the engines may differ. Made at first use, by all
        ranks."""
        return self.data.second_group()

    @cached_property
    def gather_order(self) -> GatherOrder:
        """The order in which units of all engines are gathered, and BatchNorms exchange."""
        return GatherOrder(self.data.size, lambda: self.side_channel)

    def _members_changed(self) -> None:
        """Another rank may speak for the run once ranks have left or come back."""
        self.is_main = self.collectives.leads

    def cut(self, mesh: Mesh) -> None:
        """Take a place in `mesh`. Collective where it has more than the data axis."""
        self.mesh, whole = mesh, self.collectives
        self._former_groups += self._groups_of_axes()
        vars(self).pop("gather_order", None)  # it is of the data-parallel ranks before
        vars(self).pop("side_channel", None)
        self.step_group = self.data = self.stage = whole
        self.tensor, self.pipeline, self.peers = Solo(), Solo(), Solo()
        if mesh.islands > 1:
            self.step_group = self.data = self.stage = whole.split(mesh.island_groups)
            self.peers = whole.split(mesh.peer_groups)
        if mesh.replica > 1:
            self.data = whole.split(mesh.data_groups)
            self.tensor = whole.split(mesh.tensor_groups)
        if mesh.pipeline > 1:
            self.pipeline = whole.split(mesh.pipeline_groups)
            self.stage = whole.split(mesh.stage_groups)

    def _groups_of_axes(self) -> list[Collectives]:
        """The groups that were split off for the axes, the side channel first."""
        side = vars(self).get("side_channel", self.data)
        cut = (self.data, self.tensor, self.pipeline, self.stage, self.step_group, self.peers)
        made = dict.fromkeys((side, *cut))
        return [group for group in made if group is not self.collectives]

    @property
    def groups_apart(self) -> int:
        """How many groups of ranks make updates of their own; 1 if all make the same."""
        return self.mesh.islands if self.settings.behind is None else 1

    @property
    def island_rank(self) -> int:
        """Which island this rank is of."""
        return self.mesh.island_of(self.rank)

    @property
    def island_count(self) -> int:
        """How many islands there are; 1 where all ranks make steps together."""
        return self.mesh.islands

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
        """Over how many ranks each layer is split."""
        return self.mesh.tensor

    @property
    def pipeline_rank(self) -> int:
        """Which pipeline stage this rank has."""
        return self.mesh.stage_of(self.rank)

    @property
    def pipeline_size(self) -> int:
        """How many pipeline stages there are."""
        return self.mesh.pipeline

    @property
    def counts(self) -> bool:
        """Whether this rank speaks for its replica, all of which have the same batches."""
        return self.rank % self.mesh.replica == 0

    def _check_inside(self, call: str) -> None:
        """Raise UsageError for a `call` over all ranks in an elastic island that is not back yet:
        the others would not come."""
        if self.collectives.is_outside:
            raise UsageError(
                f"{call} before engine.resume(folder), in an island that comes back: the others go "
                "on without it until then, and would not come. Call it after."
            )

    def any(self, flag: bool | Tensor) -> bool:
        """Whether `flag` holds on any rank; for stopping early on all of them alike."""
        self.current_batch.check_even("world.any")
        self._check_inside("world.any")
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
        self.current_batch.check_even("world.barrier")
        self.collectives.barrier()

    def broadcast_object(self, value: T, source: int = 0) -> T:
        """Rank `source`'s `value` (picklable), on every rank."""
        self.current_batch.check_even("world.broadcast_object")
        self._check_inside("world.broadcast_object")

        def given() -> T:
            mine = self.is_main if source == 0 else self.rank == source
            gathered: list[tuple[T] | None]
            gathered = self.collectives.gather_objects((value,) if mine else None)
            for held in gathered:
                if held is not None:
                    return held[0]
            raise UsageError(
                f"world.broadcast_object(source={source}) has nothing to give: there is no such "
                "rank, or its elastic island has ended. Broadcast from rank 0, whose place the "
                "first of the others takes."
            )

        return self.collectives.steadily(given)

    def gather(self, value: T) -> list[T]:
        """Every rank's `value` (picklable), in rank order, on every rank."""
        self.current_batch.check_even("world.gather")
        self._check_inside("world.gather")
        self._tell_stand_in("world.gather")
        return self.collectives.gather_objects(value)

    def sum(self, value: Tensor, groups: Sequence[Sequence[int]] | None = None) -> Tensor:
        """`value` (any shape, alike on all ranks) summed over all ranks, or over groups of them.

        With `groups`, disjoint lists of ranks, each rank gets its own group's sum; a rank in no
        group keeps its value. Raises UsageError for a rank that is listed twice, and for a value
        that is not a tensor.
        """
        if not isinstance(value, Tensor):
            raise UsageError(
                f"world.sum takes a tensor, not {type(value).__name__}: write "
                "world.sum(torch.tensor(value))."
            )
        self.current_batch.check_even("world.sum")
        self._check_inside("world.sum")
        self._tell_stand_in("world.sum")
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
        if groups is None and group.comes_and_goes and group.size < self.size:
            raise UsageError(
                f"world.sum over {group.size} of {self.size} workers, since an elastic island is "
                "away: divided by world.size it would be wrong. Use sw.Metrics, or world.gather, "
                "which gives as many values as there are workers."
            )
        return total.to(value.device)

    def print(self, *values: Any, **options: Any) -> None:
        """`print`, on rank 0 alone."""
        if self.is_main:
            print(*values, **{"flush": True} | options)

    def _tell_stand_in(self, call: str) -> None:
        """Say once that sums by hand count stand-ins, where the script itself makes one after this
        rank was given a stand-in, and has not looked at `rows`."""
        caller = sys._getframe(2)
        ours = caller.f_globals.get("__name__", "").startswith("shardwise.")
        if ours or self.current_batch.stand_in is None or self._told_stand_in:
            return
        self._told_stand_in = True
        whole = " (world.gather_rows joins rows)" if call == "world.gather" else ""
        self.say_once(
            f"{call} ({process_status.users_line(caller)}) after {self.current_batch.stand_in} "
            "gave this worker a stand-in, since a batch had fewer rows than there are workers: "
            "where it takes rows together, it takes that one too. Of a batch, world.rows rows are "
            f"this worker's, 0 of a stand-in: write scores[: world.rows]{whole}; or use "
            "sw.Metrics, which leaves stand-ins out."
        )

    def expect_no_engine(self) -> None:
        """Do not warn of steps by hand: there is an engine, or another way to train."""
        if self.without_engine is not None:
            self.without_engine.forget()

    def settle(self, **keywords: Any) -> config.Settings:
        """Resolve the settings of this run; says once what overrides a script's keywords."""
        settings, overrides = config.load(self.keywords | keywords)
        for line in overrides:
            self.say_once(line)
        return settings

    def add_keywords(self, keywords: Mapping[str, Any]) -> config.Settings:
        """Resolve the settings of this run with `keywords` beside those of `shardwise.init`, and
        keep both for the engines to come."""
        self.keywords |= keywords
        self.settings = self.settle()
        return self.settings

    def settle_engine(self, keywords: dict[str, Any]) -> config.Settings:
        """Resolve the settings of an engine with its `keywords`.

        Raises ConfigError for a flag that has no effect on it; of other settings this says so.
        """
        settings = self.settle(**keywords)
        found = config.sources(os.environ, self.keywords | keywords)
        for line in config.idle(found, settings, config.OF_AN_ENGINE):
            self.say_once(line)
        return settings

    def say_once(self, line: str) -> None:
        """Print a line on stderr, on rank 0 alone, unless it was printed before."""
        if line not in self._said:
            self._said.add(line)
            self.print(f"shardwise: {line}", file=sys.stderr)

    def close(self) -> None:
        """Close what this rank shares with the others; `leave` does it."""
        if self.is_main and not self.step_log.ended:
            self.unstepped.warn()
        self.preemption.forget()
        self.step_log.close()
        self.expect_no_engine()
        if self.watchdog is not None:
            self.watchdog.close()
        # Groups that were split off first: the whole group carries the memory that they use.
        for group in dict.fromkeys([*self._groups_of_axes(), *self._former_groups]):
            group.close()
        self.collectives.close()
        self.collectives.status_server.close()
        collectives.disconnect()


def current() -> World:
    """Return the world of this process. Raises UsageError before `shardwise.init`."""
    if _current is None:
        error_file.watch_exceptions()  # nothing has done so before `init`
        raise UsageError("Call world = shardwise.init() first, at the top of the script.")
    return _current


def has_joined() -> bool:
    """Return whether this process has called `shardwise.init`."""
    return _current is not None


def start_timeline(path: str | os.PathLike[str]) -> None:
    """Record where time goes into `path`, Chrome's trace JSON, from now on.

    For the ranks that call it; those of one host write one file, which may be opened at any moment.
    What is being recorded into another file ends there. In a file that this run has written before
    it goes on; one of an earlier run is replaced. Raises ConfigError where it cannot be written.
    """
    world = current()
    if world.collectives.comes_and_goes:
        raise ConfigError(
            f"--timeline {path} and --elastic-islands cannot be had together: an island that is "
            "back would begin the file anew. Leave one of them out."
        )
    timeline_control.start(Path(path), world.collectives.status_server)
    if world.is_main and not world.settings.quiet:
        line = timeline_control.where(Path(path), world.collectives.status_server)
        print(f"shardwise: {line}", file=sys.stderr, flush=True)


def stop_timeline() -> None:
    """Write what is left of the timeline, and record no longer; harmless where none is."""
    timeline_control.stop()


def set_current(world: World) -> None:
    """Make `world` the one of this process, until it ends or `leave` is called."""
    global _current
    exit_handlers.register(leave)
    _current = world


def refuse_second() -> None:
    """Raise UsageError where this process has a world already."""
    if _current is not None:
        raise UsageError("shardwise.init was called twice; call it once, at the top of the script.")


def leave() -> None:
    """Leave the group, as a process does at its end, and tests that join again."""
    global _current
    world, _current = _current, None
    timeline_control.stop()
    if world is not None:
        exit_handlers.unregister(leave)
        world.close()


def count_groups(settings: config.Settings, group: Collectives) -> int:
    """Return how many islands the ranks of `group` form. Collective if that is one per host.

    Raises ConfigError if hosts cannot be islands.
    """
    if isinstance(settings.islands, int):
        return settings.islands
    hosts = ranks_by_host(group.gather_plain(host_key() or socket.gethostname()))
    in_a_row = all(ranks[-1] - ranks[0] == len(ranks) - 1 for ranks in hosts)
    if len({len(ranks) for ranks in hosts}) > 1 or not in_a_row:
        counts = ", ".join(str(len(ranks)) for ranks in hosts)
        raise ConfigError(
            f"--islands host needs as many workers on every host, numbered host by host; these "
            f"have {counts}{'' if in_a_row else ', and their numbers alternate'}. Start equal "
            "numbers host by host (-H a:4,b:4), or write --islands with a number."
        )
    return len(hosts)
