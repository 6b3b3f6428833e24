"""Joins the ranks of a run: `shardwise.init` finds out who this process is and makes its World.

settings ─▶ identity (launch/) ─▶ device ─▶ transport (collectives/) ─▶ World ─▶ equal seeds
"""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from typing import Any

import torch

from shardwise import comm as collectives
from shardwise import config
from shardwise.errors import ConfigError, LaunchError, UsageError
from shardwise.layout.sum_tree import MicroShards
from shardwise.net import error_file, island_place
from shardwise.net.identity import Identity
from shardwise.net.launchers import detection as launcher_detection
from shardwise.net.launchers import signs
from shardwise.net.progress import ProgressWriter
from shardwise.tiers import host_memory
from shardwise.watch import process_status
from shardwise.watch.watchdog import Watchdog
from shardwise.world import randomness
from shardwise.world.loop_checks import StepsWithoutEngine
from shardwise.world.mesh import Mesh
from shardwise.world.randomness import GeneratorStates
from shardwise.world.step_log import StepLog
from shardwise.world.world import World, refuse_second, set_current, start_timeline


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
    # As Python's own check of a process that is spawned: it is importing the script again.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "sw.init ran in a process that the script itself has spawned, such as a DataLoader "
            "worker with multiprocessing_context='spawn': a spawned process imports the script "
            'first. Put the training below `if __name__ == "__main__":`.'
        )
    error_file.watch_exceptions()
    found = config.sources(os.environ, settings)
    idle = config.idle(found, config.resolve(found)[0], config.OF_A_RUN)
    made = enter(seed, settings)
    for line in idle:
        made.say_once(line)
    return made


def enter(
    seed: int | None, settings: dict[str, Any], on_meeting: collectives.OnMeeting | None = None
) -> World:
    """Do what `init` does; `on_meeting` is for `collectives.connect`."""
    refuse_second()
    given = dict(settings) | ({"seed": seed} if seed is not None else {})
    error_file.watch_exceptions()
    chosen, _ = config.resolve(config.sources(os.environ, given))
    identity = launcher_detection.identify()
    # The device is chosen by the local rank, so ranks without one meet first.
    identity = collectives.place(identity, chosen.timeout, chosen.rendezvous)
    try:
        device = _device(identity, chosen.device, sharing=chosen.transport == "gloo")
    except LaunchError as error:
        collectives.check_all(identity, str(error))
        raise
    collectives.check_all(identity, "")
    if device.type == "cpu":
        host_memory.keep(os.environ)
    group = _joined(identity, device, chosen, on_meeting)
    made = World(identity, group, device, ProgressWriter(os.environ), given)
    _configure(made, given)
    if identity.launcher == "torchrun" and (line := collectives.exposed()) and not chosen.quiet:
        made.say_once(line)
    # SHARDWISE_ALONE stands in `variables`.
    is_alone = identity.launcher == "python" and not identity.variables
    if is_alone and not chosen.quiet and (job := signs.in_job(os.environ)):
        made.say_once(
            f"one process in a job with several slots ({job}): start its ranks with shardwise run, "
            "or with the job's own srun or mpiexec (docs/launching.md)."
        )
    # All that follows on all ranks alike comes after the seeds: it may draw.
    _begin_alike(made, given)
    process_status.show_on_signal()
    if made.size > 1:
        made.without_engine = StepsWithoutEngine(made.size, made.say_once)
        made.watchdog = Watchdog(group.status_server, chosen.warn_after, chosen.timeout)
    set_current(made)
    if chosen.timeline is not None:
        start_timeline(chosen.timeline)
    return made


def _joined(
    identity: Identity,
    device: torch.device,
    chosen: config.Settings,
    on_meeting: collectives.OnMeeting | None,
) -> collectives.Collectives:
    """Join the other ranks; those of an elastic island, and over the launcher all islands."""
    how = device, chosen.timeout, chosen.transport, chosen.rendezvous, on_meeting
    place = island_place.read(os.environ)
    if place is None:
        return collectives.connect(identity, *how)
    if place.count != chosen.islands:
        raise ConfigError(
            f"shardwise run --elastic-islands was told of {place.count} islands, and here they are "
            f"{chosen.islands}: give --islands there, and nothing else that overrides it."
        )
    island = range(place.first, place.first + place.size)
    host = identity.rank - identity.local_rank
    here = island_place.ranks_here(island, host, identity.local_size)
    alone = replace(
        identity,
        rank=island.index(identity.rank),
        size=place.size,
        local_rank=here.index(identity.rank),
        local_size=len(here),
    )
    of_run = collectives.GroupRanks(tuple(island), identity.size, place.first)
    group = collectives.connect(alone, *how, of_run=of_run)
    link = collectives.IslandLink(place, identity.rank, chosen.timeout, chosen.warn_after)
    return collectives.ElasticRun(group, link)


