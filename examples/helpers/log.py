"""The log of a training run: progress, metrics.jsonl and TensorBoard events.

A terminal shows a progress bar, other outputs a line every few seconds. The files are written
during training, so a run can be followed, and its figures remain if it is stopped. Only the main
rank writes.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The result of an evaluation on held-out text.

    `loss` is in nats per token. Bits per byte do not depend on the tokenizer.
    """

    loss: float
    bytes_per_token: float

    @property
    def perplexity(self) -> float:
        """The perplexity per token."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """The mean number of bits per byte of the text."""
        return self.loss / math.log(2) / self.bytes_per_token

    def __str__(self) -> str:
        return f"perplexity {self.perplexity:,.1f} · {self.bits_per_byte:.3f} bits per byte"


@dataclass
class Curves:
    """The figures of a run, each with the step after which it was measured."""

    losses: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, HeldOut]] = field(default_factory=list)


class Log:
    """Shows a run of `steps` steps, and writes its files into `folder`, replacing earlier ones.

    It is a context manager. `step`, `seconds` and `tokens` count training without evaluations.
    """

    def __init__(self, folder: Path, steps: int, *, visible: bool) -> None:
        self.folder = folder
        self.steps = steps
        self.curves = Curves()
        self.step = 0
        self.tokens = 0.0
        self.seconds = 0.0
        self._pace = 0.0
        self._lap = self._last_line = time.monotonic()
        self._console = Console(quiet=not visible, highlight=False, markup=False)
        self._bar = bar(self._console) if visible and self._console.is_terminal else None
        self._jsonl: TextIO | None = None
        self._tensorboard: Any = None
        if visible:
            folder.mkdir(parents=True, exist_ok=True)
            self._jsonl = (folder / "metrics.jsonl").open("w")
            self._tensorboard = self._open_tensorboard(folder / "tensorboard")

    def __enter__(self) -> Log:
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task("", total=self.steps, figures="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for part in (self._jsonl, self._tensorboard):
            if part:
                part.close()
        if self._bar:
            self._bar.stop()

    def trained(self, *, loss: float, tokens: float, **figures: float) -> None:
        """Record a step on `tokens` tokens. `figures` are other measured values."""
        now = time.monotonic()
        taken, self._lap = now - self._lap, now
        rate = tokens / taken
        self._pace = 0.9 * self._pace + 0.1 * rate if self.step else rate
        self.step += 1
        self.tokens += tokens
        self.seconds += taken
        self.curves.losses.append((self.step, loss))
        self._record("train", {"loss": loss, "tokens_per_second": rate} | figures)
        self._show(f"loss {loss:.3f} · {self._pace:,.0f} tok/s · {resident_bytes() / 1e6:,.0f} MB")

    def evaluated(self, result: HeldOut) -> None:
        """Record an evaluation. The time since the last step does not count as training."""
        self._lap = time.monotonic()
        self.curves.held_out.append((self.step, result))
        figures = {"loss": result.loss, "perplexity": result.perplexity}
        self._record("held_out", figures | {"bits_per_byte": result.bits_per_byte})
        self.say(f"step {self.step:>4}/{self.steps} · held out: {result}")

    def say(self, what: RenderableType) -> None:
        """Print something, above the bar if there is one."""
        self._console.print(what, soft_wrap=isinstance(what, str))

    def _show(self, figures: str) -> None:
        if self._bar:
            self._bar.update(self._task, completed=self.step, figures=figures)
        elif self._lap - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = self._lap
            self.say(f"step {self.step:>4}/{self.steps} · {figures}")

    def _record(self, of: str, figures: dict[str, float]) -> None:
        if self._jsonl:
            row = {"step": self.step} | {f"{of}/{name}": value for name, value in figures.items()}
            self._jsonl.write(json.dumps(row) + "\n")
            self._jsonl.flush()
        if self._tensorboard:
            for name, value in figures.items():
                self._tensorboard.add_scalar(f"{of}/{name}", value, self.step)

    def _open_tensorboard(self, folder: Path) -> Any:
        try:
            # Imported here, because the import takes a second and only the main rank needs it.
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.say("no TensorBoard events are written: pip install tensorboard to get them")
            return None
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        return SummaryWriter(str(folder))


def bar(console: Console) -> Progress:
    """Return a progress bar on a single line of 80 columns. The figures shorten the bar."""
    return Progress(
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(compact=True),
        console=console,
        expand=True,
        transient=True,
    )


def resident_bytes() -> int:
    """Return the resident set of this process, or its peak if only that is known."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
