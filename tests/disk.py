"""What the tests of files on a disk share."""

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
"""Names the folder of this run of the tests: another one beside it must not see its files."""


def on_a_disk() -> Path:
    """A folder that is not in memory, as /tmp is on some machines, and this run's own."""
    if OWN not in os.environ:
        pytest.skip("no folder here is on a disk")
    return Path(os.environ[OWN])


def make_own() -> None:
    """Make that folder, where one can be, for this process and those that it starts."""
    for folder in (Path(tempfile.gettempdir()), Path(__file__).parent, Path("/var/tmp")):
        if mount_of(folder).kind not in IN_MEMORY and os.access(folder, os.W_OK):
            os.environ[OWN] = tempfile.mkdtemp(prefix="sw", dir=folder)
            return


def remove_own() -> None:
    """Remove it, with what failed tests have left in it."""
    if OWN in os.environ:
        shutil.rmtree(os.environ.pop(OWN), ignore_errors=True)


def pattern(seed: int, nbytes: int) -> Tensor:
    """Bytes that another seed would not give."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)


def put(store: Store, index: int, data: Tensor) -> None:
    """Write a record whole, behind."""
    lease = store.blank(index)
    lease.wait().copy_(data)
    lease.write()


def take(store: Store, index: int) -> Tensor:
    """A copy of a record."""
    lease = store.read(index)
    data = lease.wait().clone()
    lease.give_back()
    return data


def sweep(store: Store, order: Sequence[int], *, write: bool) -> Iterator[tuple[int, Tensor]]:
    """Each record of `order` in turn, as an update does it: the next one is read meanwhile. It is
    written behind if `write`, but not where its turn ends by an exception."""
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
    """Wait until everything is written; raise for what could not be."""
    for _, transfer in store._behind.values():
        wait(transfer)
    store._check()


def slow(monkeypatch: pytest.MonkeyPatch, name: str, seconds: float = 0.02) -> None:
    """Let every os.preadv or os.pwritev take longer."""
    real: Callable[..., int] = getattr(os, name)

    def late(*arguments: object) -> int:
        time.sleep(seconds)
        return real(*arguments)

    monkeypatch.setattr(os, name, late)


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """Let every call of a function of os fail with an errno."""

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, fail)


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system does that knows only the page cache: EINVAL at the first transfer."""
    real: Callable[..., int] = os.preadv

    def refuse(fd: int, *rest: object) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, *rest)

    monkeypatch.setattr(os, "preadv", refuse)


def refuse_nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system does on which every file has a name at first."""
    real: Callable[..., int] = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)


def cached(fd: int, nbytes: int) -> int:
    """Bytes of a file's first `nbytes` that the page cache holds, as mincore(2) says."""
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
    """Wait up to `limit` seconds."""
    until = time.monotonic() + limit
    while not true():
        if time.monotonic() > until:
            raise AssertionError(f"did not come true in {limit:g} s")
        time.sleep(0.01)
