"""Joins the ranks of a run: `shardwise.init` identifies this process and creates its `World`.

settings ─▶ identity (net/) ─▶ device ─▶ transport (comm/) ─▶ World ─▶ same seed on all ranks
"""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from shardwise import comm as collectives
from shardwise import config
from shardwise.errors import LaunchError, UsageError
from shardwise.layout.sum_tree import MicroShards
from shardwise.net import environment, error_file
from shardwise.net.identity import Identity
from shardwise.net.launchers import detection as launcher_detection
from shardwise.net.launchers import signs
from shardwise.net.progress import ProgressWriter
from shardwise.tiers import host_memory
from shardwise.watch import process_status
from shardwise.watch.watchdog import Watchdog
from shardwise.world import randomness, survival
from shardwise.world.generator_states import GeneratorStates
from shardwise.world.loop_checks import StepsWithoutEngine
from shardwise.world.mesh import Mesh, mesh_of
from shardwise.world.step_log import StepLog
from shardwise.world.world import World, count_groups, refuse_second, set_current, start_timeline


def init(seed: int | None = None, **settings: Any) -> World:
    """Join the other ranks of the run, started by any launcher, and return the `World`.

    Without a launcher, the world has one rank. Call it once, at the top of the script.

    Args:
        seed: Seeds torch, numpy and random on every rank. Until the first batch or the first
            forward pass with gradients, every rank then draws the same numbers as a single process
            with this seed. Default: every rank copies the state of rank 0's generators, and the
            seed is rank 0's `torch.initial_seed()`.
        **settings: Keywords of `shardwise.config.Settings`. The TOML file, the environment and the
            flags override them. With `reseed=False`, neither this call nor any step changes the
            generators, for scripts that seed and save them themselves.

    Returns:
        The `World`: rank, size, device, and collectives across all ranks.

    Raises:
        ConfigError: A setting is wrong.
        LaunchError: The other ranks cannot be reached.
        UsageError: `init` was called before, or is called in a spawned process.

    Example:
        >>> import shardwise as sw
        >>> world = sw.init(seed=0)
        >>> world.rank, world.size
        (0, 1)
    """
    # This is Python's own check for a spawned process that is importing the script again.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "sw.init ran in a process that the script itself has spawned, such as a DataLoader "
            "worker with multiprocessing_context='spawn': a spawned process imports the script "
            'first. Put the training below `if __name__ == "__main__":`.'
        )
    error_file.watch_exceptions()
    sources = config.sources(os.environ, settings)
    idle = config.idle(sources, config.resolve(sources)[0], config.OF_A_RUN)
    world = enter(seed, settings)
    for line in idle:
        world.say_once(line)
    return world


def enter(
    seed: int | None, settings: dict[str, Any], on_meeting: collectives.OnMeeting | None = None
) -> World:
    """Join the run as `init` does, and pass `on_meeting` to `collectives.connect`."""
    refuse_second()
    keywords = dict(settings) | ({"seed": seed} if seed is not None else {})
    error_file.watch_exceptions()
    chosen, _ = config.resolve(config.sources(os.environ, keywords))
    identity = launcher_detection.identify()
    # The local rank selects the GPU. If the launcher does not set it, ranks must connect first.
    identity = collectives.place(identity, chosen.timeout, chosen.rendezvous)
    try:
        device = _device(identity, chosen.device, sharing=chosen.transport == "gloo")
    except LaunchError as error:
        # Tell the other ranks, which would otherwise wait for this one until the timeout.
        collectives.check_all(identity, str(error))
        raise
    # Either all ranks have a device, or all raise the error of the rank that has none.
    collectives.check_all(identity, "")
    if device.type == "cpu":
        host_memory.keep(os.environ)
    survival.check(chosen, identity, device, os.environ)
    group = _join(identity, device, chosen, on_meeting)
    if environment.SPARE_VARIABLE in os.environ:  # until it joins the others
        identity = replace(identity, rank=0, size=1, local_rank=0, local_size=1)
    world = World(identity, group, device, ProgressWriter(os.environ), keywords)
    _configure(world, keywords)
    if identity.launcher == "torchrun" and (line := collectives.exposed()) and not chosen.quiet:
        world.say_once(line)
    # With SHARDWISE_ALONE `variables` is not empty: the user wants a single process, so don't warn.
    is_alone = identity.launcher == "python" and not identity.variables
    if is_alone and not chosen.quiet and (job := signs.in_job(os.environ)):
        world.say_once(
            f"one process in a job with several slots ({job}): start its ranks with shardwise run, "
            "or with the job's own srun or mpiexec (docs/launching.md)."
        )
    # Seed after everything that could draw random numbers: the script continues from these seeds.
    _seed_ranks(world, keywords)
    process_status.show_on_signal()
    if world.size > 1 or world.survival is not None:
        world.without_engine = StepsWithoutEngine(world.size, world.say_once)
        world.watchdog = Watchdog(group.status_server, chosen.warn_after, chosen.timeout)
    set_current(world)
    if chosen.timeline is not None:
        start_timeline(chosen.timeline)
    return world


