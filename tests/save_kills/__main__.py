"""Kill ranks at random moments around a save, and check the next run.

python -m tests.save_kills --kills 200 --seed 1     seeds 1 to 200
python -m tests.save_kills --kill 17                only seed 17, with all details
"""

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.distributed.group import Groups
from tests.save_kills.trying import COMMAND, SIZE, Runner


@contextmanager
def prepared() -> Iterator[Runner]:
    """Return the runner that tries one kill."""
    with closing(Groups()) as groups, tempfile.TemporaryDirectory(prefix="kill") as folder:
        yield Runner(groups(SIZE), Path(folder))


if __name__ == "__main__":
    COMMAND.run(prepared)
