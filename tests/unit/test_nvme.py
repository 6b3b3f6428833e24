"""Records of the nvme tier, compared with plain bytes in memory."""

import os
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.comm import Solo
from shardwise.errors import TierError
from shardwise.layout.placement import Tier
from shardwise.states.storage.storage_factory import StorageFactory
from shardwise.tiers.direct_io import CHUNK
from shardwise.tiers.nvme import Store
from tests.disk import MB, drain, on_a_disk, pattern, put, slow, sweep, take, wait_until

sizes = st.lists(
    st.sampled_from([0, 1, 4095, 4096, 4097, 40_000, CHUNK, CHUNK + 5]) | st.integers(0, 20_000),
    min_size=1,
    max_size=6,
)
steps = st.lists(st.tuples(st.sampled_from(["put", "take", "add", "drop"]), st.integers(0, 5)))


@settings(max_examples=60, deadline=None)
@given(sizes, steps, st.integers(2, 4))
def test_any_order_of_reads_and_writes_is_as_in_memory(
    records: list[int], steps: list[tuple[str, int]], in_flight: int
) -> None:
    plain = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in records]
    with closing(Store(on_a_disk(), "state", records, rank=0, in_flight=in_flight)) as store:
        for seed, (step, number) in enumerate(steps):
            index = number % len(records)
            if step == "put":
                plain[index] = pattern(seed, records[index])
                put(store, index, plain[index])
            elif step == "take":
                assert torch.equal(take(store, index), plain[index])
            else:
                lease = store.read(index)
                lease.wait().add_(seed % 7)
                if step == "add":
                    plain[index] = plain[index] + seed % 7
                    lease.write()
                else:
                    lease.give_back()
        drain(store)
        for index, expected in enumerate(plain):
            assert torch.equal(take(store, index), expected)


@settings(max_examples=40, deadline=None)
@given(sizes, st.data(), st.integers(2, 5))
def test_sweeps_in_any_order_update_each_record_once(
    records: list[int], data: st.DataObject, in_flight: int
) -> None:
    plain = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in records]
    with closing(Store(on_a_disk(), "state", records, rank=0, in_flight=in_flight)) as store:
        for number in range(3):
            order = data.draw(st.lists(st.sampled_from(range(len(records))), unique=True))
            seen = []
            for index, tensor in sweep(store, order, write=True):
                assert torch.equal(tensor, plain[index])
                tensor.add_(number + index + 1)
                plain[index].add_(number + index + 1)
                seen.append(index)
            assert seen == order
        looked = {i: t.clone() for i, t in sweep(store, range(len(records)), write=False)}
        assert all(torch.equal(looked[i], plain[i]) for i in range(len(records)))


def test_records_view_as_any_dtype(folder: Path) -> None:
    with closing(Store(folder, "moments", [4 * 1000, 8 * 1000], rank=0)) as store:
        put(store, 1, torch.arange(1000, dtype=torch.float64).view(torch.uint8))
        for index, tensor in sweep(store, [0, 1], write=True):
            tensor.view(torch.float64 if index else torch.float32).add_(0.5)
        assert take(store, 0).view(torch.float32).eq(0.5).all()
        assert torch.equal(take(store, 1).view(torch.float64), torch.arange(1000) + 0.5)


def test_record_read_during_its_write_has_new_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(monkeypatch, "pwritev")
    with closing(Store(folder, "state", [5 * MB] * 2, rank=0)) as store:
        for seed in range(3):
            put(store, 0, pattern(seed, 5 * MB))
            assert torch.equal(take(store, 0), pattern(seed, 5 * MB))


def test_last_of_two_writes_wins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, "pwritev")
    with closing(Store(folder, "state", [MB] * 4, rank=0)) as store:
        for seed in range(3):
            put(store, 0, pattern(seed, MB))
        for index in (1, 2, 3):  # all other buffers, so that record 0 is read from the disk
            put(store, index, pattern(index, MB))
        drain(store)
        assert torch.equal(take(store, 0), pattern(2, MB))


