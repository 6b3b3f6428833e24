"""Input that cannot be, by every way that there is, and what is made of it.

python -m tests.bad_input --inputs 1000 --seed 1     seeds 1 to 1000
python -m tests.bad_input --input 17                 that one, and all about it
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bad_input.judging import COMMAND, Runner


@contextmanager
def prepared() -> Iterator[Runner]:
    """What tries an input."""
    with tempfile.TemporaryDirectory(prefix="input") as folder:
        yield Runner(Path(folder))


if __name__ == "__main__":
    COMMAND.run(prepared)
