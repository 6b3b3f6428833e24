"""Transport for CUDA ranks with `--survive`: NCCL, which a lost rank does not block.

    tensors on the device    NCCL
    tensors on the host      Gloo; also all small vectors, such as those that confirm a step

A kernel of NCCL waits for a lost rank forever, and so does the host if it waits for the kernel. So
a thread looks for lost ranks, and then aborts all NCCL communicators of this process. Their kernels
end without a result, and waiting for them raises PeerLost.

Unlike in `Nccl`, `wait` blocks the host until the device has the result, because ranks may confirm
a step only once its sums have arrived.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.base import Collectives, Counts, Cuts, GroupRanks, Handle
from shardwise.comm.gloo import Gloo
from shardwise.comm.nccl import NOTED, Nccl, abort_communicators
from shardwise.comm.ordered_sums import PLAIN, Sum
from shardwise.comm.torch_backend import split_group, timeout_error
from shardwise.errors import CollectiveError, ConfigError, PeerLost
from shardwise.net import environment
from shardwise.watch.status_server import StatusServer

BACKENDS = "cpu:gloo,cuda:nccl"
"""The backends of torch's process groups, by device type."""

TICK = 0.1
"""Seconds between two checks for lost ranks."""

PAUSE = 0.0002
"""Seconds between two checks whether the device has finished a collective."""

VERDICT = 2.0
"""Seconds to wait for the reason of an error once the end of a process is certain."""


_OFF = (
    # torch's watchdog thread ends the process when a collective fails.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    # Both turn the first one on again, or have the same effect.
    "TORCH_NCCL_DESYNC_DEBUG",
    "TORCH_NCCL_BLOCKING_WAIT",
    # Before that, the watchdog asks all ranks to write reports, and sleeps for four times this
    # time (15 s by default) while it holds a lock that every collective needs.
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
    # Another thread ends the process if the watchdog makes no progress.
    "TORCH_NCCL_ENABLE_MONITORING",
)
"""Variables that must be 0, because this module handles the errors of NCCL."""

_ZERO = ("0", "n", "no", "f", "false")
"""What torch reads as 0, in lower case."""


