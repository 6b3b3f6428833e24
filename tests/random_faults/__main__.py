"""Tries faults of ranks at random places of a run, and checks the launcher's report.

python -m tests.random_faults --faults 200 --seed 1     seeds 1 to 200
python -m tests.random_faults --fault 17                only seed 17, with its whole output
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.random_faults.judging import COMMAND, Runner


@contextmanager
def prepared() -> Iterator[Runner]:
    """Yield the runner of faults."""
    with tempfile.TemporaryDirectory(prefix="fault") as folder:
        yield Runner(Path(folder))


if __name__ == "__main__":
    COMMAND.run(prepared)
