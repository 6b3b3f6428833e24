"""Damage checkpoints of other libraries at random, and read them.

python -m tests.foreign_damage --damages 200 --seed 1     seeds 1 to 200
python -m tests.foreign_damage --damage 17                only seed 17, with all details
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.foreign_damage import COMMAND, Runner


@contextmanager
def prepared() -> Iterator[Runner]:
    """Return the runner that tries one damage."""
    with tempfile.TemporaryDirectory(prefix="damaged") as folder:
        yield Runner(Path(folder))


if __name__ == "__main__":
    COMMAND.run(prepared)
