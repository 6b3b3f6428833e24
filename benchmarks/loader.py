"""Speed of reading: `sw.Loader` next to torch's DataLoader with a DistributedSampler.

    python benchmarks/loader.py [--ranks 2,4] [--rounds 5]

Measures samples per second and the time to the first batch, for small samples (32 numbers) and
large ones (3 x 224 x 224 numbers), with 0 and 2 DataLoader workers. In each round, all ranks read
an epoch in each way, one after the other and each time in another order, so that all ways see the
same load of the machine. A round takes as long as its slowest rank.

The Loader is measured twice. The samples draw no random numbers, so it does not seed them. "Samples
seeded" is its speed with `seed_samples=True`, or if they drew. torchdata's StatefulDataLoader and
Mosaic's StreamingDataset are measured too if they are installed. The latter reads and decodes its
own files, and the others copy samples from memory.

Prints medians over the rounds as a table in Markdown. "x DataLoader" are medians over the rounds of
the ratio to the DataLoader: of its time to the loader's, and of its CPU time to the loader's. On a
busy machine, the latter depends less on other programs. It includes workers, their start and end.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import figure
import shardwise as sw
from machine import cpu_seconds

CASES = {"small": ((32,), 64, 200), "large": ((3, 224, 224), 16, 20)}
"""Shape of a sample, batch per rank, and steps of an epoch."""
WORKERS = (0, 2)
PEERS = {"torchdata": "StatefulDataLoader", "streaming": "StreamingDataset"}
INSTALLED = {name for module, name in PEERS.items() if find_spec(module) is not None}


class Samples(Dataset):
    """Copies of a tensor, as if each had been read from memory."""

    def __init__(self, shape: tuple[int, ...], length: int) -> None:
        self.one, self.length = torch.rand(shape), length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.one.clone(), index


def ways(
    world: Any, dataset: Samples, batch: int, workers: int, files: Path
) -> dict[str, Iterable[Any]]:
    """Return the loaders to compare, by name. `files` is a folder that all ranks share."""
    sampler = DistributedSampler(dataset, world.size, world.rank, shuffle=True)
    options = {"batch_size": batch, "sampler": sampler, "num_workers": workers}
    own: dict[str, Any] = {"shuffle": True, "num_workers": workers}
    found: dict[str, Iterable[Any]] = {
        "Loader": sw.Loader(dataset, batch * world.size, **own),
        "Loader, samples seeded": sw.Loader(dataset, batch * world.size, seed_samples=True, **own),
        "DataLoader": DataLoader(dataset, **options),
    }
    if "StatefulDataLoader" in INSTALLED:
        from torchdata.stateful_dataloader import StatefulDataLoader

        found["StatefulDataLoader"] = StatefulDataLoader(dataset, **options)
    if "StreamingDataset" in INSTALLED:
        from streaming import StreamingDataset

        write_shards(world, dataset, files)
        options = {"batch_size": batch, "num_workers": workers}
        streamed = StreamingDataset(local=str(files), shuffle=True, batch_size=batch)
        found["StreamingDataset"] = DataLoader(streamed, **options)
    return found


def write_shards(world: Any, dataset: Samples, files: Path) -> None:
    """Write the samples as Mosaic's shards, unless an earlier call has."""
    if world.is_main and not (files / "index.json").exists():
        from streaming import MDSWriter

        shape = ",".join(map(str, dataset.one.shape))
        columns = {"x": f"ndarray:float32:{shape}", "y": "int"}
        with MDSWriter(out=str(files), columns=columns) as writer:
            for index in range(len(dataset)):
                writer.write({"x": dataset.one.numpy(), "y": index})
    world.barrier()


def read(loader: Iterable[Any]) -> tuple[float, float]:
    """Return the seconds to the first batch, and from there to the end of the epoch."""
    began = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first = time.perf_counter()
    for _ in batches:
        pass
    return first - began, time.perf_counter() - first


def measured(world: Any, work: Callable[[], tuple[float, float]]) -> list[float]:
    """Return the times of the slowest rank, and the CPU time of all ranks."""
    world.barrier()
    who = RUSAGE_SELF, RUSAGE_CHILDREN  # DataLoader workers have ended when `work` returns
    before = cpu_seconds(*who)
    times = work()
    firsts, rests, cpus = zip(*world.gather((*times, cpu_seconds(*who) - before)), strict=True)
    return [max(firsts), max(rests), sum(cpus)]


def work(rounds: int, folder: Path) -> None:
    """Measure all cases on this rank, and print the medians."""
    world = sw.init(seed=0, device="cpu", quiet=True)
    torch.set_num_threads(1)
    rows = []
    for case, (shape, batch, steps) in CASES.items():
        dataset = Samples(shape, batch * steps * world.size)
        for workers in WORKERS:
            loaders = ways(world, dataset, batch, workers, folder / case)
            times: dict[str, list[list[float]]] = {name: [] for name in loaders}
            for number in range(rounds):
                names = list(loaders)
                names = names[number % len(names) :] + names[: number % len(names)]
                for name in names:
                    with torch.no_grad():  # the Loader expects steps of an engine otherwise
                        times[name].append(measured(world, partial(read, loaders[name])))
            for name, each in times.items():
                first, rest, cpu = map(statistics.median, zip(*each, strict=True))
                rate = (steps - 1) * batch * world.size / rest
                pairs = list(zip(times["DataLoader"], each, strict=True))
                ratios = [
                    statistics.median(torchs[of] / own[of] for torchs, own in pairs)
                    for of in (1, 2)
                ]
                cpu *= 1e6 / len(dataset)
                cells = [str(world.size), case, str(workers), name, f"{rate:,.0f}"]
                cells += [f"{ratios[0]:.2f}", f"{cpu:.1f}", f"{ratios[1]:.2f}"]
                rows.append([*cells, f"{1e3 * first:.1f}"])
    world.print(json.dumps({"rows": rows}))


def main() -> None:
    """Start the ranks and print the table, or work as a rank."""
    parser = figure.parser(__doc__)
    parser.add_argument("--ranks", type=figure.numbers, default=[2, 4], metavar="N,M")
    figure.add_numbers(parser, {"rounds": 5})
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        work(options.rounds, options.folder)
        return
    facts = figure.begin()
    for module, name in PEERS.items():
        if name not in INSTALLED:
            print(f"{name} is absent: {module} is not installed.\n")
    heads = ["ranks", "samples", "workers", "loader", "samples/s", "x DataLoader"]
    heads += ["us of CPU per sample", "x DataLoader", "ms to the first batch"]
    rows = []
    for size in map(str, options.ranks):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "shardwise", "run", "-n", size, "--quiet", __file__]
            command += ["--folder", folder, "--rounds", str(options.rounds)]
            rows += figure.result_of(command)["rows"]
    figure.show(*figure.table(heads, rows))
    figure.keep(options, facts, rows=rows)


if __name__ == "__main__":
    main()
