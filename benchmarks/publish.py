"""Time of engine.publish next to gathering on rank 0: shardwise run -n 4 --zero 3 publish.py.

Both write the same weights in bf16 as one safetensors folder, alternately. The gather is what
training loops do otherwise: full parameters on every rank, converted and saved by rank 0.
"""

import argparse
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

import shardwise as sw


def timed(world: sw.World, action: Callable[[], object]) -> float:
    """Return the seconds until all ranks have finished `action`."""
    world.barrier()
    began = time.perf_counter()
    action()
    world.barrier()
    return time.perf_counter() - began


def main() -> None:
    """Measure, and print medians on the main rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024, help="width of a layer (default 1024)")
    parser.add_argument("--layers", type=int, default=48, help="number of layers (default 48)")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each (default 5)")
    words = parser.parse_args()
    world = sw.init(seed=0)
    layers = [nn.Linear(words.width, words.width) for _ in range(words.layers)]
    model = nn.Sequential(*layers)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    home = world.broadcast_object(tempfile.mkdtemp(prefix="publish-") if world.is_main else None)
    folder = Path(home)

    def gather() -> None:
        with engine.full_parameters():
            if world.is_main:
                state = {n: v.detach().to(torch.bfloat16) for n, v in model.state_dict().items()}
                safetensors.torch.save_file(state, folder / "gathered.safetensors")
                with (folder / "gathered.safetensors").open("rb") as file:
                    os.fsync(file.fileno())

    def change(number: int) -> None:
        x = torch.randn(1, words.width, generator=torch.Generator().manual_seed(number))
        engine.backward(model(x).square().mean())
        engine.step()

    actions: dict[str, Callable[[], object]] = {
        "gather on rank 0": gather,
        "publish": lambda: engine.publish(folder / "all", torch.bfloat16, only_changed=False),
        "publish, only_changed": lambda: engine.publish(folder / "changed", torch.bfloat16),
    }
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(words.repeats + 1):
        for name, action in actions.items():
            # Every version differs from the one before, so that nothing is skipped.
            change(number)
            seconds[name] += [timed(world, action)] if number else [timed(world, action)][1:]
    if world.is_main:
        count = sum(p.numel() for p in model.parameters())
        print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, ", end="")
        print(f"torch {torch.__version__}, {world.size} ranks, {count / 1e6:.0f} M parameters")
        first = statistics.median(seconds["gather on rank 0"])
        for name, times in seconds.items():
            median = statistics.median(times)
            print(f"{name:24} {median:.2f} s ({min(times):.2f} to {max(times):.2f}), ", end="")
            print(f"{median / first:.2f} of the gather")
        shutil.rmtree(folder)
    engine.close()


main()
