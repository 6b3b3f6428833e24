"""Two of four workers are killed, and the loss curve shows nothing: `python examples/recovery.py`.

    python examples/recovery.py

It trains a classifier of handwritten digits twice: with one worker, and with four of which two are
killed. It prints the largest relative difference of the losses, and draws both curves into
runs/recovery/recovery.png.

Both runs are started with `shardwise run`. The second one has `--survive 1 --zero 2`, so that each
worker owns a quarter of the optimizer state, and holds the second copy of another quarter.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

FOLDER = Path("runs/recovery")
KILLS = {1: 40, 2: 90}
"""Rank at the start of the run -> number of steps after which it is killed."""


def train(path: Path, *, kills: bool) -> None:
    """Train, and write the loss of each step to `path`. Workers of KILLS die if `kills` is true."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    import shardwise as sw

    world = sw.init(seed=0, precision="fp64")
    dies_at = KILLS.get(world.rank) if kills else None
    digits = load_digits()
    dataset = torch.utils.data.TensorDataset(
        torch.tensor(digits.data / 16), torch.tensor(digits.target)
    )
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).double()
    engine = sw.Engine(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
    loader = sw.Loader(dataset, batch_size=36, shuffle=True)
    losses = []
    for _ in loader.epochs(3):
        for step in loader.steps():
            for x, y in step:
                loss = nn.functional.cross_entropy(model(x), y)
                if engine.steps == dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                engine.backward(loss)
            losses.append(engine.step().loss)
    if world.is_main:
        path.write_text(json.dumps(losses))


def draw(alone: list[float], survived: list[float], path: Path) -> None:
    """Draw both curves."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    steps = range(1, len(alone) + 1)
    axes.plot(steps, alone, color="0.7", linewidth=5, label="one worker")
    axes.plot(steps, survived, color="C0", linewidth=1.2, label="four workers, two are killed")
    left = 4
    for step in sorted(KILLS.values()):
        left -= 1
        axes.axvline(step + 1, color="C3", linewidth=1, linestyle="--")
        axes.annotate(
            f"{left} workers left",
            (step + 1, max(alone)),
            xytext=(4, -8),
            textcoords="offset points",
            color="C3",
            fontsize=9,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend(loc="center right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run both trainings, compare their losses and draw them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    curves = []
    for name, flags in [
        ("alone", ["-n", "1"]),
        ("survived", ["-n", "4", "--survive", "1", "--zero", "2"]),
    ]:
        path = FOLDER / f"{name}.json"
        words = [sys.executable, "-m", "shardwise", "run", *flags, "--device", "cpu"]
        subprocess.run([*words, __file__, "--train", str(path)], check=True)
        curves.append(json.loads(path.read_text()))
    alone, survived = curves
    differences = [abs(a - b) / abs(a) for a, b in zip(alone, survived, strict=True)]
    print(f"largest relative difference of {len(alone)} losses: {max(differences):.1e}")
    draw(alone, survived, FOLDER / "recovery.png")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        target = Path(sys.argv[2])
        train(target, kills=target.stem == "survived")
    else:
        main()
