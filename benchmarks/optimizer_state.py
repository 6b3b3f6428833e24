"""The loss and the memory of a training with optimizer state in 8 bits and in full precision.

    python benchmarks/optimizer_state.py [--steps 2000] [--width 64] [--layers 2] [--rates 4e-3]

examples/language_model.py trains on one worker at each rate, from the same weights and on the same
batches: in fp32 with each state, and in bf16 with masters and with stochastic rounding. `--runs`
chooses some of them. The table shows the mean loss of the last tenth of the steps, the loss on the
held-out text, and the size of the states that the run prints. The last lines are the time of
`engine.step` for a layer of --numel parameters, and the CPU time of torch's AdamW on one tensor of
this size, fused and compiled: medians of updates in turns. `--steps 0` measures only that.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

import torch

import figure
import shardwise as sw

EXAMPLE = Path(__file__).parents[1] / "examples" / "language_model.py"
STATES = ("full", "8bit")
RUNS = {
    "fp32": [],
    "8bit": ["--optimizer-state=8bit"],
    "8bit-bf16": ["--precision=bf16", "--optimizer-state=8bit-bf16"],
    "bf16": ["--precision=bf16"],
    "bf16,8bit": ["--precision=bf16", "--optimizer-state=8bit"],
}
"""Flags of `shardwise run`. Losses are compared with the first."""


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
    parser.add_argument("--steps", type=int, default=2000, metavar="N")
    sizes = {"layers": 2, "width": 64, "context": 64, "batch_size": 16}
    figure.add_numbers(parser, sizes | {"vocabulary": 512, "numel": 4 * 2**20})
    parser.add_argument("--rates", type=figure.floats, default=[4e-3], metavar="X,Y")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=[*RUNS], metavar="NAME")
    parser.add_argument("--data", type=Path, help="a text (default: Python's library)")
    options = parser.parse_args(arguments)
    facts = figure.begin()
    words = figure.as_flags(options, ("steps", *sizes, "vocabulary"))
    words += [] if options.data is None else [f"--data={options.data}"]
    runs = {name: RUNS[name] for name in RUNS if name == "fp32" or name in options.runs}
    rows: list[list[str]] = []
    figures: dict[str, dict[str, object]] = {}
    for rate in options.rates if options.steps else ():
        found = {}
        for name, flags in runs.items():
            found[name] = _train(flags, [*words, f"--lr={rate}"])
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
        for state, run in found.items():
            ratio = [run.loss / found["fp32"].loss, run.held_out / found["fp32"].held_out]
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
    if rows:
        figure.show(*figure.table(head, rows), "")
    ms = _updates(options.numel)
    told = ", ".join(f"{state} {figure.milliseconds(value)} ms" for state, value in ms.items())
    figure.show(f"update of {options.numel:,} parameters: {told} (x {ms['8bit'] / ms['full']:.1f})")
    plain = _plain_updates(options.numel)
    told = ", ".join(f"{name} {figure.milliseconds(value)} ms" for name, value in plain.items())
    figure.show(f"torch's AdamW on {options.numel:,} parameters, CPU time: {told}")
    figure.keep(options, facts, runs=figures, update_ms=ms, plain_update_ms=plain)
    return 0


def _updates(numel: int) -> dict[str, float]:
    """Return the milliseconds of an update with AdamW, by state."""
    torch.set_num_threads(1)
    sw.init(seed=0, quiet=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engines = {}
    for state in STATES:
        model = torch.nn.Linear(1024, numel // 1024, bias=False, device=device)
        optimizer = torch.optim.AdamW(model.parameters())
        engines[state] = model, sw.Engine(model, optimizer, optimizer_state=state)
    seconds: dict[str, list[float]] = {state: [] for state in STATES}
    for _ in range(12):
        for state, (model, engine) in engines.items():
            engine.backward(model(torch.ones(1, 1024, device=device)).square().mean())
            if device.type == "cuda":
                torch.cuda.synchronize()
            begun = time.perf_counter()
            engine.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[state].append(time.perf_counter() - begun)
    return {state: median(values[2:]) * 1e3 for state, values in seconds.items()}


def _plain_updates(numel: int) -> dict[str, float]:
    """Return the milliseconds of CPU time of an update of one tensor, and of a copy.

    The copy reads and writes as many bytes as the update: it reads four tensors and writes three.
    """
    updates: dict[str, Callable[[], object]] = {}
    for name, options in {"fused": {"fused": True}, "compiled": {"foreach": True}}.items():
        parameter = torch.nn.Parameter(torch.randn(numel))
        parameter.grad = torch.randn(numel)
        step = torch.optim.AdamW([parameter], **options).step
        updates[name] = torch.compile(step) if name == "compiled" else step
    source = torch.randn(numel * 7 // 2)
    target = torch.empty_like(source)
    updates["copy"] = lambda: target.copy_(source)
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    for _ in range(22):
        for name, update in updates.items():
            begun = time.process_time()
            update()
            seconds[name].append(time.process_time() - begun)
    return {name: median(values[2:]) * 1e3 for name, values in seconds.items()}


def _train(flags: Sequence[str], words: Sequence[str]) -> Trained:
    """Train the example once, with these flags of `shardwise run`."""
    with tempfile.TemporaryDirectory(prefix="optimizer-state-") as folder:
        command = [sys.executable, "-m", "shardwise", "run", "-n", "1", *flags]
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
