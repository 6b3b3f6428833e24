"""Whole updates on each tier: what offload.py times beside its sweeps.

An update begins when the gradients are there and ends when nothing is left to be written. What is
between two updates, the forward and backward of a few tokens, is not timed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median

from rich.box import SIMPLE
from rich.table import Table

from contenders import Contender
from crew import Crew, CrewFailed, NotInstalled
from figures import update_times
from report import milliseconds
from workloads import Gpt

WARM_UP = 3
"""Updates before any is timed: moments appear in the first, which also writes every block of a
file for the first time."""

TOUCHED = 28
"""Bytes per parameter that AdamW in fp32 reads and writes, wherever they lie: parameter, gradient
and two moments in, all but the gradient out."""

FUSED = "fused-flat"
"""What ratios of updates are taken against."""


@dataclass
class Line:
    """One contender; by repeat, the median update in `ms` and the bytes per second that its ranks
    moved to and from disks in its updates. `note` says why there is nothing."""

    key: str
    label: str
    ms: list[float] = field(default_factory=list)
    disk: list[float] = field(default_factory=list)
    note: str = ""


class Updates:
    """The contenders, started one after the other and then asleep between their turns."""

    def __init__(self, contenders: Sequence[Contender], workload: Gpt, ranks: int) -> None:
        self._contenders = {contender.key: contender for contender in contenders}
        self._workload = workload
        self._ranks = ranks
        self._crews: dict[str, Crew] = {}
        self.lines = {c.key: Line(c.key, c.label) for c in contenders}

    @contextmanager
    def started(self, limit: float, told: Callable[[str], None]) -> Iterator[None]:
        """Have all crews alive, warmed up; `told` hears of each before it starts."""
        with ExitStack() as alive:
            for key, contender in self._contenders.items():
                told(contender.label)
                with self._noting(key):
                    crew = Crew(contender, self._workload, self._ranks, limit)
                    self._crews[key] = alive.enter_context(crew)
                    crew.take(WARM_UP)
            yield

    def turn(self, steps: int) -> None:
        """Let every contender make `steps` updates."""
        for key, crew in list(self._crews.items()):
            with self._noting(key):
                updates = crew.take(steps).updates
                times = update_times(updates)
                moved = sum(disk for rank in updates for _, _, disk in rank)
                self.lines[key].ms.append(median(times))
                self.lines[key].disk.append(moved / sum(times) * 1e3)

    @contextmanager
    def _noting(self, key: str) -> Iterator[None]:
        """A contender that cannot go on leaves the field, and its line says why."""
        try:
            yield
        except NotInstalled as error:
            self.lines[key].note = f"not installed: {error}"
        except CrewFailed as error:
            self.lines[key].note = f"failed: {error}"
        else:
            return
        self.lines[key].ms.clear()
        self._crews.pop(key, None)


def contenders(folder: str, ranks: int, peers: bool) -> list[Contender]:
    """torch's fused AdamW alone, ZERO_3 on each tier, and DeepSpeed's ZeRO-3 if `peers`.

    `folder` is absolute; DeepSpeed leaves its files there.
    """
    disk = f"nvme:{folder}"
    found = [
        Contender(
            key=key,
            label=f"torch fused AdamW, {words}, {ranks} thread{'s' * (ranks > 1)}",
            module="fused",
            options={"threads": ranks, "flat": flat},
            alone=True,
        )
        for key, words, flat in [(FUSED, "one flat tensor", True), ("fused", "by parameter", False)]
    ]
    tiers: dict[str, dict[str, str]] = {
        "device": {},
        "cpu": {"offload_optimizer": "cpu"},
        "nvme: optimizer": {"offload_optimizer": disk},
        "nvme: optimizer, parameters": {"offload_optimizer": disk, "offload_params": disk},
    }
    found += [
        Contender(
            key=f"shardwise, {tier}",
            label=f"Shardwise ZERO_3, {tier}",
            module="shardwise",
            options={"zero": 3, **settings},
        )
        for tier, settings in tiers.items()
    ]
    found += [
        Contender(
            key=f"deepspeed, {tier}",
            label=f"DeepSpeed ZeRO-3, {tier}: optimizer",
            module="deepspeed",
            options={"stage": 3, "offload": offload},
        )
        for tier, offload in [("cpu", "cpu"), ("nvme", disk)]
        if peers
    ]
    return found


def table(lines: Sequence[Line], numel: int, ranks: int, plain: Sequence[float]) -> Table:
    """Medians over the repeats, and ratios within them; `plain` is the rate of plain direct I/O,
    in bytes per second, by repeat."""
    fused = next(line for line in lines if line.key == FUSED)
    title = f"Updates of {numel / 1e6:.1f}M parameters in fp32 by {ranks} ranks"
    drawn = Table(box=SIMPLE, title=title, title_justify="left")
    drawn.add_column("", no_wrap=True)
    for column in ("ms/update", "GB/s", "x fused", "disk GB/s", "x plain"):
        drawn.add_column(column, justify="right")
    for line in lines:
        if line.ms:
            drawn.add_row(line.label, *_cells(line, numel, fused, plain))
        else:
            drawn.add_row(line.label, *[""] * 5, style="dim")
    return drawn


def _cells(line: Line, numel: int, fused: Line, plain: Sequence[float]) -> Iterator[str]:
    middle = median(line.ms)
    yield milliseconds(middle)
    yield f"{numel * TOUCHED / middle / 1e6:.2f}"
    pairs = zip(line.ms, fused.ms, strict=True)
    yield f"{median(a / b for a, b in pairs):.2f}" if fused.ms else "-"
    if median(line.disk):
        yield f"{median(line.disk) / 1e9:.2f}"
        yield f"{median(a / b for a, b in zip(line.disk, plain, strict=True)):.2f}"
