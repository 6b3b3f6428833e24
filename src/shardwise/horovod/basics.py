"""Implements Horovod's basic functions, such as init, shutdown, rank, size and join."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwise import comm as collectives
from shardwise import config
from shardwise.errors import BadCall, UsageError
from shardwise.horovod import context, links, script_checks
from shardwise.horovod.background import BackgroundThread
from shardwise.horovod.context import Context, current
from shardwise.horovod.coordinator import JOIN
from shardwise.horovod.operations import submit, wait
from shardwise.horovod.process_sets import ProcessSet, add_process_set, global_process_set
from shardwise.net import rpc
from shardwise.net.launchers import detection as launcher_detection
from shardwise.world import exit_handlers
from shardwise.world.initialize import init as init_world
from shardwise.world.world import World
from shardwise.world.world import current as current_world
from shardwise.world.world import start_timeline as start
from shardwise.world.world import stop_timeline as stop


def init(
    comm: Sequence[int] | None = None, process_sets: Sequence[Any] | str | None = None
) -> None:
    """Join the run, which any launcher may have started. A second call is a no-op.

    Unlike `shardwise.init`, it does not seed random number generators. If `shardwise.init` has
    already been called, its world is used.

    Args:
        comm: The list of all ranks in order, or None.
        process_sets: Sets of ranks to add. "dynamic" has no effect, because process sets are always
            dynamic.

    Raises:
        BadCall: If `comm` is not the list of all ranks.
        LaunchError: If a rank is missing.

    Example:
        ```python
        import shardwise.horovod as hvd

        hvd.init()
        print(hvd.rank(), "of", hvd.size())
        ```
    """
    if context.is_initialized():
        return
    world = _world()
    world.expect_no_engine()
    if comm is not None and list(comm) != list(range(world.size)):
        raise BadCall(
            f"hvd.init({comm!r}) is not the list of all {world.size} ranks. Start only the ranks "
            "that you want, or use hvd.ProcessSet for some of them. Communicators of mpi4py are "
            "not supported."
        )
    if not world.engines:
        given = config.winning_values(config.sources(os.environ, {}))
        if line := script_checks.idle_settings_line(given):
            world.say_once(line)
    context.enter(_make_context(world))
    exit_handlers.register(shutdown)
    for members in process_sets if isinstance(process_sets, Sequence) else ():
        if not isinstance(members, str):
            add_process_set(members)


def _make_context(world: World) -> Context:
    """Start the communication thread, and return this rank's context. Collective."""
    mine = world.host, collectives.host_key()
    names = [tuple(each) for each in world.collectives.gather_plain(mine)]
    hosts = [[r for r, n in enumerate(names) if n == name] for name in dict.fromkeys(names)]
    timeout, warn_after = world.settings.timeout, world.settings.warn_after
    group = collectives.for_thread(world.collectives, timeout)
    found = _connect(world, timeout) if world.size > 1 else {}
    thread = BackgroundThread(group, found, world.device, timeout, warn_after)
    return Context(world, hosts, thread)


def _connect(world: World, timeout: float) -> dict[int, rpc.Link]:
    """Connect every rank to rank 0, and return this rank's links by rank. Collective."""
    group, secret = world.collectives, world.collectives.status_server.secret
    if world.rank != 0:
        address, port = group.gather_plain(None)[0]
        return {0: links.connect(address, port, secret, world.rank, timeout)}
    address = collectives.address_of(launcher_detection.identify())
    with rpc.listen(address) as listener:
        group.gather_plain((address, listener.getsockname()[1]))
        return links.accept(listener, secret, world.size, timeout)


def _world() -> World:
    """Return the script's world, or create one without seeding random number generators."""
    try:
        return current_world()
    except UsageError:
        # Horovod scripts seed their own generators, possibly before hvd.init.
        states = random.getstate(), np.random.get_state()
        device = torch.accelerator.current_accelerator(check_available=True)
        kind = "cuda" if device is None else device.type
        count = (
            torch.accelerator.device_count() if kind != "mps" else 0
        )  # fork_rng does not support mps
        with torch.random.fork_rng(devices=range(count), device_type=kind):
            world = init_world()
        random.setstate(states[0])
        np.random.set_state(states[1])
        return world


def shutdown() -> None:
    """Leave the run, and wait for the communication thread to stop.

    In-flight operations fail, both on this rank and on ranks that wait for it.
    """
    exit_handlers.unregister(shutdown)
    context.leave()


def size() -> int:
    """Return the number of ranks."""
    current().asked_size = True
    return current().world.size


def rank() -> int:
    """Return this process's rank."""
    return current().world.rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return current().world.local_size


def local_rank() -> int:
    """Return this process's rank on its host."""
    return current().world.local_rank


def cross_size() -> int:
    """Return the number of hosts that have a rank with this rank's local rank."""
    return len(_ranks_of_this_local_rank())


