"""Writes training metrics to TensorBoard or CSV files."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.config.deepspeed.job import DeepSpeedJob, Monitor
from shardwise.errors import ConfigError

Event = tuple[str, float, int]
"""The name of a metric, its value, and the number of samples trained on so far."""


class MonitorMaster:
    """Writes events on the main rank, in the formats that the config enables.

    Raises ConfigError if the config enables TensorBoard but it is not installed.
    """

    def __init__(self, job: DeepSpeedJob, *, is_main: bool) -> None:
        self.enabled = job.tensorboard is not None or job.csv is not None
        self._writers: list[Any] = []
        if is_main and job.tensorboard is not None:
            self._writers.append(_tensorboard(job.tensorboard))
        if is_main and job.csv is not None:
            self._writers.append(_CsvWriter(job.csv))

    def write_events(self, events: Sequence[Event]) -> None:
        """Write events. No-op except on the main rank."""
        for writer in self._writers:
            for name, value, samples in events:
                writer.add_scalar(name, value, samples)
            writer.flush()

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()


def _tensorboard(monitor: Monitor) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "tensorboard.enabled needs the package tensorboard: pip install tensorboard."
        ) from None
    return SummaryWriter(str(Path(monitor.folder) / monitor.job))


class _CsvWriter:
    """Writes one CSV file per metric, such as Train_Samples_lr.csv: sample counts and values."""

    def __init__(self, monitor: Monitor) -> None:
        self._folder = Path(monitor.folder) / monitor.job
        self._folder.mkdir(parents=True, exist_ok=True)
        self._begun: set[str] = set()

    def add_scalar(self, name: str, value: float, samples: int) -> None:
        path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
        # Reopen the file for each value, so that a killed process loses none.
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            if name not in self._begun:
                self._begun.add(name)
                writer.writerow(["step", name.rpartition("/")[2]])
            writer.writerow([samples, value])

    def flush(self) -> None:
        """No-op, because `add_scalar` writes each value immediately."""

    def close(self) -> None:
        """No-op, because no file remains open."""
