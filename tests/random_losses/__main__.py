"""Lose ranks at random moments of a run with --survive, and compare its end with undisturbed ones.

python -m tests.random_losses --losses 200 --seed 1     seeds 1 to 200
python -m tests.random_losses --loss 17                 only seed 17, with its whole output
"""

import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.random_losses.judging import COMMAND, Runner
from tests.seeded import console
from tests.system.warm import WarmPython, start_quickly


@contextmanager
def prepared() -> Iterator[Runner]:
    """Yield the runner of losses."""
    start_quickly(os.environ)
    warm = WarmPython()
    try:
        with tempfile.TemporaryDirectory(prefix="loss") as folder:
            runner = Runner(Path(folder), warm.environ())
            yield runner
        if found := runner.continued:
            console.print(
                f"{len(found)} times the others continued, after {statistics.median(found):.2f} s "
                f"(median) to {max(found):.2f} s"
            )
    finally:
        warm.close()


if __name__ == "__main__":
    COMMAND.run(prepared)
