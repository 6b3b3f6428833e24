"""The package runs from a copy of its files, without an installed distribution."""

import importlib.metadata
import subprocess
import sys

import pytest
import torch

import shardwise as sw

MISSING = """
import importlib.metadata as metadata
def missing(name):
    raise metadata.PackageNotFoundError(name)
metadata.Distribution.from_name = missing
"""


def test_commands_start():
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{MISSING}\nfrom shardwise.cli.main import main\nmain(['--version'])",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.stdout == f"shardwise {sw.__version__}\n", said.stderr


@pytest.mark.usefixtures("solo")
def test_a_checkpoint_is_saved_and_loaded(monkeypatch, tmp_path):
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", missing)
    model = torch.nn.Linear(2, 1)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    engine.backward(model(torch.ones(1, 2)).sum())
    engine.step()
    before = model.weight.detach().clone()
    path = engine.save(tmp_path / "saved")
    engine.backward(model(torch.ones(1, 2)).sum())
    engine.step()
    engine.load(path)
    assert torch.equal(model.weight, before)
    engine.close()


def test_its_version_is_that_of_the_distribution():
    assert importlib.metadata.version("shardwise") == sw.__version__
