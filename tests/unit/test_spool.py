"""Records in a file without a name: they are read unchanged, and leave nothing behind."""

import errno
import gc
import os
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwise.errors import TierError
from shardwise.tiers.direct_io import CHUNK
from shardwise.tiers.host_memory import PAGE, mapped
from shardwise.tiers.spool import Spool, SpoolRecord
from tests.disk import cached, failing, pattern, refuse_direct, refuse_nameless, wait_until


def make(folder: Path) -> Spool:
    return Spool(folder, "activations", rank=3)


def written(spool: Spool, data: Tensor) -> SpoolRecord:
    record = spool.write(data)
    record.wait()
    return record


def read(spool: Spool, record: SpoolRecord) -> Tensor:
    memory = spool.read(record)
    record.wait()
    return memory


class TestSpool:
    @pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, 2 * CHUNK + 5])
    def test_record_is_read_unchanged(self, folder: Path, nbytes: int) -> None:
        spool, data = make(folder), pattern(0, nbytes)
        record = written(spool, data)
        for _ in range(2):
            assert torch.equal(read(spool, record), data)

    def test_many_at_once(self, folder: Path) -> None:
        spool = make(folder)
        pieces = [pattern(i, 1000 * (i + 1)) for i in range(40)]
        records = [spool.write(piece) for piece in pieces]
        for record in records:
            record.wait()
        memories = [spool.read(record) for record in reversed(records)]
        for memory, record, piece in zip(
            memories, reversed(records), reversed(pieces), strict=True
        ):
            record.wait()
            assert torch.equal(memory, piece)

    def test_reuses_space_of_dropped_records(self, folder: Path) -> None:
        spool = make(folder)
        starts = set()
        for _ in range(5):
            record = written(spool, pattern(0, PAGE))
            starts.add(record.start)
            del record
        assert starts == {0}
        assert spool.in_use == 0

    def test_does_not_reuse_space_during_a_write(self, folder: Path) -> None:
        spool, may_write = make(folder), []
        lock = threading.Lock()
        lock.acquire()
        first = spool.put(PAGE, lambda place: may_write.append(lock.acquire()))
        under_way = first.last
        del first
        data = pattern(1, PAGE)
        second = written(spool, data)
        lock.release()
        under_way.result()
        assert second.start == PAGE
        assert torch.equal(read(spool, second), data)

    def test_nothing_is_left_in_the_folder(self, folder: Path) -> None:
        spool = make(folder)
        record = written(spool, pattern(0, 100))
        assert os.listdir(folder) == []
        file = spool.file._fd
        del spool, record
        gc.collect()

        def closed() -> bool:
            try:
                os.fstat(file)
            except OSError as error:
                return error.errno == errno.EBADF
            return False

        wait_until(closed)  # a thread may drop the last reference

    def test_spool_lives_as_long_as_its_records(self, folder: Path) -> None:
        spool, data = make(folder), pattern(0, 100)
        record = written(spool, data)
        del spool
        gc.collect()
        assert torch.equal(read(record._spool, record), data)

    @pytest.mark.parametrize("direct", [True, False])
    def test_written_data_is_not_in_the_page_cache(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
    ) -> None:
        if not direct:
            refuse_direct(monkeypatch)
        spool, data = make(folder), pattern(0, 3 * CHUNK)
        if direct and not spool.file.direct:
            pytest.skip(f"the file system of {folder} takes no direct I/O")
        assert spool.file.direct == direct
        record = written(spool, data)
        assert torch.equal(read(spool, record), data)
        assert cached(spool.file._fd, 3 * CHUNK) < CHUNK

    def test_file_system_without_unnamed_files(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patched:
            refuse_nameless(patched)
            spool = make(folder)
        assert os.listdir(folder) == []
        data = pattern(0, 10_000)
        assert torch.equal(read(spool, written(spool, data)), data)


class TestFailures:
    """Errors of the file itself are tested in test_nvme_faults.py."""

    def test_no_such_folder(self, folder: Path) -> None:
        with pytest.raises(
            TierError, match=r"activations cannot be stored in .*there is no such folder"
        ):
            make(folder / "nowhere")

    @pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
    def test_memory(self) -> None:
        with pytest.raises(TierError, match="a tmpfs, which is memory, not a disk"):
            make(Path("/dev/shm"))

    def test_full_disk_is_reported_by_the_write(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spool = make(folder)
        failing(monkeypatch, "pwritev", errno.ENOSPC)
        record = spool.write(pattern(0, 100))
        said = r"activations of rank 3 .*could not write 4096 bytes at 0 \(No space left"
        for _ in range(2):
            with pytest.raises(TierError, match=said):
                record.wait()

    def test_failed_write_keeps_no_objects_of_its_caller(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spool = make(folder)
        failing(monkeypatch, "pwritev", errno.EIO)
        record = spool.write(pattern(0, 100))

        def told() -> weakref.ref[Tensor]:
            held = torch.ones(1)
            with pytest.raises(TierError):
                record.wait()
            return weakref.ref(held)

        assert told()() is None

    def test_a_read_that_ends_early(self, folder: Path) -> None:
        spool = make(folder)
        record = written(spool, pattern(0, 2 * PAGE))
        os.ftruncate(spool.file._fd, PAGE)
        with pytest.raises(TierError, match=f"ends at byte {PAGE}, but more was written"):
            read(spool, record)

    def test_refuses_forked_process_which_can_exit(self, folder: Path) -> None:
        spool = make(folder)
        gate = threading.Event()
        memory = mapped(PAGE).copy_(pattern(0, PAGE))

        def write(place: int) -> None:
            gate.wait()
            spool.file.write(memory.numpy().data, place)

        waiting = spool.put(PAGE, write)
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (waiting.wait, lambda: spool.write(pattern(1, PAGE))):
                try:
                    call()
                except TierError as error:
                    refused += "forked from it" in str(error)
            del waiting, call
            os._exit(0 if refused == 2 else 1)
        gate.set()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(read(spool, waiting), pattern(0, PAGE))
