"""Kill ranks at random moments, resume at other sizes, and check that samples are used once.

python -m tests.data_kills --trainings 200 --seed 1     seeds 1 to 200
python -m tests.data_kills --training 17                only seed 17, with all details
"""

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.data_kills.trying import COMMAND, Runner
from tests.distributed.group import Groups


@contextmanager
def prepared() -> Iterator[Runner]:
    """Return the runner that tries one training."""
    with closing(Groups()) as groups, tempfile.TemporaryDirectory(prefix="data") as folder:
        yield Runner(groups, Path(folder))


if __name__ == "__main__":
    COMMAND.run(prepared)
