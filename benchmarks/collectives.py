"""The cost of the primitives of a step on this machine: torch's own, and Shardwise's.

    python benchmarks/collectives.py [--ranks 2,4] [--mb 64] [--repeats 15]

Every operation is timed on its own, after a barrier, from the moment the last rank began to the
moment the last one ended; the table shows the median over the repeats.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import figure
from shardwise.comm import Collectives, Gloo
from shardwise.comm.same_host import share_memory

Operation = Callable[[], object]

SMALL = 4096
"""Bytes of a small message."""

# torch 2.13 renamed these; older versions have only the older names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure at each number of ranks and print one table."""
    parser = figure.parser(__doc__)
    parser.add_argument("--ranks", type=figure.numbers, default=[2, 4], metavar="2,4")
    parser.add_argument("--mb", type=figure.positive, default=64, metavar="N")
    parser.add_argument("--repeats", type=figure.positive, default=15, metavar="N")
    options = parser.parse_args(arguments)
    facts = figure.begin()
    columns = {ranks: _measure(ranks, options.mb, options.repeats) for ranks in options.ranks}
    names = list(next(iter(columns.values())))
    rows = [[name, *(f"{column[name]:.2f}" for column in columns.values())] for name in names]
    head = [f"{options.mb} MB of fp32, median ms", *(f"{ranks} ranks" for ranks in columns)]
    figure.show(*figure.table(head, rows))
    figure.keep(options, facts, ms=columns)
    return 0


def _measure(ranks: int, mb: int, repeats: int) -> dict[str, float]:
    """Return the median ms by operation, at one number of ranks."""
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    numel = mb * 2**20 // 4 // ranks * ranks
    with tempfile.TemporaryDirectory(prefix="collectives-") as folder:
        mp.start_processes(_rank, (ranks, folder, numel, repeats), nprocs=ranks)
        spans = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(ranks)]
    found = {}
    for name in spans[0]:
        each = zip(*(rank[name] for rank in spans), strict=True)
        found[name] = median((max(e for _, e in r) - max(b for b, _ in r)) / 1e6 for r in each)
    return found


def _rank(rank: int, size: int, folder: str, numel: int, repeats: int) -> None:
    """Run every operation in the same order as all other ranks."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    gloo = Gloo(rank, size)
    operations = torchs(numel, rank, size) | _ours("Gloo", gloo, numel)
    if sys.platform == "linux":
        operations |= _ours("Shared", share_memory(gloo, timeout=60, required=True), numel)
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in operations}
    for name, run in operations.items():
        for number in range(2 + repeats):
            dist.barrier()
            begun = time.monotonic_ns()
            run()
            if number >= 2:  # the first two warm up
                spans[name].append((begun, time.monotonic_ns()))
    torch.save(spans, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def torchs(numel: int, rank: int, size: int) -> dict[str, Operation]:
    """torch's operations on a buffer of `numel` fp32 elements, which `size` divides."""
    # Written to, not only allocated: reading pages that were never touched costs nothing.
    whole, other = torch.ones(numel), torch.ones(numel)
    part, row = torch.ones(numel // size), torch.zeros(SMALL // 4)
    buffer = torch.zeros(numel).fill_(0.0)

    def all_to_all() -> None:
        """A reduce-scatter: everyone sends everyone its interval, and sums the received ones."""
        dist.all_to_all_single(other, whole)
        torch.sum(other.view(size, -1), dim=0, out=part)

    def exchange() -> None:
        """The same by point-to-point messages, all in flight at once."""
        theirs, mine = other.split(part.numel()), whole.split(part.numel())
        peers = [peer for peer in range(size) if peer != rank]
        works = [dist.irecv(theirs[peer], peer) for peer in peers]
        works += [dist.isend(mine[peer], peer) for peer in peers]
        for work in works:
            work.wait()
        part.copy_(mine[rank])
        for peer in peers:
            part.add_(theirs[peer])

    def broadcasts() -> None:
        """An all-gather: everyone broadcasts its interval, all in flight at once."""
        parts: Sequence[Tensor] = whole.chunk(size)
        for work in [dist.broadcast(p, source, async_op=True) for source, p in enumerate(parts)]:
            work.wait()

    return {
        "memcpy": lambda: other.copy_(whole),
        "all_reduce": lambda: dist.all_reduce(buffer),
        "reduce_scatter_single": lambda: reduce_scatter(part, whole),
        "all_to_all_single + sum": all_to_all,
        "isend/irecv exchange + sum": exchange,
        "all_gather_single": lambda: all_gather(whole, part),
        "n asynchronous broadcasts": broadcasts,
        "4 KB all_reduce": lambda: dist.all_reduce(row),
        "barrier": dist.barrier,
    }


def _ours(name: str, group: Collectives, numel: int) -> dict[str, Operation]:
    """The same operations through Shardwise's interface, over one transport."""
    buffer = group.allocate(numel, torch.float32, torch.device("cpu")).fill_(0.0)
    row = torch.zeros(SMALL // 4)
    cuts = range(0, numel + 1, numel // group.size)
    return {
        f"{name}.all_reduce": lambda: group.all_reduce(buffer).reusable(),
        f"{name}.reduce_scatter": lambda: group.reduce_scatter(buffer, cuts).reusable(),
        f"{name}.all_gather": lambda: group.all_gather(buffer, cuts).reusable(),
        f"{name}.gather_rows, 4 KB": lambda: group.gather_rows(row),
        f"{name}.barrier": group.barrier,
    }


if __name__ == "__main__":
    sys.exit(main())
