"""Tries invalid input from every source, and checks that the command refuses it in one sentence.

python -m tests.bad_input --inputs 1000 --seed 1     seeds 1 to 1000
python -m tests.bad_input --input 17                 only seed 17, with its whole output
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bad_input.judging import COMMAND, Runner


@contextmanager
def prepared() -> Iterator[Runner]:
    """Yield the runner of inputs."""
    with tempfile.TemporaryDirectory(prefix="input") as folder:
        yield Runner(Path(folder))


if __name__ == "__main__":
    COMMAND.run(prepared)
