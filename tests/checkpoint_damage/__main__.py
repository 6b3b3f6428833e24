"""Damage checkpoints at random, and check their loads.

python -m tests.checkpoint_damage --damages 1000 --seed 1     seeds 1 to 1000
python -m tests.checkpoint_damage --damage 17                 only seed 17, with all details
"""

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.checkpoint_damage.judging import COMMAND, Runner
from tests.distributed.group import Groups


@contextmanager
def prepared() -> Iterator[Runner]:
    """Return the runner that tries one damage."""
    with (
        closing(Groups()) as groups,
        tempfile.TemporaryDirectory(prefix="damaged") as folder,
    ):
        yield Runner(groups(2), Path(folder))


if __name__ == "__main__":
    COMMAND.run(prepared)
