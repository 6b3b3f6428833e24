"""The loss and the memory of a training with optimizer state in 8 bits and in full precision.

    python benchmarks/optimizer_state.py [--steps 2000] [--width 64] [--layers 2] [--rates 4e-3]

examples/language_model.py trains on one worker at each rate, with `--optimizer-state full` and with
`8bit`, from the same weights and on the same batches. The table shows the mean loss of the last
tenth of the steps, the loss on the held-out text, and what the run says about its states.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import figure

EXAMPLE = Path(__file__).parents[1] / "examples" / "language_model.py"
STATES = ("full", "8bit")


@dataclass
class Trained:
    """The figures of one run. `states` is the size of its three states, as the run prints it."""

    loss: float
    held_out: float
    seconds: float
    states: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with each state at each rate, and print one table."""
    parser = figure.parser(__doc__)
    sizes = {"steps": 2000, "layers": 2, "width": 64, "context": 64, "batch_size": 16}
    for name, value in (sizes | {"vocabulary": 512}).items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=figure.positive, default=value, metavar="N")
    parser.add_argument("--rates", type=figure.floats, default=[4e-3], metavar="X,Y")
    parser.add_argument("--data", type=Path, help="a text (default: Python's library)")
    options = parser.parse_args(arguments)
    facts = figure.begin()
    words = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in sizes]
    words += [f"--vocabulary={options.vocabulary}"]
    words += [] if options.data is None else [f"--data={options.data}"]
    rows: list[list[str]] = []
    figures: dict[str, dict[str, object]] = {}
    for rate in options.rates:
        found = {state: _train(state, [*words, f"--lr={rate}"]) for state in STATES}
        for state, run in found.items():
            ratio = [run.loss / found["full"].loss, run.held_out / found["full"].held_out]
            rows.append(
                [
                    f"{state}, rate {rate:g}",
                    f"{run.loss:.4f} ({ratio[0] - 1:+.2%})",
                    f"{run.held_out:.4f} ({ratio[1] - 1:+.2%})",
                    run.states,
                    f"{run.seconds:.0f}",
                ]
            )
            figures[f"{state} {rate:g}"] = asdict(run)
        figure.keep(options, facts, runs=figures)
    title = f"{options.steps:,} steps, {options.layers} layers of {options.width}"
    head = [title, "loss", "held out", "states of a worker", "seconds"]
    figure.show(*figure.table(head, rows))
    return 0


def _train(state: str, words: Sequence[str]) -> Trained:
    """Train the example once."""
    with tempfile.TemporaryDirectory(prefix="optimizer-state-") as folder:
        command = [sys.executable, "-m", "shardwise", "run", "-n", "1", "--optimizer-state", state]
        command += [str(EXAMPLE), *words, "--minutes=600", "--evaluate-every=500", "--sample=1"]
        done = subprocess.run(
            [*command, f"--out={folder}"], check=True, capture_output=True, text=True
        )
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    rates = [row["train/tokens_per_second"] for row in rows if "train/loss" in row]
    sizes = dict(word.removeprefix("--").split("=") for word in words)
    tokens = int(sizes["batch-size"]) * int(sizes["context"])
    said = re.search(r"state ([\d.]+ \w+) per worker", done.stdout + done.stderr)
    assert said is not None, done.stdout
    return Trained(
        loss=mean(losses[-max(1, len(losses) // 10) :]),
        held_out=[row["held_out/loss"] for row in rows if "held_out/loss" in row][-1],
        seconds=sum(tokens / rate for rate in rates),
        states=said[1],
    )


if __name__ == "__main__":
    sys.exit(main())
