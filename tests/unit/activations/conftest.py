"""Fixtures that offload small tensors too."""

import pytest

from shardwise.model import activation_offload


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offload small tensors too, a few at a time."""
    monkeypatch.setattr(activation_offload, "LEAST", 64)
    monkeypatch.setattr(activation_offload, "LEAVING", 4096)
    monkeypatch.setattr(activation_offload, "AHEAD", 4096)
