"""init, shutdown, rank, size, join and their like: what Horovod calls its basics."""

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
    """Join the other ranks, whoever launched them; once more does nothing.

    `process_sets` are made at once; "dynamic" is as Horovod has it, and always so here. Random
    numbers are left alone, unlike by `shardwise.init`; where that was called, its world is used.
    Raises BadCall for a communicator that is not all ranks, LaunchError where they do not meet.
    """
    if context.is_initialized():
        return
    world = _world()
    world.expect_no_engine()
    if comm is not None and list(comm) != list(range(world.size)):
        raise BadCall(
            f"hvd.init({comm!r}): start the ranks that you want, or use hvd.ProcessSet for some of "
            "them; mpi4py's communicators are not used."
        )
    if not world.engines:
        _warn_of_idle_settings(world)
    context.enter(_make_context(world))
    exit_handlers.register(shutdown)
    for members in process_sets if isinstance(process_sets, Sequence) else ():
        if not isinstance(members, str):
            add_process_set(members)


def _make_context(world: World) -> Context:
    """Start the communication thread. Collective."""
    hosts = _hosts(world)
    timeout, warn_after = world.settings.timeout, world.settings.warn_after
    group = collectives.for_thread(world.collectives, timeout)
    found = _connect(world, timeout) if world.size > 1 else {}
    thread = BackgroundThread(group, found, world.device, timeout, warn_after)
    return Context(world, hosts, thread)


def _hosts(world: World) -> list[list[int]]:
    """The ranks of each host, in the order of their first."""
    mine = world.host, collectives.host_key()
    names = [tuple(each) for each in world.collectives.gather_plain(mine)]
    return [[r for r, n in enumerate(names) if n == name] for name in dict.fromkeys(names)]


def _connect(world: World, timeout: float) -> dict[int, links.Link]:
    """Connect every rank to rank 0; the links of this rank, by rank. Collective."""
    group, secret = world.collectives, world.collectives.status_server.secret
    if world.rank != 0:
        address, port = group.gather_plain(None)[0]
        return {0: links.connect(address, port, secret, world.rank, timeout)}
    address = collectives.address_of(launcher_detection.identify())
    with links.listen(address) as listener:
        group.gather_plain((address, listener.getsockname()[1]))
        return links.accept(listener, secret, world.size, timeout)


def _world() -> World:
    """The world that the script made, or a new one that leaves random numbers as they are."""
    try:
        return current_world()
    except UsageError:
        states = random.getstate(), np.random.get_state()
        device = torch.accelerator.current_accelerator(check_available=True)
        kind = "cuda" if device is None else device.type  # of none, where there is none
        count = torch.accelerator.device_count() if kind != "mps" else 0  # fork_rng knows it not
        with torch.random.fork_rng(devices=range(count), device_type=kind):
            world = init_world()
        random.setstate(states[0])
        np.random.set_state(states[1])
        return world


def _warn_of_idle_settings(world: World) -> None:
    """Name settings from flags, environment or files that only `sw.Engine` acts upon."""
    line = script_checks.idle_settings_line(config.winning(config.sources(os.environ, {})))
    if line:
        world.say_once(line)


def shutdown() -> None:
    """Leave the run: operations in flight fail, here and where they wait for this rank. The
    communication thread has ended when this returns."""
    exit_handlers.unregister(shutdown)
    context.leave()


def size() -> int:
    """The number of ranks."""
    current().asked_size = True
    return current().world.size


def rank() -> int:
    """This rank, from 0 on."""
    return current().world.rank


def local_size() -> int:
    """The number of ranks on this host."""
    return current().world.local_size


def local_rank() -> int:
    """This rank among those of its host."""
    return current().world.local_rank


def cross_size() -> int:
    """The number of hosts that have a rank of this local rank."""
    return len(_ranks_of_this_local_rank())


def cross_rank() -> int:
    """The index of this host among those that `cross_size` counts."""
    return _ranks_of_this_local_rank().index(current().world.rank)


def _ranks_of_this_local_rank() -> list[int]:
    place = current().world.local_rank
    return [ranks[place] for ranks in current().hosts if len(ranks) > place]


def is_homogeneous() -> bool:
    """Whether all hosts have as many ranks."""
    return len({len(ranks) for ranks in current().hosts}) == 1


def mpi_threads_supported() -> bool:
    """Whether several threads may use MPI: yes, since this package uses none of it."""
    current()
    return True


def mpi_enabled() -> bool:
    """Whether ranks talk over MPI: never, also where mpirun has started them."""
    return False


def mpi_built() -> bool:
    """Whether ranks can talk over MPI: never."""
    return False


def gloo_enabled() -> bool:
    """Whether ranks talk over Gloo, or memory that they share; else over NCCL."""
    return current().world.collectives.name != "nccl"


def gloo_built() -> bool:
    """Whether this PyTorch has Gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """The version of this PyTorch's NCCL, such as 22703; 0 without."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return 0
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return int(version[0] * 10000 + version[1] * 100 + version[2])


def cuda_built() -> bool:
    """Whether this PyTorch knows CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this PyTorch knows ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """Whether there is IBM's DDL: never."""
    return False


def ccl_built() -> bool:
    """Whether there is Intel's oneCCL: never."""
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
    """Make `import horovod.torch` and its submodules give this package, in the whole process.
    A second call does nothing.

    Other parts of Horovod are not found then, such as `horovod.tensorflow`. Raises BadCall where
    the real Horovod was imported before: code that has it would go on with it.
    """
    there = sys.modules.get("horovod")
    if isinstance(there, _StandInPackage):
        return
    if there is not None:
        raise BadCall(
            f"Horovod itself was imported already, from {getattr(there, '__file__', None)}: call "
            "install_as_horovod() before anything imports it."
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
    """A package without files, whose attributes are set from outside."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "Shardwise, in the place of Horovod.")
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record what all ranks do into `file_path` from now on, as Chrome trace JSON.

    To be called by every rank. Raises ConfigError where it cannot be written. Operations are not
    begun in cycles here, so there are none to mark: asked for, that is said.
    """
    if mark_cycles:
        warnings.warn(
            "hvd.start_timeline: mark_cycles marks nothing. An operation begins as soon as all "
            "ranks have asked for it, not in cycles.",
            stacklevel=2,
        )
    start(file_path)


def stop_timeline() -> None:
    """Stop recording, and write the rest of the timeline."""
    stop()


def join(device: int = -1) -> int:
    """Report that this rank has no more data, and wait for the others. Returns the rank that joined
    last.

    Until then this rank takes part in every allreduce of all ranks, with zeros. `device` is unused
    (Horovod's signature has it): zeros are made on the device of the others' tensors.
    """
    del device
    context = current()
    last = wait(submit(JOIN, [], JOIN, global_process_set))
    for counted in [name for name in context.counters if "noname" in name]:
        del context.counters[counted]  # ranks have made different numbers of calls without a name
    return int(last)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of `process_set` has called this."""
    wait(submit("barrier", [], None, process_set))
