"""Long sequences on several workers (--context): activations, peak memory, time, longest sequence.

    python benchmarks/context.py --json FILE                   # measure: ten minutes
    python benchmarks/context.py --show FILE                   # the tables of docs/context.md
    python benchmarks/context.py --show FILE --plot docs/context.png

A Llama-like model (half as many key heads as query heads) and the model of
examples/language_model.py train on one sequence per step. The contenders are one worker, one worker
that recomputes activations, 2 and 4 workers with both methods of --context, and torch's
`context_parallel`. Each contender starts again in each round and trains on the same sequence. Each
worker has one thread.

Activations are the bytes of the tensors that a forward pass leaves for the backward pass. The CPU
time of a step is the sum over all workers. Unlike the wall-clock time, it hardly depends on other
programs.

The longest sequence is searched with growing lengths until a worker's peak exceeds --limit MB. The
peak is that of all its tensors during a step, with its states and its part of shared memory, but
without Python and the libraries.
"""

import argparse
import functools
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import figure

RECOMPUTED = ("activations", "recomputed")
GATHERED = ("context_method", "gathered")
ULYSSES = ("context_method", "ulysses")


@dataclass
class Line:
    """A contender, and its figures for one model. Bytes are of the worker with the most."""

    model: str
    label: str
    size: int = 1
    settings: tuple[str, ...] = ()
    """Names and values of settings of a run, one after the other."""
    torch: bool = False
    activations: int = 0
    ms: list[float] = field(default_factory=list)
    """Median milliseconds per step of each round."""
    cpu_ms: list[float] = field(default_factory=list)
    """Median CPU milliseconds per step of each round, of all workers together."""
    loss: float | None = None
    note: str = ""
    peaks: dict[int, int] = field(default_factory=dict)
    """In the search for the longest sequence: the peak by length."""


def contenders(model: str, sizes: Sequence[int]) -> list[Line]:
    """Return the contenders for one model."""
    found = [Line(model, "one worker"), Line(model, "one worker, recomputed", 1, RECOMPUTED)]
    for size in sizes:
        context = ("context", str(size))
        found.append(Line(model, f"--context {size}, ulysses", size, (*context, *ULYSSES)))
        found.append(Line(model, f"--context {size}, gathered", size, (*context, *GATHERED)))
    peers = [Line(model, f"torch context_parallel, {n}", n, torch=True) for n in sizes[:1]]
    return found + (peers if model == "llama" else [])


