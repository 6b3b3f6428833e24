"""The plain PyTorch process of the session."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity.plain import Trained
from tests.parity.problems import Problem

ROOT = Path(__file__).parents[2]


class PlainProcess:
    """Trains problems in one plain PyTorch process, each once per session: `plain(problem)`."""

    def __init__(self) -> None:
        self._trained: dict[Problem, Trained] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.parity.plain"],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __call__(self, problem: Problem) -> Trained:
        if problem not in self._trained:
            self._trained[problem] = self._ask(problem)
        return self._trained[problem]

    def _ask(self, problem: Problem) -> Trained:
        assert self._process.stdin
        assert self._process.stdout
        pickle.dump(problem, self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@pytest.fixture(scope="session")
def plain() -> Iterator[PlainProcess]:
    process = PlainProcess()
    yield process
    process.close()
