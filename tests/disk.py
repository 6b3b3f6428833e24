"""Helpers for tests of files on a disk."""

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwise.tiers.direct_io import IN_MEMORY, mount_of
from shardwise.tiers.nvme import Store

MB = 2**20


OWN = "TESTS_DISK"
"""Names the folder of this test run, which other runs at the same time must not see."""


def on_a_disk() -> Path:
    """Return the folder of this run on a disk; /tmp is in memory on some machines."""
    if OWN not in os.environ:
        pytest.skip("no folder here is on a disk")
    return Path(os.environ[OWN])


def make_own() -> None:
    """Make that folder, if possible, for this process and the processes that it starts."""
    for folder in (Path(tempfile.gettempdir()), Path(__file__).parent, Path("/var/tmp")):
        if mount_of(folder).kind not in IN_MEMORY and os.access(folder, os.W_OK):
            os.environ[OWN] = tempfile.mkdtemp(prefix="sw", dir=folder)
            return


def remove_own() -> None:
    """Remove it, with files that failed tests have left."""
    if OWN in os.environ:
        shutil.rmtree(os.environ.pop(OWN), ignore_errors=True)


def pattern(seed: int, nbytes: int) -> Tensor:
    """Return bytes that depend on the seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)


def put(store: Store, index: int, data: Tensor) -> None:
    """Write a complete record asynchronously."""
    lease = store.blank(index)
    lease.wait().copy_(data)
    lease.write()


def take(store: Store, index: int) -> Tensor:
    """Return a copy of a record."""
    lease = store.read(index)
    data = lease.wait().clone()
    lease.give_back()
    return data


def sweep(store: Store, order: Sequence[int], *, write: bool) -> Iterator[tuple[int, Tensor]]:
    """Use each record of `order` in turn, as an update does; the next one is read meanwhile.

    It is written if `write`, unless its turn ends with an exception.
    """
    ahead = [store.read(index) for index in order[:1]]
    try:
        for place in range(len(order)):
            if place + 1 < len(order):
                ahead.append(store.read(order[place + 1]))
            yield order[place], ahead[0].wait()
            if write:
                ahead[0].write()
            else:
                ahead[0].give_back()
            ahead.pop(0)
    finally:
        for lease in ahead:
            lease.give_back()


def drain(store: Store) -> None:
    """Wait until everything is written; raise the first failure."""
    for _, transfer in store._behind.values():
        wait(transfer)
    store._check()


def slow(monkeypatch: pytest.MonkeyPatch, name: str, seconds: float = 0.02) -> None:
    """Make every os.preadv or os.pwritev take longer."""
    real: Callable[..., int] = getattr(os, name)

    def late(*arguments: object) -> int:
        time.sleep(seconds)
        return real(*arguments)

    monkeypatch.setattr(os, name, late)


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """Make every call of a function of os fail with an errno."""

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, fail)


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act like a file system without direct transfers: EINVAL at the first one."""
    real: Callable[..., int] = os.preadv

    def refuse(fd: int, *rest: object) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, *rest)

    monkeypatch.setattr(os, "preadv", refuse)


def refuse_nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act like a file system that requires names of files."""
    real: Callable[..., int] = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)


def cached(fd: int, nbytes: int) -> int:
    """Return how many of a file's first `nbytes` bytes the page cache has, by mincore(2)."""
    with mmap.mmap(fd, nbytes) as mapped:
        there = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        asked = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(nbytes), there
        )
        del first
    assert asked == 0
    return sum(page & 1 for page in there) * mmap.PAGESIZE


def wait_until(true: Callable[[], bool], limit: float = 5.0) -> None:
    """Wait up to `limit` seconds for a condition."""
    until = time.monotonic() + limit
    while not true():
        if time.monotonic() > until:
            raise AssertionError(f"did not come true in {limit:g} s")
        time.sleep(0.01)
