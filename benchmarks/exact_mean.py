"""Gradients of the mean over all items, by each library's default and with exact_mean=True.

    python benchmarks/exact_mean.py --ranks 2 --json benchmarks/results/today-exact-mean.json

Steps have 16 rows in two micro-batches, and the last one 5 rows. Rows differ in their number of
labels. Each figure is the norm of a step's gradient, divided by the norm in plain PyTorch with the
whole batch at once: 1 is right. The learning rate is 0, so that all steps have the same weights.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import figure
from exact_mean_worker import CASES

WORKER = Path(__file__).with_name("exact_mean_worker.py")
RIGHT = 1e-5
"""Norms that differ by less, relative to 1, differ by rounding only."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if a mean of exact_mean is not exact."""
    parser = figure.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", choices=(2, 4))
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES, metavar="CASE")
    options = parser.parse_args(arguments)
    facts = figure.begin()
    ranks = str(options.ranks)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    shardwise = ["-m", "shardwise", "run", "-n", ranks, "--zero", "3", "--device", "cpu"]
    right = _norms([], "plain", options.cases)
    found = {
        "one": _norms([], "stock", options.cases),
        "stock": _norms(torchrun, "stock", options.cases, options.ranks),
        "ours": _norms(shardwise, "ours", options.cases, options.ranks),
    }
    over = {
        case: {
            who: [a / b for a, b in zip(norms[case], right[case], strict=True)]
            for who, norms in found.items()
        }
        for case in options.cases
    }
    rows = []
    for name, lines in over.items():
        cells = [", ".join(map(_shown, lines[who])) for who in found]
        rows.append([CASES[name].by, CASES[name].label, *cells])
    heads = ["one process", f"DDP, {ranks} ranks", f"`exact_mean=True`, ZERO_3, {ranks} ranks"]
    figure.show(*figure.table(["by", "loss", *heads], rows))
    figure.keep(options, facts, ranks=options.ranks, cases=over)
    return int(any(abs(x - 1) > RIGHT for lines in over.values() for x in lines["ours"]))


def _norms(
    launcher: list[str], who: str, cases: Sequence[str], ranks: int = 1
) -> dict[str, list[float]]:
    """Return the norms of the steps by case."""
    variables = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "true",
        "SIZE": str(ranks),
    }
    with tempfile.TemporaryDirectory(prefix="exact-mean-") as folder:
        found: dict[str, dict[str, list[float]]] = figure.result_of(
            [sys.executable, *launcher, str(WORKER), who, *cases],
            env=os.environ | variables,
            cwd=folder,  # the Trainer and Lightning write folders where they run
        )
    return found["norms"]


def _shown(ratio: float) -> str:
    """Return 1 if it is right, within the rounding of fp32."""
    return "1" if abs(ratio - 1) < RIGHT else f"{ratio:.3f}"


if __name__ == "__main__":
    sys.exit(main())
