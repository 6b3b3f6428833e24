"""`shardwise plan` with tensor parallelism, pipelines and a disk: commands that run as printed."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("warm_programs")

SCRIPT = """\
import torch
from torch import nn
import shardwise as sw

world = sw.init(seed=0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


model = nn.Sequential(nn.Linear(8, 32), *(Block() for _ in range(4)), nn.Linear(32, 1))
engine = sw.Engine(model, torch.optim.AdamW(model.parameters()))
data = torch.utils.data.TensorDataset(torch.randn(32, 8))
for (x,) in sw.Loader(data, batch_size=16):
    LOSS
    engine.step()
world.print("trained")
"""
IN_ROWS = "engine.forward_backward(lambda x: model(x).square().mean(), x)"
BARE = "engine.backward(model(x).square().mean())"


def planned(tmp_path: Path, loss: str, *flags: str) -> dict:
    script, file = tmp_path / "train.py", tmp_path / "plan.json"
    script.write_text(SCRIPT.replace("LOSS", loss))
    command = [sys.executable, "-m", "shardwise", "plan", *flags, "--json", str(file), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


def test_commands_of_meshes_run_as_printed(tmp_path):
    found = planned(tmp_path, IN_ROWS, "--on", "2xH100", "--disk", str(tmp_path))
    commands = [each["command"] for each in found["placements"]]
    assert any(f"--offload-optimizer nvme:{tmp_path}" in each for each in commands)
    assert {"gpipe", "zero-bubble"} <= {word for each in commands for word in each.split()}
    for flag in ("--tensor 2", "--pipeline 2 --schedule 1f1b"):
        command = next(each for each in commands if flag in each and "nvme" not in each)
        words = [sys.executable, "-m", *shlex.split(command)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        assert "trained" in done.stdout


def test_says_which_meshes_a_script_excludes(tmp_path):
    found = planned(tmp_path, BARE, "--on", "2xH100")
    assert not any("--pipeline" in each["command"] for each in found["placements"])
    assert any("(...) runs them in parallel" in each for each in found["notes"])