def searched(sizes: Sequence[int]) -> list[Line]:
    """Return the contenders whose longest sequence is searched."""
    found = [Line("llama", "1 worker"), Line("llama", "1 worker, recomputed", 1, RECOMPUTED)]
    return found + [
        Line("llama", f"--context {size}", size, ("context", str(size), *ULYSSES)) for size in sizes
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and keep; with --show only print."""
    options = _parser().parse_args(arguments)
    if options.show:
        show(json.loads(options.show.read_text()), options.plot)
        return 0
    facts = figure.begin()
    lines = [each for model in options.models for each in contenders(model, options.sizes)]
    longest = searched(options.sizes) if options.limit else []
    method = {k: v for k, v in vars(options).items() if k not in ("json", "show", "plot")}

    def keep() -> None:
        results = {"lines": [asdict(x) for x in lines], "longest": [asdict(x) for x in longest]}
        figure.keep(options, facts, method=method, **results)

    for line in longest:
        print(f"longest: {line.label}", file=sys.stderr)
        words = ["--limit", options.limit, "--lengths", options.start, "--grain", options.grain]
        line.peaks = {each["length"]: each["peak"] for each in _run(line, options, words)[0]}
        keep()
    for number in range(options.rounds):
        # Another one begins each round, so that nobody always follows the same neighbour.
        by = number % len(lines)
        for line in [*lines[by:], *lines[:by]]:
            if not line.note:
                print(f"round {number + 1}: {line.model}, {line.label}", file=sys.stderr)
                _turn(line, options)
                keep()
    show({"machine": facts, "method": method, **_plain(lines, longest)}, options.plot)
    return 0


def _plain(lines: Sequence[Line], longest: Sequence[Line]) -> dict[str, object]:
    """Return the results as JSON would."""
    results = {"lines": [asdict(x) for x in lines], "longest": [asdict(x) for x in longest]}
    return json.loads(json.dumps(results))


def _turn(line: Line, options: argparse.Namespace) -> None:
    """Run a contender once, and add its figures."""
    words = ["--lengths", options.length, "--steps", options.steps, "--count"]
    ranks = _run(line, options, words)
    if not ranks:
        return
    first = [each[0] for each in ranks]
    line.activations = max(each["activations"] for each in first)
    line.loss = first[0]["losses"][-1]
    line.ms.append(1e3 * median(max(s) for s in zip(*(r["seconds"] for r in first), strict=True)))
    cpu = zip(*(r["cpu_seconds"] for r in first), strict=True)
    line.cpu_ms.append(1e3 * median(sum(each) for each in cpu))


def _run(line: Line, options: argparse.Namespace, words: Sequence[object]) -> list[list[dict]]:
    """Run a contender, and return each rank's figures by length. A failure becomes its note."""
    # Not at the top, because --show needs no torch.
    from torch import multiprocessing

    import context_worker
    import shardwise as sw

    sizes = {name: getattr(options, name) for name in ("width", "layers", "heads", "vocabulary")}
    sizes |= {"kv-heads": options.kv_heads, "model": line.model}
    flags = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    arguments = context_worker.arguments([*map(str, words), *flags])
    if not line.torch:
        settings = dict(zip(line.settings[::2], line.settings[1::2], strict=True))
        # Forks, which need not import torch again.
        start = functools.partial(sw.launch, start_method="fork", workers=line.size)
        return start(context_worker.measured, arguments, quiet=True, device="cpu", **settings)
    try:
        with tempfile.TemporaryDirectory(prefix="context-") as folder:
            multiprocessing.spawn(
                context_worker.measured_by_torch,
                (line.size, f"file://{folder}/store", arguments),
                nprocs=line.size,
            )
    except multiprocessing.ProcessRaisedException as error:
        line.note = _reason(str(error))
    return []


def _reason(output: str) -> str:
    """Return the last line of a traceback that names an error."""
    return re.findall(r"^\w+Error: .*$", output, re.MULTILINE)[-1]


def show(whole: dict, plot: Path | None) -> None:
    """Print the tables of a result file, and draw the plot."""
    facts, method = whole["machine"], whole["method"]
    figure.show(
        f"{facts['machine']}; {facts['system']}; {facts['versions']}; {facts['date']}; "
        f"commit {facts['commit']}; {method['rounds']} rounds of {method['steps']} steps",
        "",
        f"`{facts['command']}`",
    )
    for model in method["models"]:
        figure.show("", *_table([x for x in whole["lines"] if x["model"] == model], method))
    for note in dict.fromkeys(x["note"] for x in whole["lines"] if x["note"]):
        names = [f"{x['label']} ({x['model']})" for x in whole["lines"] if x["note"] == note]
        figure.show("", f"{', '.join(names)}: `{note}`")
    if whole["longest"]:
        figure.show("", *_longest_table(whole["longest"], method["limit"]))
        if plot:
            draw(whole["longest"], method["limit"], plot)


def _table(lines: Sequence[dict], method: dict) -> list[str]:
    """Return a Markdown table of one model's contenders."""
    measured = [x for x in lines if not x["note"]]
    whole = next(x for x in measured if x["label"] == "one worker")
    base = next(x for x in measured if x["label"] == "one worker, recomputed")
    timed = all(x["ms"] for x in measured)
    rows = []
    for x in lines:
        if x["note"]:
            rows.append([x["label"], "refused"])
            continue
        part = x["size"] * x["activations"] / whole["activations"]
        rows.append(
            [
                x["label"],
                figure.number(x["activations"], ".1f", figure.MB),
                f"{part:.2f}" if x["size"] > 1 else "",
                *(cell for name in ("ms", "cpu_ms") if timed for cell in _times(x, base, name)),
                figure.number(x["loss"], ".4f"),
            ]
        )
    title = f"{lines[0]['model']}, {method['length']} tokens"
    head = [title, "activations, MB/worker", "x workers / one"]
    head += ["ms/step", "x recomputed", "CPU ms/step", "x recomputed"] if timed else []
    return figure.table([*head, "loss"], rows)


def _times(line: dict, base: dict, name: str) -> list[str]:
    """Return the milliseconds of a contender, and the ratio to `base`."""
    return [figure.milliseconds(median(line[name])), _ratio(line[name], base[name])]


def _ratio(some: Sequence[float], others: Sequence[float]) -> str:
    """Return the median over rounds of the ratios within each round."""
    # A run that was stopped has fewer rounds of some contenders.
    return f"{median(a / b for a, b in zip(some, others, strict=False)):.2f}"


def fitting(line: dict, limit: float) -> int:
    """Return the longest measured length whose peak is at most `limit` MB."""
    return max((int(n) for n, peak in line["peaks"].items() if peak <= limit * 1e6), default=0)


def _longest_table(lines: Sequence[dict], limit: float) -> list[str]:
    base = fitting(lines[0], limit)
    start = min(map(int, lines[0]["peaks"]))
    rows = [
        [
            x["label"],
            figure.number(x["peaks"][str(start)], ".1f", figure.MB),
            f"{fitting(x, limit):,}",
            f"{fitting(x, limit) / base:.2f}",
        ]
        for x in lines
    ]
    peak = f"peak with {start} tokens, MB/worker"
    return figure.table(["llama", peak, f"longest with {limit:g} MB, tokens", "x 1 worker"], rows)


def draw(lines: Sequence[dict], limit: float, path: Path) -> None:
    """Draw each contender's peak memory by sequence length, and the limit."""
    from plot import pyplot
    from shardwise.tools.report.look import GRID, STYLE, TITLES

    colors = {"1 worker": "#6b7480", "1 worker, recomputed": "#b08d1e"}
    ours = iter(("#2563a8", "#d9622b", "#2a8a57"))
    with pyplot.rc_context(STYLE | GRID | TITLES | {"font.size": 10}):
        drawing, axes = pyplot.subplots(figsize=(7.5, 4.2), layout="constrained")
        for line in lines:
            color = colors.get(line["label"]) or next(ours)
            points = sorted((int(n), peak / 1e6) for n, peak in line["peaks"].items())
            label = f"{line['label']}: {fitting(line, limit):,} tokens"
            axes.plot(*zip(*points, strict=True), "o-", color=color, markersize=4, label=label)
        axes.axhline(limit, color="#b42318", linewidth=1.2, linestyle="--")
        axes.text(0.01, 1.01 * limit, f"limit: {limit:g} MB", transform=axes.get_yaxis_transform())
        axes.set_xlabel("tokens per sequence")
        axes.set_ylabel("peak of a worker's tensors, MB")
        axes.set_title("Longest sequence under a memory limit")
        axes.legend(frameon=False, loc="lower right")
        drawing.savefig(path, dpi=150)
        pyplot.close(drawing)


def _parser() -> argparse.ArgumentParser:
    parser = figure.parser(__doc__)
    add = parser.add_argument
    add("--show", type=Path, metavar="FILE", help="print the tables of this file, and measure none")
    add("--plot", type=Path, metavar="FILE", help="draw the longest sequences")
    add("--models", type=figure.words, default=["llama", "gpt"], help="llama,gpt")
    add("--sizes", type=figure.numbers, default=[2, 4], help="numbers of workers: 2,4")
    add("--length", type=figure.positive, default=1024, help="tokens of a sequence: 1024")
    add("--rounds", type=figure.positive, default=1, help="turns of each contender: 1")
    add("--steps", type=figure.positive, default=3, help="measured steps per round: 3")
    add("--limit", type=float, default=80, metavar="MB", help="peak of a worker: 80; 0: none")
    add("--start", type=figure.positive, default=512, help="first length of the search: 512")
    add("--grain", type=figure.positive, default=128, help="tokens between two lengths: 128")
    add("--width", type=figure.positive, default=128, help="128")
    add("--layers", type=figure.positive, default=4, help="4")
    add("--heads", type=figure.positive, default=8, help="8")
    add("--kv-heads", type=figure.positive, default=4, help="of the llama: 4")
    add("--vocabulary", type=figure.positive, default=512, help="512")
    return parser


if __name__ == "__main__":
    sys.exit(main())
