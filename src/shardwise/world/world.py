"""Implements `World`, one process's view of the run: its rank, process groups and collectives."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise import comm as collectives
from shardwise import config
from shardwise.comm import (
    Collectives,
    GatherOrder,
    Solo,
    SurvivorGroup,
    host_key,
    ranks_by_host,
)
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
from shardwise.world.survival import Survival

T = TypeVar("T")

_current: World | None = None


class World(BatchRows, HintsAtAttributes):
    """The ranks that train together, and this process's position among them.

    `shardwise.init` creates it, and `shardwise.world()` returns it.

    Attributes:
        rank: Index of this rank, from 0.
        size: Number of ranks (world size).
        local_rank: Index of this rank on its host.
        local_size: Number of ranks on this host.
        device: The `torch.device` that this rank computes on.
        is_main: True only on the rank that prints, usually rank 0.
        host: Name of this host.
        seed: Seed of the run.
        launcher: Name of the program that started the ranks, such as `"shardwise"` or `"torchrun"`.
        settings: The resolved `Settings` of the run.

    With tensor or pipeline parallelism, several ranks form one replica of the model. Three pairs of
    properties describe a rank's position:

    - `data_rank` and `data_size`: the index of its replica, which determines its share of the data
    - `tensor_rank` and `tensor_size`: the index of its part of every split layer
    - `pipeline_rank` and `pipeline_size`: its pipeline stage

    With `--context`, `context_rank` is the index of this rank's part of every sequence, and
    `context_size` the number of parts.

    With `--islands`, `island_rank` and `island_count` describe its island, a group of ranks that
    step together.

    Example:
        >>> import shardwise as sw
        >>> world = sw.init(seed=0)
        >>> world.print(f"{world.size} worker(s)")
        1 worker(s)
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
        # With elastic islands this can change: see `_update_main`.
        self.is_main = group.leads
        self.host = socket.gethostname()
        self.seed = 0
        self.seed_source = "not given"
        """Source of the seed, in words: a flag, a variable or the script."""
        self.settings = config.Settings()
        self.collectives = group
        self.mesh = Mesh(identity.size)
        self.data = group
        """Data-parallel ranks: the ranks of this island's replicas that have the same part of the
        model."""
        self.tensor: Collectives = Solo()
        """Tensor-parallel ranks: the ranks of this replica that split the same layers."""
        self.pipeline: Collectives = Solo()
        """Pipeline-parallel ranks: one per stage of this replica, in stage order."""
        self.stage = group
        """All ranks of this island that have the same pipeline stage."""
        self.step_group = group
        """Ranks that step together: all ranks or, with islands, the ranks of this island."""
        self.peers: Collectives = Solo()
        """Ranks with the same index within their islands, in island order."""
        self.expert: Collectives = Solo()
        """Expert-parallel ranks: the ranks that together hold every expert once."""
        self.expert_copies: Collectives = group
        """Ranks that hold the same experts."""
        self.context: Collectives = Solo()
        """Context-parallel ranks: the ranks with parts of the same sequences, in their order."""
        self.current_batch = CurrentBatch()
        self.progress = progress or ProgressWriter({})
        self.preemption = Preemption(self.progress, self.print)
        self.current_batch.watch(self.preemption.before_batch)
        self.draws = CommonRandomStream(device)
        self.current_batch.watch(self.draws.before_batch)
        self.calls = CommonCalls()
        self.step_log = StepLog(None, self.rank)
        self.engines = 0
        self.last_stepped_engine = -1
        """Index of the engine that stepped last; -1 before the first step."""
        self.steps_made = 0
        """Total number of steps that all engines in this process have run."""
        self.unstepped = UnsteppedBackwards()
        self.without_engine: StepsWithoutEngine | None = None
        self.watchdog: Watchdog | None = None
        self._groups: dict[tuple[tuple[int, ...], ...], Collectives] = {}
        self._former_groups: list[Collectives] = []
        """Groups of earlier meshes, which are closed at the end of the run."""
        self.keywords = dict(keywords or {})
        """Settings passed by the script."""
        self._printed: set[str] = set()
        self._warned_of_stand_in = False
        self.survival: Survival | None = None
        """Repeats steps after a loss, with `--survive`; otherwise None."""
        if isinstance(group, SurvivorGroup):
            self.survival = Survival(group, self.print)
            self.preemption.is_alone = True
            if not group.is_waiting:
                self.limit_stops(group.stop_limit)
            group.watch_members(self._follow_group)
        group.watch_members(self._update_main)

    @cached_property
    def side_channel(self) -> Collectives:
        """The ranks of `data`, with channels for collectives inside forward and backward passes.

        Ranks may interleave these collectives with the engines' collectives in different orders, so
        the two must not share channels. Creating the group, at its first use, is collective.
        """
        return self.data.second_group()

    @cached_property
    def gather_order(self) -> GatherOrder:
        """Makes all ranks run forward-pass collectives (gathers, BatchNorm) in the same order."""
        return GatherOrder(self.data.size, lambda: self.side_channel)

    @cached_property
    def routing_channel(self) -> Collectives:
        """The ranks that route a batch, with separate channels for mixture-of-experts token counts.

        These are the ranks of `data`. If experts are split, the ranks of a replica route different
        tokens, so `stage` is used instead. Creating the group, at its first use, is collective.
        """
        group = self.data if self.mesh.expert == 1 else self.stage
        return group.second_group() if group.size > 1 else group

    def limit_stops(self, seconds: float) -> None:
        """Let the launcher kill this process if it is stopped for longer than `seconds`."""
        if (begun := process_status.process_start()) is not None:
            self.progress.limit_stops(seconds, begun)

    def _update_main(self) -> None:
        # With elastic islands rank 0 may leave; the first remaining rank then prints instead.
        self.is_main = self.collectives.leads

    def _follow_group(self) -> None:
        """Update this rank's number and the world size after the group has lost ranks."""
        self.rank, self.size = self.collectives.rank, self.collectives.size
        assert self.survival is not None
        if not self.survival.group.surplus:
            self.mesh = replace(self.mesh, size=self.size)
        for group in self._groups.values():  # their ranks have other numbers now
            group.close()
        self._groups.clear()
        if "gather_order" in vars(self):
            self.gather_order.follow(self.data.size)

    def cut(self, mesh: Mesh) -> None:
        """Set this rank's coordinates in `mesh`, and create a group for each axis.

        Collective if the mesh has axes other than data.
        """
        self.mesh, whole = mesh, self.collectives
        self._former_groups += self._groups_of_axes()
        # Drop cached properties that belong to the former data-parallel ranks.
        vars(self).pop("gather_order", None)
        vars(self).pop("side_channel", None)
        vars(self).pop("routing_channel", None)
        # Every rank makes these calls in this order, because a split is a collective of all ranks.
        self.step_group = self.data = self.stage = whole
        self.tensor, self.pipeline, self.peers = Solo(), Solo(), Solo()
        self.expert, self.expert_copies = Solo(), whole
        self.context = Solo()
        # Data-parallel groups stay within an island. Split them if a replica has several ranks.
        if mesh.islands > 1:
            self.step_group = self.data = self.stage = whole.split(mesh.island_groups)
            self.peers = whole.split(mesh.peer_groups)
        if mesh.replica > 1:
            self.data = whole.split(mesh.data_groups)
            self.tensor = whole.split(mesh.tensor_groups)
        if mesh.pipeline > 1:
            self.pipeline = whole.split(mesh.pipeline_groups)
            self.stage = whole.split(mesh.stage_groups)
        if mesh.expert > 1:
            self.expert = whole.split(mesh.expert_groups)
            self.expert_copies = whole.split(mesh.expert_copy_groups)
        if mesh.context > 1:
            self.context = whole.split(mesh.context_groups)

    def _groups_of_axes(self) -> list[Collectives]:
        """Return the groups that were created for the axes, with the side channel first."""
        side = vars(self).get("side_channel", self.data)
        routing = vars(self).get("routing_channel", self.data)
        axes = (self.data, self.tensor, self.pipeline, self.stage, self.step_group, self.peers)
        groups = dict.fromkeys(
            (side, routing, *axes, self.expert, self.expert_copies, self.context)
        )
        return [group for group in groups if group is not self.collectives]

    @property
    def is_alone(self) -> bool:
        """True if this is the only rank, and no other will join it."""
        return self.size == 1 and self.survival is None

    @property
    def generation(self) -> int:
        """Number of times that the run has lost ranks or admitted spares, the same on all ranks."""
        return 0 if self.survival is None else self.survival.group.generation

    @property
    def admission(self) -> int:
        """The `generation` in which spares were last admitted, or 0. The same on all ranks."""
        return 0 if self.survival is None else self.survival.group.admission

    @property
    def expert_size(self) -> int:
        """Number of ranks across which a layer's experts are divided."""
        return self.mesh.expert

    @property
    def groups_apart(self) -> int:
        """Number of groups of ranks that update independently of each other; 1 without islands."""
        return self.mesh.islands if self.settings.behind is None else 1

    @property
    def island_rank(self) -> int:
        """Index of this rank's island, from 0."""
        return self.mesh.island_of(self.rank)

    @property
    def island_count(self) -> int:
        """Number of islands; 1 if all ranks step together."""
        return self.mesh.islands

    @property
    def data_rank(self) -> int:
        """Index of the share of the samples that this rank trains on, from 0.

        This is the index of the model replica that the rank belongs to. With `--context`, the
        replicas of a context group have the same samples and the same index.
        """
        return self.mesh.data_of(self.rank) // self.mesh.context

    @property
    def data_size(self) -> int:
        """Number of shares of the samples: of replicas or, with `--context`, of context groups."""
        return self.size // (self.mesh.replica * self.mesh.context)

    @property
    def context_rank(self) -> int:
        """Index of this rank's part of each sequence, from 0."""
        return self.mesh.context_of(self.rank)

    @property
    def context_size(self) -> int:
        """Number of ranks across which each sequence is split."""
        return self.mesh.context

    @property
    def tensor_rank(self) -> int:
        """Index of this rank's part of every split layer, from 0."""
        return self.mesh.tensor_of(self.rank)

    @property
    def tensor_size(self) -> int:
        """Number of ranks across which each layer is split."""
        return self.mesh.tensor

    @property
    def pipeline_rank(self) -> int:
        """Index of this rank's pipeline stage, from 0."""
        return self.mesh.stage_of(self.rank)

    @property
    def pipeline_size(self) -> int:
        """Number of pipeline stages."""
        return self.mesh.pipeline

    @property
    def counts(self) -> bool:
        """True on the one rank of each replica, or of each context group, that counts samples.

        The other ranks of the replica or group have the same samples.
        """
        return self.rank % (self.mesh.replica * self.mesh.context) == 0

    def _check_inside(self, call: str) -> None:
        """Raise UsageError if a collective `call` is made in an island that must first rejoin."""
        if self.collectives.is_outside:
            raise UsageError(
                f"{call} before engine.resume(folder), in an island that rejoins the run: the "
                "other islands do not wait for it until it has resumed. Call it after "
                "engine.resume."
            )

    def any(self, flag: bool | Tensor) -> bool:
        """Return True on every rank if `flag` is true on any rank. Collective.

        Args:
            flag: A bool or a tensor with one element.

        Example:
            if world.any(loss.item() > 1e3):
                break  # on all ranks in the same step
        """
        self.current_batch.check_even("world.any")
        self._check_inside("world.any")
        row = torch.tensor([float(bool(flag))], device=self.collectives.small_device)
        return bool(self.collectives.gather_rows(row).any())

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block on the main rank first, then on the other ranks. Collective.

        For example, the main rank can fill a cache that the other ranks then use.

        Example:
            with world.main_first():
                dataset = download("data")
        """
        if not self.is_main:
            self.barrier()
        try:
            yield
        finally:
            if self.is_main:
                self.barrier()

    def barrier(self) -> None:
        """Wait until all ranks have called this method."""
        self.current_batch.check_even("world.barrier")
        self.collectives.barrier()

    def broadcast_object(self, value: T, source: int = 0) -> T:
        """Return the `value` of rank `source` on every rank. Collective.

        Args:
            value: Any picklable object; ignored on the other ranks.
            source: The rank that sends its value. Default: 0.

        Raises:
            UsageError: There is no rank `source`, or its elastic island has left the run.

        Example:
            name = world.broadcast_object(make_run_name() if world.is_main else None)
        """
        self.current_batch.check_even("world.broadcast_object")
        self._check_inside("world.broadcast_object")

        def receive() -> T:
            sends = self.is_main if source == 0 else self.rank == source
            gathered: list[tuple[T] | None]
            # Send a tuple, because the value itself may be None.
            gathered = self.collectives.gather_objects((value,) if sends else None)
            for sent in gathered:
                if sent is not None:
                    return sent[0]
            raise UsageError(
                f"world.broadcast_object(source={source}): this rank does not exist, or its "
                "elastic island has ended. Broadcast from rank 0: if its island ends, the first "
                "remaining rank takes its place."
            )

        return self.collectives.steadily(receive)

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value` (picklable), in rank order, on every rank. Collective.

        Example:
            hosts = world.gather(world.host)
        """
        self.current_batch.check_even("world.gather")
        self._check_inside("world.gather")
        self._warn_of_stand_in("world.gather")
        gathered = self.collectives.gather_objects(value)
        self._join_counts()
        return gathered

    def sum(self, value: Tensor, groups: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Return the sum of a tensor across all ranks or within groups of ranks. Collective.

        Args:
            value: Tensor of any shape, with the same shape and dtype on all ranks. It is not
                modified.
            groups: Disjoint lists of ranks. Each rank gets the sum of its group, and a rank in no
                group gets its own value. Default: all ranks.

        Raises:
            UsageError: `value` is not a tensor, or a rank is listed twice.

        Example:
            total = world.sum(torch.tensor(correct)).item()
        """
        if not isinstance(value, Tensor):
            raise UsageError(
                f"world.sum takes a tensor, not {type(value).__name__}: write "
                "world.sum(torch.tensor(value))."
            )
        self.current_batch.check_even("world.sum")
        self._check_inside("world.sum")
        self._warn_of_stand_in("world.sum")
        group = self.collectives
        if groups is not None:
            key = tuple(tuple(members) for members in groups)
            # Splitting is collective and allocates channels, so cache the group for later calls.
            if key not in self._groups:
                self._groups[key] = group.split(groups)
            group = self._groups[key]
        # Make a contiguous copy, because all_reduce works in place on a flat view.
        total = value.detach().clone(memory_format=torch.contiguous_format)
        if value.device.type == "cpu":  # NCCL only sends tensors on a GPU
            total = total.to(group.small_device)
        group.all_reduce(total.view(-1)).wait()
        # Check this after the collective, which has updated the group's size on all ranks.
        if groups is None and group.has_changing_ranks and group.size < self.size:
            raise UsageError(
                f"world.sum over {group.size} of {self.size} workers, because an elastic island "
                "has left: divided by world.size, the sum would be wrong. Use sw.Metrics, or "
                "world.gather, which returns one value per remaining worker."
            )
        self._join_counts()
        return total.to(value.device)

    def _join_counts(self) -> None:
        """Record that the ranks' evaluation results were combined."""
        if self.survival is not None:
            self.survival.has_counted = False

    def print(self, *values: Any, **options: Any) -> None:
        """Call `print` on the main rank only, and flush."""
        if self.is_main:
            print(*values, **{"flush": True} | options)

    def _warn_of_stand_in(self, call: str) -> None:
        """Warn once if the user's script calls a sum or gather after this rank got a stand-in.

        A script that has read `world.rows` since then handles stand-ins, so it gets no warning.
        """
        # Don't warn about calls from Shardwise itself (bridges, Metrics), which handles stand-ins.
        caller = sys._getframe(2)
        ours = caller.f_globals.get("__name__", "").startswith("shardwise.")
        if ours or self.current_batch.stand_in is None or self._warned_of_stand_in:
            return
        self._warned_of_stand_in = True
        whole = " (world.gather_rows joins rows)" if call == "world.gather" else ""
        self.say_once(
            f"{call} ({process_status.users_line(caller)}) after {self.current_batch.stand_in} "
            "gave this worker a stand-in, because a batch had fewer rows than there are workers. "
            "If the call combines rows, it counts the stand-in too. world.rows is the number of "
            f"rows that count, 0 for a stand-in: write scores[: world.rows]{whole}; or use "
            "sw.Metrics, which ignores stand-ins."
        )

    def expect_no_engine(self) -> None:
        """Stop warning about steps without an engine.

        Called once an engine exists, or if the script trains without one.
        """
        if self.without_engine is not None:
            self.without_engine.forget()

    def settle(self, **keywords: Any) -> config.Settings:
        """Resolve the run's settings. Print once which of the script's keywords are overridden."""
        settings, overrides = config.load(self.keywords | keywords)
        for line in overrides:
            self.say_once(line)
        return settings

    def add_keywords(self, keywords: Mapping[str, Any]) -> config.Settings:
        """Add `keywords` to those of `shardwise.init`, for the run and for later engines."""
        self.keywords |= keywords
        self.settings = self.settle()
        return self.settings

    def settle_engine(self, keywords: dict[str, Any]) -> config.Settings:
        """Return the settings of an engine with these `keywords`.

        Raises ConfigError if a flag has no effect on the engine. If a setting from another source
        has no effect, only prints a message.
        """
        settings = self.settle(**keywords)
        # A setting without effect is an error if it is a flag. In a file or a variable it only
        # causes a message, because other runs use the same file or variable.
        found = config.sources(os.environ, self.keywords | keywords)
        for line in config.idle(found, settings, config.OF_AN_ENGINE):
            self.say_once(line)
        return settings

    def say_once(self, line: str) -> None:
        """Print a message to stderr on the main rank, unless it has been printed before."""
        if line not in self._printed:
            self._printed.add(line)
            self.print(f"shardwise: {line}", file=sys.stderr)

    def close(self) -> None:
        """Close this rank's groups, logs and servers. `leave` calls it."""
        if self.is_main and not self.step_log.ended:
            # Don't warn after `--stop-after`, which may stop the run between a backward pass and
            # its step.
            self.unstepped.warn()
        # From here on a signal terminates the process as usual: there is nothing left to save.
        self.preemption.forget()
        self.step_log.close()
        self.expect_no_engine()
        if self.watchdog is not None:
            self.watchdog.close()
        # Close split groups first, because they use the memory of the group they were split from.
        for group in dict.fromkeys([*self._groups_of_axes(), *self._former_groups]):
            group.close()
        self.collectives.close()
        self.collectives.status_server.close()
        collectives.disconnect()


def current() -> World:
    """Return the world of this process.

    Raises:
        UsageError: `shardwise.init` was not called.
    """
    if _current is None:
        # `init` normally installs this hook. Without it the launcher would not learn of this
        # exception.
        error_file.watch_exceptions()
        raise UsageError("Call world = shardwise.init() first, at the top of the script.")
    return _current


def has_joined() -> bool:
    """Return whether this process has called `shardwise.init`."""
    return _current is not None


def start_timeline(path: str | os.PathLike[str]) -> None:
    """Start recording a timeline to `path`, in Chrome's trace JSON format.

    Only the ranks that call this function are recorded. The ranks of a host write to the same file,
    which can be opened at any time. If a recording to another file is running, it is stopped first.
    An existing file is continued if it is from this run, and replaced if it is from an earlier run.

    Args:
        path: File to write, such as "timeline.json".

    Raises:
        ConfigError: The file cannot be written, or the run has elastic islands.

    Example:
        sw.start_timeline("timeline.json")
        train(steps=20)
        sw.stop_timeline()
    """
    world = current()
    if world.collectives.has_changing_ranks:
        raise ConfigError(
            f"--timeline {path} cannot be combined with --elastic-islands: an island that rejoins "
            "would overwrite the file. Remove one of the two."
        )
    timeline_control.start(Path(path), world.collectives.status_server)
    if world.is_main and not world.settings.quiet:
        line = timeline_control.where(Path(path), world.collectives.status_server)
        print(f"shardwise: {line}", file=sys.stderr, flush=True)


def stop_timeline() -> None:
    """Stop recording the timeline and complete its file. Does nothing if recording is off."""
    timeline_control.stop()


def set_current(world: World) -> None:
    """Make `world` the world of this process, until the process exits or `leave` is called."""
    global _current
    exit_handlers.register(leave)
    _current = world


def refuse_second() -> None:
    """Raise UsageError if this process already has a world."""
    if _current is not None:
        raise UsageError("shardwise.init was called twice; call it once, at the top of the script.")


def leave() -> None:
    """Leave the run and close its world. Called at process exit, and by tests that join again."""
    global _current
    world, _current = _current, None
    timeline_control.stop()
    if world is not None:
        exit_handlers.unregister(leave)
        world.close()


def count_groups(settings: config.Settings, group: Collectives) -> int:
    """Return the number of islands that the ranks of `group` form.

    Collective with `--islands host`. Raises ConfigError if the hosts cannot form islands.
    """
    if isinstance(settings.islands, int):
        return settings.islands
    # Prefer the machine's key, because containers may have equal host names.
    hosts = ranks_by_host(group.gather_plain(host_key() or socket.gethostname()))
    # An island must consist of adjacent ranks (see mesh.py).
    in_a_row = all(ranks[-1] - ranks[0] == len(ranks) - 1 for ranks in hosts)
    if len({len(ranks) for ranks in hosts}) > 1 or not in_a_row:
        counts = ", ".join(str(len(ranks)) for ranks in hosts)
        raise ConfigError(
            f"--islands host needs the same number of workers on every host, numbered host by "
            f"host; these hosts have {counts}{'' if in_a_row else ', and their numbers alternate'}"
            ". Start equal numbers host by host (-H a:4,b:4), or give a number: --islands N."
        )
    return len(hosts)