def divide(world: World, axes: dict[str, int]) -> None:
    """Let replicas of a run that has begun be of several ranks: `axes` are `tensor` and `pipeline`,
    as keywords of a script, which flags override. Nothing to do where they are so already.

    For scripts that say so in the model, after they have joined the run. Generators are seeded from
    the first step on then, as by `shardwise.init`; Loaders that are there give other shares in
    their next loop. Collective. Raises ConfigError for a mesh that cannot be, UsageError on all
    ranks inside a loop of one over a Loader, which gives ranks their shares already.
    """
    mesh = mesh_after(world, axes)
    if mesh == world.mesh:
        return
    if world.any(world.current_batch.in_loop()):
        raise UsageError(
            f"{mesh.in_words()} comes too late: a loop over a Loader has begun with "
            f"{world.mesh.in_words()}. Say it before, or as flags: --tensor, --pipeline."
        )
    world.add_keywords(axes | _IN_PARTS)
    world.cut(mesh)
    world.step_log.counts = world.counts


_IN_PARTS = {"reseed": True}
"""Keywords without which replicas cannot be of several ranks."""


def mesh_after(world: World, axes: dict[str, int]) -> Mesh:
    """The mesh that `divide` makes of `axes`, where flags and other sources may override them.

    Raises ConfigError for one that cannot be.
    """
    settings = config.load(world.keywords | axes | _IN_PARTS)[0]
    return _mesh(settings, world.size, world.island_count)


def _configure(made: World, given: dict[str, Any]) -> None:
    """Settle the settings of `made` with all ranks, and what follows from them. Collective."""
    made.settings = settings = made.settle(**given)
    config.check_islands(settings)
    made.cut(_mesh(settings, made.size, _island_count(settings, made.collectives)))
    folder = None if settings.record is None else Path(settings.record)
    made.step_log = StepLog(folder, made.rank, settings.stop_after, counts=made.counts)
    _share_cores(made)
    if settings.exact is not None:
        MicroShards(settings.exact, made.size, made.rank)  # refuses what cannot be
        randomness.fix_arithmetic(made.device)


def _begin_alike(made: World, keywords: dict[str, Any]) -> None:
    """Put the generators of all ranks where those of one process are."""
    chosen, source = config.winning(config.sources(os.environ, keywords)).get("seed", (None, ""))
    group = made.collectives
    made.seed = group.gather_plain(torch.initial_seed() if chosen is None else chosen)[0]
    made.seed_source = source or "torch.initial_seed()"
    if chosen is not None:
        randomness.seed_everything(made.seed)
    elif made.size > 1 and made.settings.reseed:
        is_first = group.rank == 0
        states = GeneratorStates.now(made.device).plain() if is_first else None
        states_of_main = group.gather_plain(states)[0]
        if not is_first:
            GeneratorStates.of_plain(states_of_main).restore(made.device)


def _island_count(settings: config.Settings, group: collectives.Collectives) -> int:
    """How many islands the ranks of `group` make. Collective where that is one per host.

    Raises ConfigError where hosts are no islands.
    """
    if isinstance(settings.islands, int):
        return settings.islands
    hosts = collectives.ranks_by_host(group.gather_plain(collectives.host_key() or gethostname()))
    in_a_row = all(ranks[-1] - ranks[0] == len(ranks) - 1 for ranks in hosts)
    if len({len(ranks) for ranks in hosts}) > 1 or not in_a_row:
        counts = ", ".join(str(len(ranks)) for ranks in hosts)
        raise ConfigError(
            f"--islands host needs as many workers on every host, numbered host by host; these "
            f"have {counts}{'' if in_a_row else ', and their numbers alternate'}. Start equal "
            "numbers host by host (-H a:4,b:4), or write --islands with a number."
        )
    return len(hosts)


def _mesh(settings: config.Settings, size: int, islands: int) -> Mesh:
    """The mesh of a run of `size` ranks. Raises ConfigError for one that cannot be."""
    if settings.exact is not None and islands > 1:
        raise ConfigError(
            f"--exact {settings.exact} and --islands {settings.islands} cannot be had together: "
            "what islands compute depends on how many there are. Leave one of them out."
        )
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
    return Mesh(size, settings.tensor, settings.pipeline, islands)


def _share_cores(made: World) -> None:
    """Let ranks that may run on the same cores divide them; mpirun and srun do not say how.

    Each would else start a thread per core, and all would wait for each other.
    """
    if made.launcher in launcher_detection.SETS_THREADS:
        return
    if "OMP_NUM_THREADS" in os.environ or not hasattr(os, "sched_getaffinity"):
        return
    mine = [made.host, sorted(os.sched_getaffinity(0))]
    alike = made.collectives.gather_plain(mine).count(mine)
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
