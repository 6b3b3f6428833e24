"""NCCL's communicators on the simulated device, which never notice a lost rank by themselves.

A collective runs in a thread of its communicator. If another rank is lost, it waits forever, and so
does everything that waits for it, until this rank aborts the communicator. Its result is then NaN.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from tests.phantom import collectives, streams
from tests.phantom.memory import to_host
from tests.phantom.streams import Device

Collective = tuple[Callable[[], Any], Sequence[Tensor], threading.Event]


class Communicator:
    """The communicator of a group on this rank, as a backend of torch's process group."""

    grouped = 0
    """Number of groups of NCCL calls that are open, in which communicators may be aborted."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Collective] = SimpleQueue()
        self._aborted = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            move, writes, done = self._queue.get()
            try:
                moving = move()
                if moving is not None:
                    moving.wait()
            except RuntimeError:  # a rank is lost, and no later collective runs either
                self._aborted.wait()
                for tensor in writes:
                    if tensor.is_floating_point():
                        to_host(tensor).fill_(torch.nan)
                return
            done.set()

    def launch(self, move: Callable[[], Any], writes: Sequence[Tensor]) -> Moving:
        """Run a collective after the earlier ones."""
        if self._aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")
        done = threading.Event()
        self._queue.put((move, writes, done))
        return Moving(done, self._aborted)

    def abort(self) -> None:
        """End all collectives."""
        assert Communicator.grouped, "separate aborts may wait for each other"
        self._aborted.set()

    def _group_start(self) -> None:
        Communicator.grouped += 1

    def _group_end(self) -> None:
        Communicator.grouped -= 1


class Moving:
    """A collective on the device that is complete or aborted once `wait` returns."""

    def __init__(self, done: threading.Event, aborted: threading.Event) -> None:
        self._done = done
        self._aborted = aborted

    def wait(self) -> None:
        """Block in place of the kernels that the device would not run before."""
        while not self._done.wait(0.005):
            if self._aborted.is_set():
                return


_made: WeakKeyDictionary[Any, Communicator] = WeakKeyDictionary()
_real = dist.ProcessGroup._get_backend


def _communicator(group: Any) -> Communicator:
    group = dist.group.WORLD if group is None else group
    if group not in _made:
        _made[group] = Communicator()
    return _made[group]


def _get_backend(group: Any, device: torch.device) -> Any:
    return _communicator(group) if device.type == "cuda" else _real(group, device)


def _query(event: streams.Event) -> bool:
    """Return True, because the kernels before the event have run."""
    Device.order.synchronize(event.seen, "event")
    return True


def install() -> None:
    """Give the groups of this process communicators that can be aborted."""
    collectives.move_bytes = lambda group, move, writes: _communicator(group).launch(move, writes)
    dist.ProcessGroup._get_backend = _get_backend  # type: ignore[method-assign,assignment]
    streams.Event.query = _query  # type: ignore[method-assign]
