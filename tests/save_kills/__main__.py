"""Kills at any moment around a save, and what is left to go on from.

python -m tests.save_kills --kills 200 --seed 1     seeds 1 to 200
python -m tests.save_kills --kill 17                that one, and all about it
"""

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.distributed.group import Groups
from tests.save_kills.trying import COMMAND, SIZE, Runner


@contextmanager
def prepared() -> Iterator[Runner]:
    """What tries a kill."""
    with closing(Groups()) as groups, tempfile.TemporaryDirectory(prefix="kill") as folder:
        yield Runner(groups(SIZE), Path(folder))


if __name__ == "__main__":
    COMMAND.run(prepared)
