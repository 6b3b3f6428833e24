"""Small tensors move too."""

import pytest

from shardwise.model import saved_tensors


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move small tensors too, a few at once."""
    monkeypatch.setattr(saved_tensors, "LEAST", 64)
    monkeypatch.setattr(saved_tensors, "LEAVING", 4096)
    monkeypatch.setattr(saved_tensors, "AHEAD", 4096)
