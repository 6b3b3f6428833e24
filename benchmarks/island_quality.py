"""Held-out perplexity of islands and of synchronous training, after the same tokens.

    python benchmarks/island_quality.py --json FILE                                    # a night
    python benchmarks/island_quality.py --tokens 614400 --batch-size 16 --context 64 \\
        --vocabulary 512 --layers 2 --width 64 --rarely 100,300 --rates 3e-3,1e-2 --seeds 0

A GPT learns the source text of the standard library (examples/diloco.py) on two islands with one
worker each. All ways are tuned in the same manner: each trains at all --rates with the first seed,
and with the other seeds at the best rate. The second way is synchronous training with a batch that
is --every times as large: it sends as many bytes as islands with fp32, in fewer steps. The
perplexity is measured on the common parameters, so the number of steps, --tokens / (--batch-size x
--context), must be a multiple of --every and of all --rarely. The defaults make 45 trials. A run
that was interrupted continues from its --json.
"""

import argparse
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean

import figure

EXAMPLES = Path(__file__).parents[1] / "examples"


@dataclass
class Way:
    """One way to train: the flags of the run, how many times larger its batch is, and the
    perplexity of each trial, by rate and seed."""

    label: str
    flags: list[str] = field(default_factory=list)
    larger: int = 1
    found: dict[str, float] = field(default_factory=dict)
    rate: float | None = None
    """The best one."""

    def perplexity(self, seeds: Sequence[int]) -> float | None:
        """The mean over the seeds at the best rate; None until all are there."""
        values = [self.found.get(trial(self.rate, seed)) for seed in seeds]
        known = [value for value in values if value is not None]
        return mean(known) if len(known) == len(seeds) else None


def trial(rate: float | None, seed: int) -> str:
    """The name of a trial in files."""
    return f"rate {rate:g}, seed {seed}" if rate else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train in every way, print and keep."""
    options = _parser().parse_args(arguments)
    facts, found = figure.begin(), ways(options)
    _continue(found, options)
    method = {k: v for k, v in vars(options).items() if k not in ("json", "data")}
    with tempfile.TemporaryDirectory(prefix="island-quality-") as folder:
        text = _read_text(Path(folder), options)
        for way in found:
            for rate in options.rates:
                _try(way, rate, options.seeds[0], text, options)
            first = {rate: way.found[trial(rate, options.seeds[0])] for rate in options.rates}
            way.rate = min(options.rates, key=lambda rate: first[rate])
            figure.keep(options, facts, method=method, ways=[asdict(way) for way in found])
        for seed in options.seeds[1:]:
            for way in found:
                assert way.rate is not None
                _try(way, way.rate, seed, text, options)
                figure.keep(options, facts, method=method, ways=[asdict(way) for way in found])
    figure.show("", *_table(found, options))
    return 0


def ways(options: argparse.Namespace) -> list[Way]:
    """Synchronous first, also with the larger batch."""
    found = [Way("synchronous")]
    found.append(Way(f"synchronous, batch x {options.every}", larger=options.every))
    mean_outside = _islands(options.every, "fp32", "mean")
    mean_outside.label += ", mean"
    found.append(mean_outside)
    found += [_islands(options.every, wire, options.outer) for wire in options.wires]
    found += [_islands(every, "fp32", options.outer) for every in options.rarely]
    return found


def _islands(every: int, wire: str, outer: str) -> Way:
    flags = ["--islands", "2", "--equal-every", str(every), "--outer", outer]
    flags += [] if wire == "fp32" else ["--wire", wire]
    return Way(f"islands, H {every}, {wire}", flags)


def _continue(found: Sequence[Way], options: argparse.Namespace) -> None:
    """Take the trials that --json already has from an interrupted run with the same sizes."""
    if not options.json or not options.json.exists():
        return
    written = json.loads(options.json.read_text())
    if any(written["method"][name] != vars(options)[name] for name in SIZES):
        return
    known = {way["label"]: way["found"] for way in written["ways"]}
    for way in found:
        way.found = known.get(way.label, {})


SIZES = ("tokens", "batch_size", "context", "vocabulary", "layers", "width", "held_out", "outer")
"""Flags without which a trial is another one."""


def _read_text(folder: Path, options: argparse.Namespace) -> Path:
    """The text and its tokens, made once for all trials."""
    sys.path.insert(0, str(EXAMPLES))
    from helpers import corpus

    path = folder / "corpus.pickle"
    path.write_bytes(pickle.dumps(corpus.read(options.data, vocabulary=options.vocabulary)))
    return path


def _try(way: Way, rate: float, seed: int, text: Path, options: argparse.Namespace) -> None:
    """Run one trial, unless the result file has it."""
    if trial(rate, seed) in way.found:
        return
    result = text.with_name("result.json")
    batch = options.batch_size * way.larger
    own = {
        "--corpus": text,
        "--result": result,
        "--tokens": options.tokens,
        "--batch-size": batch,
        "--context": options.context,
        "--layers": options.layers,
        "--width": options.width,
        "--lr": rate,
        "--seed": seed,
        "--held-out": options.held_out,
        "--evaluations": 1,
    }
    words = [str(word) for pair in own.items() for word in pair]
    run = [sys.executable, "-m", "shardwise", "run", "-n", "2", "--quiet", *way.flags]
    script = str(EXAMPLES / "diloco.py")
    # A setting of the caller would change the islands' runs and not the synchronous ones.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SHARDWISE_")}
    subprocess.run([*run, script, *words], env=environ | {"OMP_NUM_THREADS": "1"}, check=True)
    found = math.exp(json.loads(result.read_text())["curve"][-1]["loss"])
    way.found[trial(rate, seed)] = found
    figure.show(f"{way.label}, {trial(rate, seed)}: perplexity {found:.3f}")


def _table(found: Sequence[Way], options: argparse.Namespace) -> list[str]:
    base, rows = found[0].perplexity(options.seeds), []
    for way in found:
        value = way.perplexity(options.seeds)
        change = f"{value / base - 1:+.1%}" if value and base else ""
        each = [way.found[trial(way.rate, seed)] for seed in options.seeds]
        seeds = " ".join(f"{one:.2f}" for one in each)
        rows.append([way.label, f"{way.rate:g}", figure.number(value, ".3f"), change, seeds])
    title = f"held-out perplexity after {options.tokens} tokens, seeds {options.seeds}"
    return figure.table([title, "rate", "perplexity", "over synchronous", "by seed"], rows)


def _parser() -> argparse.ArgumentParser:
    parser = figure.parser(__doc__)
    add = parser.add_argument
    add("--data", type=Path, metavar="PATH", help="text; the standard library's")
    add("--tokens", type=int, default=1_536_000, help="1,536,000")
    add("--batch-size", type=int, default=8, help="windows, of all islands: 8")
    add("--context", type=int, default=128)
    add("--vocabulary", type=int, default=2048)
    add("--layers", type=int, default=6)
    add("--width", type=int, default=256, help="256: 5.2M parameters in 6 layers")
    add("--every", type=int, default=30, metavar="H", help="30")
    add("--wires", type=figure.words, default=["fp32", "bf16", "int8", "int4"], metavar="W")
    add("--rarely", type=figure.numbers, default=[100, 500], metavar="H,...")
    add("--outer", default="nesterov:0.7,0.9")
    add("--rates", type=figure.floats, default=[1e-3, 2e-3, 4e-3])
    add("--seeds", type=figure.numbers, default=[0, 1, 2])
    add("--held-out", type=int, default=512, metavar="N", help="windows: 512")
    return parser


if __name__ == "__main__":
    sys.exit(main())
