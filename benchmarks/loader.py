"""Speed of reading: `sw.Loader` next to torch's DataLoader with a DistributedSampler.

    python benchmarks/loader.py [--ranks 2,4] [--rounds 5]

Measures samples per second and the time to the first batch, for small samples (32 numbers) and
large ones (3 x 224 x 224 numbers), with 0 and 2 DataLoader workers. In each round, all ranks read
an epoch in each way, one after the other, so that all ways see the same load of the machine. A
round takes as long as its slowest rank. torchdata's StatefulDataLoader is measured too if it is
installed. Prints medians over the rounds as a table in Markdown.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import machine
import shardwise as sw

CASES = {"small": ((32,), 64, 200), "large": ((3, 224, 224), 16, 20)}
"""Shape of a sample, batch per rank, and steps of an epoch."""
WORKERS = (0, 2)
STATEFUL = find_spec("torchdata") is not None


class Samples(Dataset):
    """Copies of a tensor, as if each had been read from memory."""

    def __init__(self, shape: tuple[int, ...], length: int) -> None:
        self.one, self.length = torch.rand(shape), length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.one.clone(), index


def ways(world: Any, dataset: Dataset, batch: int, workers: int) -> dict[str, Iterable[Any]]:
    """Return the loaders to compare, by name."""
    sampler = DistributedSampler(dataset, world.size, world.rank, shuffle=True)
    options = {"batch_size": batch, "sampler": sampler, "num_workers": workers}
    found: dict[str, Iterable[Any]] = {
        "Loader": sw.Loader(dataset, batch * world.size, shuffle=True, num_workers=workers),
        "DataLoader": DataLoader(dataset, **options),
    }
    if STATEFUL:
        from torchdata.stateful_dataloader import StatefulDataLoader

        found["StatefulDataLoader"] = StatefulDataLoader(dataset, **options)
    return found


def read(loader: Iterable[Any]) -> tuple[float, float]:
    """Return the seconds to the first batch, and from there to the end of the epoch."""
    began = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first = time.perf_counter()
    for _ in batches:
        pass
    return first - began, time.perf_counter() - first


def slowest(world: Any, work: Callable[[], tuple[float, float]]) -> list[float]:
    """Return the times of the slowest rank."""
    world.barrier()
    return [max(each) for each in zip(*world.gather(work()), strict=True)]


def work(rounds: int) -> None:
    """Measure all cases on this rank, and print the medians."""
    world = sw.init(seed=0, device="cpu", quiet=True)
    torch.set_num_threads(1)
    for case, (shape, batch, steps) in CASES.items():
        dataset = Samples(shape, batch * steps * world.size)
        for workers in WORKERS:
            loaders = ways(world, dataset, batch, workers)
            times: dict[str, list[list[float]]] = {name: [] for name in loaders}
            for _ in range(rounds):
                for name, loader in loaders.items():
                    with torch.no_grad():  # the Loader expects steps of an engine otherwise
                        times[name].append(slowest(world, lambda loader=loader: read(loader)))
            for name, each in times.items():
                first, rest = (statistics.median(values) for values in zip(*each, strict=True))
                rate = (steps - 1) * batch * world.size / rest
                row = [world.size, case, workers, name, rate, first]
                world.print(f"result {json.dumps(row)}")


def main() -> None:
    """Start the ranks and print the table, or work as a rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default 2,4)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        work(options.rounds)
        return
    facts = machine.describe()
    print(f"`{facts['command']}`: {facts['machine']}, {facts['versions']}, {facts['date']}.")
    print("" if STATEFUL else "torchdata is not installed, so StatefulDataLoader is absent.\n")
    print("| ranks | samples | workers | loader | samples/s | ms to the first batch |")
    print("| --: | --- | --: | --- | --: | --: |")
    for size in options.ranks.split(","):
        command = [sys.executable, "-m", "shardwise", "run", "-n", size, "--quiet", __file__]
        command += ["--rank", "--rounds", str(options.rounds)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{done.stdout}{done.stderr}")
        for line in done.stdout.splitlines():
            if found := line.partition("result ")[2]:
                ranks, case, workers, name, rate, first = json.loads(found)
                print(
                    f"| {ranks} | {case} | {workers} | {name} | {rate:,.0f} | {1e3 * first:.1f} |"
                )


if __name__ == "__main__":
    main()
