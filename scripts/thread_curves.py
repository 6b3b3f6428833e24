"""Train scripts of examples/mistakes/threads with and without their mistake, and draw the losses.

    python scripts/thread_curves.py

Writes docs/pictures/thread_losses.svg. Each script runs on 2 ranks, and prints its loss by step.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from pictures import CARD, FOLDER, INK

THREADS = FOLDER.parents[1] / "examples" / "mistakes" / "threads"
SHOWN = {
    "01_expert_gradients": "expert gradients x 2",
    "03_norm_without_experts": "norm without experts",
    "06_token_means": "means of micro-batches",
    "07_offloaded_gradients": "3 of 4 micro-batches dropped",
}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
RIGHT, WRONG = "#4c78a8", "#e4572e"


def losses(script: Path, *words: str) -> list[float]:
    """Run a script on 2 ranks and return the losses that it prints."""
    ran = subprocess.run(
        [sys.executable, *TORCHRUN, str(script), *words],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return [float(value) for value in re.findall(r"^loss (\S+)$", ran.stdout, re.M)]


def main() -> None:
    """Draw one picture with a curve of each script, with and without the mistake."""
    matplotlib.rcParams["svg.hashsalt"] = "shardwise"  # equal files from run to run
    figure, panels = plt.subplots(1, len(SHOWN), figsize=(9.6, 2.5), facecolor=CARD)
    for axes, (name, title) in zip(panels, SHOWN.items(), strict=True):
        script = THREADS / f"{name}.py"
        axes.plot(losses(script, "--right"), color=RIGHT, lw=2.2, alpha=0.7, label="right")
        axes.plot(losses(script), color=WRONG, lw=1.0, label="with the mistake")
        axes.set_title(title, size=9, color=INK)
        axes.set_facecolor(CARD)
        axes.tick_params(labelsize=7)
        axes.set_xlabel("step", size=8)
    panels[0].set_ylabel("loss", size=8)
    panels[0].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(FOLDER / "thread_losses.svg", facecolor=CARD, metadata={"Date": None})


if __name__ == "__main__":
    main()
