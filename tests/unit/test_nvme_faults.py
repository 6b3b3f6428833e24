"""Failures of the nvme tier: bad folders, file systems and disks."""

import errno
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from shardwise.errors import TierError
from shardwise.tiers.nvme import Store
from tests.disk import (
    MB,
    cached,
    drain,
    failing,
    pattern,
    put,
    refuse_direct,
    refuse_nameless,
    sweep,
    take,
    wait_until,
)


def test_a_missing_folder(folder: Path) -> None:
    with pytest.raises(
        TierError, match=r"moments cannot be stored in .*no-such: there is no such folder"
    ):
        Store(folder / "no-such", "moments", [10], rank=3)


def test_a_file_in_place_of_a_folder() -> None:
    with pytest.raises(TierError, match="it is not a folder"):
        Store(Path(__file__), "moments", [10], rank=0)


def test_a_folder_that_may_not_be_written_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        failing(patched, "open", errno.EACCES)
        with pytest.raises(TierError, match=r"no file can be created there \(Permission denied\)"):
            Store(folder, "moments", [10], rank=0)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_a_folder_in_memory() -> None:
    with pytest.raises(TierError, match="a tmpfs, which is memory, not a disk"):
        Store(Path("/dev/shm"), "moments", [10], rank=0)


def test_a_system_other_than_linux(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(TierError, match="needs Linux, and this is darwin"):
        Store(folder, "moments", [10], rank=0)


def test_more_than_is_free_on_the_disk(folder: Path) -> None:
    status = os.statvfs(folder)
    needed = status.f_blocks * status.f_frsize // 4096 * 4096 + 4096
    with pytest.raises(TierError, match=rf"needs {needed} bytes in .*, and only \d+ are free"):
        Store(folder, "moments", [needed], rank=0)


def test_disk_that_fills_up_during_reservation(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "posix_fallocate", errno.ENOSPC)
    with pytest.raises(TierError, match=r"needs 4096 bytes in .*, and only \d+ are free"):
        Store(folder, "moments", [10], rank=0)


def test_a_limit_on_file_sizes(folder: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MB, before[1]))
    try:
        with pytest.raises(TierError, match=r"needs 2097152 bytes .*file size limit"):
            Store(folder, "moments", [2 * MB], rank=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_system_that_cannot_reserve(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "posix_fallocate", errno.EOPNOTSUPP)
    with closing(Store(folder, "state", [9000], rank=0)) as store:
        assert take(store, 0).eq(0).all()
        put(store, 0, pattern(1, 9000))
        drain(store)
        assert torch.equal(take(store, 0), pattern(1, 9000))


CALLS: dict[str, Callable[[Store], object]] = {
    "read": lambda store: store.read(1),
    "blank": lambda store: store.blank(1),
    "close": lambda store: store.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_next_call_reports_failed_write(
    call: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Store(folder, "grads", [5 * MB] * 3, rank=2)) as store:
        lease = store.blank(0)
        lease.wait().fill_(1)
        failing(monkeypatch, "pwritev", errno.ENOSPC)
        lease.write()
        wait_until(lambda: all(chunk.done() for chunk in store._behind[0][1]))
        message = r"grads of rank 2 .*could not write .*No space left .*\d+ bytes are free there"
        with pytest.raises(TierError, match=message):
            CALLS[call](store)
        if call != "close":
            with pytest.raises(TierError, match=message):
                store.read(2)  # and in each later call


def test_a_failed_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Store(folder, "state", [4096] * 3, rank=0)) as store:
        failing(monkeypatch, "preadv", errno.EIO)
        lease = store.read(1)
        with pytest.raises(TierError, match=r"could not read 4096 bytes at 4096 \(Input/output"):
            lease.wait()
        lease.give_back()


def test_failure_in_a_sweep_ends_it_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def update(store: Store) -> None:
        for index, _ in sweep(store, range(8), write=True):
            seen.append(index)
            time.sleep(0.05)

    with closing(Store(folder, "state", [4096] * 8, rank=0)) as store:
        failing(monkeypatch, "pwritev", errno.EIO)
        with pytest.raises(TierError, match="Input/output"):
            update(store)
    assert len(seen) < 3


def test_truncated_file(folder: Path) -> None:
    with closing(Store(folder, "state", [4096], rank=0)) as store:
        os.ftruncate(store._file._fd, 0)
        with pytest.raises(TierError, match="ends at byte 0, but more was written"):
            take(store, 0)


# with and without O_DIRECT


@pytest.mark.parametrize("direct", [True, False])
def test_data_on_the_disk_is_not_in_the_page_cache(
    direct: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        refuse_direct(monkeypatch)
    with closing(Store(folder, "state", [5 * MB] * 6, rank=0)) as store:
        if direct and not store.direct:
            pytest.skip(f"the file system of {folder} takes no direct I/O")
        assert store.direct == direct
        for index, tensor in sweep(store, range(6), write=True):
            tensor.copy_(pattern(index, 5 * MB))
        drain(store)
        assert cached(store._file._fd, store.nbytes) < store.nbytes / 10
        for index, tensor in sweep(store, range(6), write=False):
            assert torch.equal(tensor, pattern(index, 5 * MB))
        assert cached(store._file._fd, store.nbytes) < store.nbytes / 10


def test_error_of_the_first_transfer_is_not_a_missing_feature(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "pwritev", errno.EIO)
    with pytest.raises(TierError, match="could not transfer 4096 bytes at 0"):
        Store(folder, "state", [4096], rank=0)


def test_file_system_without_unnamed_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        refuse_nameless(patched)
        store = Store(folder, "state", [4096], rank=0)
    assert list(folder.iterdir()) == []
    with closing(store):
        put(store, 0, pattern(0, 4096))
        assert torch.equal(take(store, 0), pattern(0, 4096))