def _join(
    identity: Identity,
    device: torch.device,
    chosen: config.Settings,
    on_meeting: collectives.OnMeeting | None,
) -> collectives.Collectives:
    """Join the other ranks with `collectives.connect`, or with the launcher's own function."""
    if (named := os.environ.get(environment.JOIN_VARIABLE)) is not None:
        # Elastic islands name their transport by a string, because it is in a higher package.
        module, _, name = named.partition(":")
        join = getattr(import_module(module), name)
        joined: collectives.Collectives = join(identity, device, chosen, on_meeting)
        return joined
    survives = partial(
        collectives.SurvivorGroup,
        timeout=chosen.timeout,
        most=chosen.survive,
        spares=chosen.spares,
    )
    if environment.SPARE_VARIABLE in os.environ:
        alone = collectives.wait_alone(identity)
        return survives(alone, number=identity.rank, run_size=identity.size)
    group = collectives.connect(
        identity,
        device,
        chosen.timeout,
        chosen.transport,
        chosen.rendezvous,
        on_meeting,
        survives=bool(chosen.survive),
    )
    return survives(group) if chosen.survive and group.size > 1 else group


def divide(world: World, axes: dict[str, int]) -> None:
    """Change the mesh of a running job to these `axes`: `tensor` and `pipeline`.

    For scripts that define the axes with the model, after joining the run. Flags override `axes`,
    just as they override the script's keywords. Does nothing if the mesh stays the same. From then
    on, generators are reseeded at each step, as after `shardwise.init`, and existing Loaders use
    the new shares from their next loop. Collective.

    Raises ConfigError if the mesh is impossible. Raises UsageError on all ranks if any rank is
    inside a loop over a Loader, because the loop already uses the shares of the previous mesh.
    """
    mesh = mesh_after(world, axes)
    if mesh == world.mesh:
        return
    # Raise on all ranks if any rank is in a loop: some may already have left theirs.
    if world.any(world.current_batch.in_loop()):
        raise UsageError(
            f"The mesh cannot change to {mesh.in_words()} now: a loop over a Loader has begun with "
            f"{world.mesh.in_words()}. Set it before the loop, or by flags: --tensor, --pipeline."
        )
    world.add_keywords(axes | _IN_PARTS)
    world.cut(mesh)
    _tell_divisions(world)
    world.step_log.counts = world.counts


_IN_PARTS = {"reseed": True}
"""Settings that are required if a replica has several ranks."""


def mesh_after(world: World, axes: dict[str, int]) -> Mesh:
    """Return the mesh that `divide` would create from `axes`, which flags may override.

    Raises ConfigError if the mesh is impossible.
    """
    settings = config.load(world.keywords | axes | _IN_PARTS)[0]
    return world.mesh.changed(settings)


def _configure(world: World, keywords: dict[str, Any]) -> None:
    """Resolve the settings of `world`, and apply the mesh, log, thread and exact-mode settings.

    Collective.
    """
    world.settings = settings = world.settle(**keywords)
    config.check_contradictions(settings)
    world.cut(mesh_of(settings, world.size, count_groups(settings, world.collectives)))
    # A spare that has not joined the other ranks has no steps to log.
    is_spare = world.survival is not None and world.survival.group.is_waiting
    folder = None if settings.record is None or is_spare else Path(settings.record)
    world.step_log = StepLog(folder, world.rank, settings.stop_after, counts=world.counts)
    _share_cores(world)
    if settings.exact is not None:
        MicroShards(settings.exact, world.size, world.rank)  # raises if they do not divide
        randomness.fix_arithmetic(world.device)
    _tell_divisions(world)


def _tell_divisions(world: World) -> None:
    if world.survival is not None:
        world.survival.group.divisions = survival.divisions_of(world.settings, world.mesh)


def _seed_ranks(world: World, keywords: dict[str, Any]) -> None:
    """Give every rank the RNG state that a single process would have."""
    chosen, source = config.winning_values(config.sources(os.environ, keywords)).get(
        "seed", (None, "")
    )
    group = world.collectives
    # Use rank 0's seed, even if ranks pass different ones.
    world.seed = group.gather_plain(torch.initial_seed() if chosen is None else chosen)[0]
    world.seed_source = source or "torch.initial_seed()"
    if chosen is not None:
        randomness.seed_everything(world.seed)
    # Without a seed, the script may already have drawn numbers before `init`: continue from there.
    elif world.size > 1 and world.settings.reseed:
        is_first = group.rank == 0
        states = GeneratorStates.now(world.device).plain() if is_first else None
        states_of_main = group.gather_plain(states)[0]
        if not is_first:
            GeneratorStates.of_plain(states_of_main).restore(world.device)


def _share_cores(world: World) -> None:
    """Divide the host's cores among its ranks, under mpirun and srun."""
    # By default torch starts one thread per core in every rank, so the ranks slow each other down.
    if world.launcher in launcher_detection.SETS_THREADS:
        return
    if "OMP_NUM_THREADS" in os.environ or not hasattr(os, "sched_getaffinity"):
        return
    mine = [world.host, sorted(os.sched_getaffinity(0))]
    # Count only ranks with the same set of cores: ranks bound to disjoint cores need no division.
    sharing = world.collectives.gather_plain(mine).count(mine)
    torch.set_num_threads(max(1, len(mine[1]) // sharing))


def _device(identity: Identity, wanted: str, *, sharing: bool) -> torch.device:
    """Return this rank's device. If `sharing` is true, several ranks may use the same GPU."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and gpus == 0):
        return torch.device("cpu")
    # NCCL does not allow two ranks on one GPU.
    if gpus < (1 if sharing or identity.own_gpus else identity.local_size):
        shared = "let them share GPUs with --transport gloo, " if gpus else ""
        raise LaunchError(
            f"{identity.local_size} ranks run on this host, but only {gpus} GPU(s) are visible. "
            f"Start {max(gpus, 1)} rank(s) here, {shared}or train on the CPU with --device cpu."
        )
    # Use the remainder, for launchers that show each rank only its own GPU, and for shared GPUs.
    device = torch.device("cuda", identity.local_rank % gpus)
    torch.cuda.set_device(device)
    return device
