"""Fixtures for the tests of the command."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.lab import Lab, lab
from tests.system.launcher import Launcher
from tests.system.warm import WarmPython


@pytest.fixture
def shardwise(tmp_path: Path) -> Iterator[Launcher]:
    """Create a launcher. Its runs must leave nothing when the test ends."""
    launcher = Launcher(tmp_path)
    yield launcher
    left = launcher.wait_until_gone()
    launcher.close()
    assert left == []
    assert launcher.folders_left() == []


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmPython]:
    """Processes that programs are forked from."""
    made = WarmPython("matplotlib.pyplot")
    yield made
    made.close()


@pytest.fixture
def warm_programs(warm: WarmPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts that this test starts, and that those start, are forked from warm processes."""
    for name, value in warm.environ().items():
        monkeypatch.setenv(name, value)


HIDDEN = "only-on-some"
"""A folder that node3 has empty."""


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Simulate three hosts."""
    hidden = tmp_path_factory.mktemp(HIDDEN, numbered=False)
    (hidden / "script.py").write_text("print('here')")
    with lab(tmp_path_factory.mktemp("lab"), 3, hidden) as found:
        yield found


@pytest.fixture(scope="session")
def warm_with_libraries() -> Iterator[WarmPython]:
    """Create warm processes for scripts of other libraries."""
    made = WarmPython("accelerate", "transformers", "lightning.pytorch", processes=1)
    yield made
    made.close()


@pytest.fixture
def warm_library_programs(warm_with_libraries: WarmPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like `warm_programs`, but with accelerate, transformers and lightning imported."""
    for name, value in warm_with_libraries.environ().items():
        monkeypatch.setenv(name, value)