def cross_rank() -> int:
    """Return this host's index among the hosts that `cross_size` counts."""
    return _ranks_of_this_local_rank().index(current().world.rank)


def _ranks_of_this_local_rank() -> list[int]:
    place = current().world.local_rank
    return [ranks[place] for ranks in current().hosts if len(ranks) > place]


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks."""
    return len({len(ranks) for ranks in current().hosts}) == 1


def mpi_threads_supported() -> bool:
    """Return True, because several threads may communicate. MPI is not used."""
    current()
    return True


def mpi_enabled() -> bool:
    """Return False, because ranks do not communicate over MPI, even if mpirun started them."""
    return False


def mpi_built() -> bool:
    """Return False, because MPI is not used."""
    return False


def gloo_enabled() -> bool:
    """Return whether ranks communicate over Gloo or shared memory rather than NCCL."""
    return current().world.collectives.name != "nccl"


def gloo_built() -> bool:
    """Return whether this PyTorch was built with Gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """Return the version of this PyTorch's NCCL, such as 22703, or 0 without NCCL."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return 0
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return int(version[0] * 10000 + version[1] * 100 + version[2])


def cuda_built() -> bool:
    """Return whether this PyTorch supports CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether this PyTorch supports ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """Return False, because IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """Return False, because Intel's oneCCL is not used."""
    return False


_STANDS_FOR = {
    "horovod.torch": "shardwise.horovod",
    "horovod.torch.compression": "shardwise.horovod.compression",
    "horovod.torch.elastic": "shardwise.horovod.elastic",
    "horovod.torch.elastic.sampler": "shardwise.horovod.elastic",
    "horovod.torch.elastic.state": "shardwise.horovod.elastic",
    "horovod.torch.functions": "shardwise.horovod.functions",
    "horovod.torch.mpi_ops": "shardwise.horovod.mpi_ops",
    "horovod.torch.optimizer": "shardwise.horovod.optimizer",
    "horovod.torch.sync_batch_norm": "shardwise.horovod.sync_batch_norm",
    "horovod.common.exceptions": "shardwise.errors",
}


def install_as_horovod() -> None:
    """Make `import horovod.torch` and its submodules import this package, in the entire process.

    A second call is a no-op. Other parts of Horovod, such as `horovod.tensorflow`, cannot be
    imported afterwards.

    Raises:
        BadCall: If the real Horovod has already been imported. The code that imported it would
            continue to use it.

    Example:
        ```python
        import shardwise.horovod

        shardwise.horovod.install_as_horovod()
        import horovod.torch as hvd
        ```
    """
    there = sys.modules.get("horovod")
    if isinstance(there, _StandInPackage):
        return
    if there is not None:
        raise BadCall(
            f"The real Horovod was imported before, from {getattr(there, '__file__', None)}. Call "
            "install_as_horovod() before any import of Horovod."
        )
    top, common = _StandInPackage("horovod"), _StandInPackage("horovod.common")
    ours = {name: import_module(target) for name, target in _STANDS_FOR.items()}
    top.__dict__.update(
        torch=ours["horovod.torch"],
        common=common,
        __version__=ours["horovod.torch"].__version__,
    )
    common.__dict__["exceptions"] = ours["horovod.common.exceptions"]
    sys.modules.update(ours | {"horovod": top, "horovod.common": common})


class _StandInPackage(ModuleType):
    """A package without files."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "Shardwise, in the place of Horovod.")
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Start recording a timeline of all ranks, in Chrome's trace format. Every rank must call it.

    Args:
        file_path: The file to write.
        mark_cycles: Only causes a warning, because operations do not run in cycles.

    Raises:
        ConfigError: If the file cannot be written.
    """
    if mark_cycles:
        warnings.warn(
            "hvd.start_timeline: mark_cycles has no effect. An operation begins when all ranks "
            "have requested it, not in cycles.",
            stacklevel=2,
        )
    start(file_path)


def stop_timeline() -> None:
    """Stop recording the timeline, and write the remaining events."""
    stop()


def join(device: int = -1) -> int:
    """Report that this rank has no more data, and wait until all ranks have called `join`.

    While it waits, this rank contributes zeros to every allreduce of all ranks.

    Args:
        device: Ignored. The zeros are on the device of the other ranks' tensors.

    Returns:
        The rank that joined last.

    Example:
        ```python
        for batch in loader:  # may be longer on some ranks
            train_on(batch)
        hvd.join()
        ```
    """
    del device
    context = current()
    last = wait(submit(JOIN, [], JOIN, global_process_set))
    # Ranks have made different numbers of calls without a name. Restart the counters at 0, so that
    # later calls get the same names on all ranks.
    for counted in [name for name in context.counters if "noname" in name]:
        del context.counters[counted]
    return int(last)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of `process_set` has called this function."""
    wait(submit("barrier", [], None, process_set))
