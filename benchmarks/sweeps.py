"""The sweeps that offload.py times: every byte of a state is read, and written back.

Each contender is a context that yields a function; one call of it is one sweep. `Work` says how
much, and where.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn, optim

from shardwise.tiers.direct_io import CHUNK, THREADS
from shardwise.tiers.host_memory import Staging
from shardwise.tiers.nvme import Store

Sweep = Callable[[], float | None]
"""Runs one sweep. Returns its seconds where it has timed itself, which only fio does."""

Contender = Callable[["Work"], AbstractContextManager[Sweep]]


@dataclass(frozen=True, kw_only=True)
class Work:
    """`count` records of `record` bytes (whole chunks), on files in `folder`.

    A record is one bucket of AdamW's state in fp32: masters and two moments, a third each.
    """

    folder: Path
    record: int
    count: int

    @property
    def moved(self) -> int:
        """Bytes that one sweep reads and writes, together."""
        return 2 * self.record * self.count


class Touch:
    """torch's fused AdamW on one record, with a gradient that stays in memory."""

    def __init__(self, record: int) -> None:
        self._gradient = torch.randn(record // 12)

    def __call__(self, record: Tensor) -> None:
        """Update `record`, uint8: masters, first moments, second moments."""
        numel = self._gradient.numel()
        master, first, second = record.view(torch.float32)[: 3 * numel].split(numel)
        parameter = nn.Parameter(master)
        parameter.grad = self._gradient
        inner = optim.AdamW([parameter], lr=1e-3, fused=True)
        inner.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": first,
            "exp_avg_sq": second,
        }
        inner.step()


@contextmanager
def shardwise(work: Work) -> Iterator[Sweep]:
    """Ours, with the update."""
    touch = Touch(work.record)
    with closing(Store(work.folder, "benchmark", [work.record] * work.count, rank=0)) as store:

        def sweep() -> None:
            ahead = store.read(0)
            for index in range(work.count):
                lease = ahead
                if index + 1 < work.count:
                    ahead = store.read(index + 1)
                touch(lease.wait())
                lease.write()
            for _, transfer in store._behind.values():
                wait(transfer)

        if not store.direct:
            print(f"{work.folder} does not take direct I/O: Shardwise goes through the page cache")
        yield sweep


@contextmanager
def plain_huge(work: Work) -> Iterator[Sweep]:
    """The same bytes by as many threads as ours, without records, order or update."""
    yield from _plain(work, [Staging(CHUNK).view for _ in range(THREADS)])


@contextmanager
def plain(work: Work) -> Iterator[Sweep]:
    """The same from buffers of ordinary pages, as malloc gives them."""
    whole = [torch.zeros(CHUNK + 4096, dtype=torch.uint8) for _ in range(THREADS)]
    yield from _plain(work, [_aligned(buffer) for buffer in whole])


def _aligned(buffer: Tensor) -> memoryview:
    first = -buffer.data_ptr() % 4096
    return memoryview(buffer.numpy())[first : first + CHUNK]


def _plain(work: Work, buffers: list[memoryview]) -> Iterator[Sweep]:
    """Each thread reads a chunk and writes it back, then takes the next but THREADS."""
    size = work.moved // 2
    with tempfile.NamedTemporaryFile(dir=work.folder) as file, ThreadPoolExecutor() as pool:
        os.posix_fallocate(file.fileno(), 0, size)
        fd = os.open(file.name, os.O_RDWR | os.O_DIRECT)

        def run(thread: int) -> None:
            for offset in range(thread * CHUNK, size, THREADS * CHUNK):
                assert os.preadv(fd, [buffers[thread]], offset) == CHUNK
                assert os.pwritev(fd, [buffers[thread]], offset) == CHUNK

        def sweep() -> None:
            list(pool.map(run, range(THREADS)))

        try:
            yield sweep
        finally:
            os.close(fd)


@contextmanager
def fio(work: Work) -> Iterator[Sweep]:
    """fio: libaio, depth 16, direct, half reads and half writes of the same number of bytes."""
    with tempfile.NamedTemporaryFile(dir=work.folder) as file:
        command = ["fio", "--name=mix", f"--filename={file.name}", "--ioengine=libaio"]
        command += ["--direct=1", "--iodepth=16", "--rw=randrw", "--rwmixread=50"]
        command += [f"--bs={CHUNK}", f"--size={work.moved // 2}", f"--io_size={work.moved}"]
        command += ["--output-format=json"]

        def sweep() -> float:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            job = json.loads(done.stdout)["jobs"][0]
            moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
            assert moved == work.moved, f"fio moved {moved} bytes in place of {work.moved}"
            # Without its start, and without laying out the file.
            return float(job["job_runtime"]) / 1000

        yield sweep


@contextmanager
def update_alone(work: Work) -> Iterator[Sweep]:
    """The update without a disk: a limit of another kind."""
    touch = Touch(work.record)
    record = Staging(work.record).tensor.fill_(0)

    def sweep() -> None:
        for _ in range(work.count):
            touch(record)

    yield sweep


def contenders() -> dict[str, Contender]:
    """All that can run here, by name; the first is what ratios are taken against."""
    found: dict[str, Contender] = {
        "plain direct I/O, huge pages": plain_huge,
        "plain direct I/O": plain,
    }
    if shutil.which("fio"):
        found["fio, libaio, depth 16"] = fio
    found["update alone, in memory"] = update_alone
    found["Shardwise, with the update"] = shardwise
    return found