def prepare() -> None:
    """Make torch leave it to this module to abort. Call this before a group is created.

    Raises ConfigError if the user has set a variable that prevents this.
    """
    bad = {
        name: os.environ[name] for name in _OFF if os.environ.get(name, "0").lower() not in _ZERO
    }
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        bad["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    for name, value in bad.items():
        raise ConfigError(
            f"{name}={value} cannot be combined with --survive on GPUs: after a loss, torch would "
            "end or block this worker. Remove the variable, or leave --survive out."
        )
    os.environ.update(dict.fromkeys(_OFF, "0"))


class Communicators:
    """The NCCL communicators of a group and its parts, which are aborted together.

    Args:
        server: This rank's status server.
        ranks: The ranks of the group, by their numbers in the run.
    """

    def __init__(self, server: StatusServer, ranks: Sequence[int]) -> None:
        self._server = server
        self._ranks = ranks
        self._groups: list[dist.ProcessGroup] = []
        self._lock = threading.Lock()
        self._aborted = threading.Event()
        self._failure: RuntimeError | None = None
        """The error of a communicator that could not be aborted."""
        self._closed = threading.Event()
        name = "shardwise-nccl-abort"
        threading.Thread(target=self._watch, name=name, daemon=True).start()

    @property
    def is_aborted(self) -> bool:
        return self._aborted.is_set()

    def lost(self) -> list[int]:
        """Return the ranks that have ended."""
        return [rank for rank in self._ranks if self._server.has_ended(rank)]

    def add(self, group: dist.ProcessGroup) -> None:
        """Abort the communicator of `group` with the others."""
        with self._lock:
            self._groups.append(group)

    def remove(self, group: dist.ProcessGroup) -> None:
        """Forget the communicator of a group that is closed."""
        with self._lock:
            self._groups.remove(group)

    def abort(self) -> None:
        """Abort all communicators. Kernels that wait for other ranks end.

        Raises CollectiveError if a communicator cannot be aborted.
        """
        with self._lock:
            if not self._aborted.is_set():
                # First, so that a wait that ends because of the abort sees it.
                self._aborted.set()
                try:
                    if self._groups:
                        abort_communicators(self._groups)
                except RuntimeError as error:
                    self._failure = error
        self.check()

    def check(self) -> None:
        """Raise CollectiveError if a communicator could not be aborted."""
        # Its kernels may wait forever, and so would everything that waits for the device.
        if self._failure is not None:
            first = str(self._failure).partition("\n")[0].rstrip(".")
            raise CollectiveError(
                f"Rank {self._server.rank} cannot continue without a lost rank, because NCCL did "
                f"not abort its work: {first}."
            ) from self._failure

    def wait_for_abort(self) -> bool:
        """Wait as long as it may take to learn of a lost rank. Return whether there is one."""
        lost_after = float(os.environ.get(environment.LOST_AFTER_VARIABLE, 0))
        return self._aborted.wait(lost_after + VERDICT)

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()

    def _watch(self) -> None:
        seen = 0
        while not self._closed.wait(TICK):
            abort = self._server.abort
            has_failed = abort is not None and abort.rank != self._server.rank
            seen = seen + 1 if has_failed or self.lost() else 0
            # Twice, because a rank that has ended normally may have taken part in a collective that
            # this rank's device is just completing.
            if seen > 1:
                with suppress(CollectiveError):  # `check` raises it in the thread that waits
                    self.abort()
                return


class AbortableNccl(Collectives):
    """Sends tensors on `device` over NCCL, and tensors on the host over Gloo.

    Args:
        rank: This rank's place in the group.
        group_ranks: Maps the group's ranks to ranks in the run.
        device: This rank's GPU.
        timeout: Limit for every wait.
        status_server: This rank's status server.
        group: torch's process group, which has both `BACKENDS`. By default, torch's default group.
        whole: The communicators of the group from which this one is split.
    """

    name = "nccl"
    in_one_order = True
    spoils_buffers = True

    def __init__(
        self,
        rank: int,
        group_ranks: GroupRanks,
        device: torch.device,
        timeout: timedelta,
        status_server: StatusServer,
        group: dist.ProcessGroup | None = None,
        whole: Communicators | None = None,
    ) -> None:
        size = len(group_ranks.ranks)
        super().__init__(rank, size, status_server)
        self.device = device
        self.host = Gloo(rank, size, group, group_ranks, timeout, status_server)
        self._nccl = Nccl(rank, size, device, group, status_server, group_ranks, timeout)
        self._group_ranks = group_ranks
        self._timeout = timeout
        self._is_whole = whole is None
        self._communicators = whole or Communicators(status_server, group_ranks.ranks)
        world = dist.group.WORLD if group is None else group
        assert world is not None
        self._torch_group: dist.ProcessGroup | None = world
        self._communicators.add(world)

    def connect(self) -> None:
        """Connect NCCL, which it does at the first collective of a group. Collective."""
        self.all_reduce(torch.zeros(1, device=self.device)).wait()

    # -- collectives ----------------------------------------------------------------------

    def all_reduce(self, buffer: Tensor, how: Sum = PLAIN) -> Handle:
        if self._is_on_host(buffer):
            return self.host.all_reduce(buffer, how)
        return self._launch(lambda: self._nccl.all_reduce(buffer, how))

    def reduce_scatter(
        self, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN, *, into: Tensor | None = None
    ) -> Handle:
        if self._is_on_host(buffer):
            return self.host.reduce_scatter(buffer, cuts, how, into=into)
        return self._launch(lambda: self._nccl.reduce_scatter(buffer, cuts, how, into=into))

    def all_gather(self, buffer: Tensor, cuts: Cuts) -> Handle:
        if self._is_on_host(buffer):
            return self.host.all_gather(buffer, cuts)
        return self._launch(lambda: self._nccl.all_gather(buffer, cuts))

    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        if self._is_on_host(buffer):
            return self.host.broadcast(buffer, source)
        return self._launch(lambda: self._nccl.broadcast(buffer, source))

    def all_to_all(self, sent: Tensor, counts: Counts, received: Tensor) -> Handle:
        if self._is_on_host(sent):
            return self.host.all_to_all(sent, counts, received)
        return self._launch(lambda: self._nccl.all_to_all(sent, counts, received))

    def gather_rows(self, row: Tensor) -> Tensor:
        return self.host.gather_rows(row.cpu()).to(row.device)

    def barrier(self) -> None:
        self.host.barrier()

    @property
    def small_device(self) -> torch.device:
        return self.host.small_device

    def _is_on_host(self, buffer: Tensor) -> bool:
        return buffer.device.type != self.device.type

    # -- waits ----------------------------------------------------------------------------

    def _launch(self, call: Callable[[], Handle]) -> Handle:
        with self._noticing():
            return _DeviceHandle(self, call())

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """Raise PeerLost before or after the block if a rank is lost, or the error of another."""
        self.status_server.refuse_after_failure()
        self._refuse_if_aborted()
        try:
            yield
        except (RuntimeError, CollectiveError) as error:
            # NCCL may notice the end of a rank before this rank knows of it.
            if not isinstance(error, PeerLost) and self._communicators.wait_for_abort():
                self._refuse_if_aborted()
            raise
        self._refuse_if_aborted()

    def _refuse_if_aborted(self) -> None:
        if not self._communicators.is_aborted:
            return
        self._communicators.check()
        speaker = self._group_ranks.speaker(self.rank)
        error = self.status_server.error_of_another(speaker)
        if error is None:
            error = PeerLost(
                f"{speaker} lost another rank in a collective over NCCL. The cause is on the rank "
                "that ended: see its output."
            ).blaming(self._communicators.lost())
        self.status_server.announce_abort(error)
        raise error

    def finish(self, handle: Handle) -> None:
        """Block until the device has completed a collective of NCCL."""
        with self._noticing():
            handle.wait()
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            others = [rank for rank in self._group_ranks.ranks if rank != self.status_server.rank]
            seconds = self._timeout.total_seconds()
            until = time.monotonic() + seconds
            with self.status_server.waits.noted(NOTED, lambda: others):
                # Not `synchronize`: nothing could end that wait if the other ranks are only late.
                while not event.query():
                    self._communicators.check()
                    if time.monotonic() > until:
                        speaker = self._group_ranks.speaker(self.rank)
                        raise timeout_error(self.status_server, speaker, NOTED, others, seconds)
                    time.sleep(PAUSE)

    def advance(self, handle: Handle) -> None:
        """Start the second half of a collective of NCCL."""
        with self._noticing():
            handle.advance()

    # -- groups ---------------------------------------------------------------------------

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        def make(members: Sequence[int], group: dist.ProcessGroup) -> Collectives:
            return AbortableNccl(
                members.index(self.rank),
                self._group_ranks.part(members),
                self.device,
                self._timeout,
                self.status_server,
                group,
                self._communicators,
            )

        part = split_group(self, self._group_ranks, groups, BACKENDS, make, self._timeout)
        if isinstance(part, AbortableNccl):
            try:
                part.connect()  # now, and not in the middle of a step
            except BaseException:
                part.retire()
                raise
        return part

    def retire(self) -> None:
        """Close the group after a rank is lost. The device then has no work of NCCL left."""
        self.host.messages.forget()
        self._communicators.abort()
        torch.cuda.synchronize(self.device)
        self.close()

    def close(self) -> None:
        if self._is_whole:
            self._communicators.close()
        if self._torch_group is not None:
            self._communicators.remove(self._torch_group)
        # The last reference must be that of `host`, which closes Gloo's sockets with the group.
        self._torch_group = None
        self._nccl.forget()
        self.host.close()  # it destroys torch's group, with both backends


class _DeviceHandle(Handle):
    """The handle of a collective of NCCL, whose `wait` blocks the host."""

    def __init__(self, group: AbortableNccl, inner: Handle) -> None:
        super().__init__(lambda: group.finish(inner), lambda: group.advance(inner))
        self._inner = inner

    def is_there(self) -> bool:
        return super().is_there() or self._inner.is_there()
