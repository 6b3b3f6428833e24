"""What tests of the command have in common."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.launcher import Launcher


@pytest.fixture
def shardwise(tmp_path: Path) -> Iterator[Launcher]:
    """A launcher; nothing may be left of its runs when the test ends."""
    launcher = Launcher(tmp_path)
    yield launcher
    left = launcher.wait_until_gone()
    launcher.kill_all()
    assert left == []
    assert launcher.folders_left() == []