def test_reads_run_ahead_of_an_update_and_writes_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, written = set(), [threading.Event() for _ in range(6)]
    read, write = os.preadv, os.pwritev

    def reading(fd: int, parts: list[memoryview], offset: int) -> int:
        begun.add(offset // MB)
        return read(fd, parts, offset)

    def held(fd: int, parts: list[memoryview], offset: int, how: int) -> int:
        assert written[offset // MB].wait(5), f"the sweep waits for the write of {offset // MB}"
        return write(fd, parts, offset, how)

    with closing(Store(folder, "state", [MB] * 6, rank=0)) as store:
        monkeypatch.setattr(os, "preadv", reading)
        monkeypatch.setattr(os, "pwritev", held)
        for index, _ in sweep(store, range(6), write=True):
            if index < 5:
                wait_until(lambda index=index: index + 1 in begun)
            if index > 0:
                written[index - 1].set()
        written[5].set()
        drain(store)


def test_continues_short_transfers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("preadv", "pwritev"):
        real: Callable[..., int] = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda fd, parts, *rest, real=real: real(fd, [parts[0][:4096]], *rest)
        )
    with closing(Store(folder, "state", [50_000], rank=0)) as store:
        put(store, 0, pattern(0, 50_000))
        drain(store)
        assert torch.equal(take(store, 0), pattern(0, 50_000))


def test_failed_update_keeps_its_record_and_returns_buffers(folder: Path) -> None:
    with closing(Store(folder, "state", [4096] * 6, rank=0)) as store:
        with pytest.raises(ZeroDivisionError):
            update_that_raises(store, at=3)
        values = [int(tensor[0]) for _, tensor in sweep(store, range(6), write=False)]
    assert values == [1, 1, 1, 0, 0, 0]


def update_that_raises(store: Store, at: int) -> None:
    for index, tensor in sweep(store, range(6), write=True):
        tensor.fill_(1)
        if index == at:
            raise ZeroDivisionError


def test_a_closed_store(folder: Path) -> None:
    store = Store(folder, "state", [4096] * 2, rank=0)
    lease = store.read(0)
    store.close()
    store.close()
    lease.give_back()
    for call in (lease.wait, lambda: store.blank(1), lambda: store.read(1)):
        with pytest.raises(TierError, match="state was closed"):
            call()


def test_closing_frees_the_disk(folder: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    store = Store(folder, "state", [4096], rank=0)
    put(store, 0, pattern(0, 4096))
    assert descriptors() == before + 1
    store.close()
    assert descriptors() == before


def test_a_store_without_records_has_no_buffers(folder: Path) -> None:
    """The store of a rank that owns no element of a bucket must not ask for pinned memory."""

    def pages(nbytes: int, count: int) -> list[torch.Tensor]:
        assert nbytes * count > 0
        return [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(count)]

    with closing(Store(folder, "state", [], rank=0, pages=pages)) as store:
        assert (store.nbytes, store.staging_bytes) == (0, 0)


class LostCopy:
    """The event of a failed copy on an accelerator."""

    def synchronize(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_frees_everything_after_a_failed_copy(folder: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    factory = StorageFactory(Tier("nvme", str(folder)), Solo())
    stores = [Store(folder, "state", [4096], rank=0) for _ in range(3)]
    factory._stores += stores
    for store in stores[1:]:
        lease = store.blank(0)
        lease.wait()
        lease.add_copy(LostCopy())
        lease.write()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        factory.close()
    assert descriptors() == before
    factory.close()


def test_refuses_forked_process_which_can_exit(folder: Path) -> None:
    with closing(Store(folder, "state", [4096] * 2, rank=0)) as store:
        put(store, 0, pattern(0, 4096))
        lease = store.read(1)
        lease.wait()
        child = os.fork()
        if child == 0:
            try:
                store.read(1)
            except TierError as error:
                lease.give_back()
                store.close()
                os._exit(0 if "forked from it" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        lease.give_back()
        assert torch.equal(take(store, 0), pattern(0, 4096))
