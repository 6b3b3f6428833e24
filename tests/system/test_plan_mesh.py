"""`shardwise plan` with tensor parallelism, pipelines and a disk: commands that run as printed."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.tools.plan.observe import Script, Way, observe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("warm_programs"),
]

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


EXPERTS = """\
import torch
import transformers
from torch import nn
import shardwise as sw

world = sw.init(seed=0)
WIDTH = 16


def expert():
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, WIDTH))


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        experts = nn.ModuleList([expert() for _ in range(4)])
        self.moe = sw.MoE(nn.Linear(WIDTH, 4, bias=False), experts, shared=expert(), balance=0.1)
        self.words, self.head = nn.Embedding(19, WIDTH), nn.Linear(WIDTH, 19)

    def forward(self, ids):
        return self.head(self.moe(self.words(ids)))


def Mixtral():
    config = transformers.MixtralConfig(
        vocab_size=19, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, use_cache=False,
    )
    return transformers.MixtralForCausalLM(config)


model = MODEL()
engine = sw.Engine(model, torch.optim.AdamW(model.parameters()))
data = torch.utils.data.TensorDataset(torch.randint(19, (32, 8)))
for (ids,) in sw.Loader(data, batch_size=8):
    logits = model(ids)
    logits = getattr(logits, "logits", logits)
    engine.backward(nn.functional.cross_entropy(logits.transpose(1, 2), ids))
    engine.step()
world.print("trained")
"""


@pytest.mark.full
@pytest.mark.parametrize("model", ["Own", "Mixtral"])
def test_plans_experts_together_with_tensor(tmp_path, model):
    script, file = tmp_path / "train.py", tmp_path / "plan.json"
    script.write_text(EXPERTS.replace("MODEL", model))
    flags = ["--on", "4xH100", "--json", str(file)]
    command = [sys.executable, "-m", "shardwise", "plan", *flags, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {each["command"]: each for each in json.loads(file.read_text())["placements"]}

    def states(flags):
        command = next(c for c in found if f"--zero 0 {flags} {script}" in c)
        return found[command]["states_bytes"]["parameters"]

    # A rank of one replica of two holds as many experts as without --tensor, and less of the rest.
    assert states("--expert 4 --tensor 2") < states("--expert 4") < states("--expert 2")
    assert states("--expert 2 --tensor 2") < states("--expert 2")
    command = next(c for c in found if f"--zero 2 --expert 4 --tensor 2 {script}" in c)
    words = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout


ATTENTION = """\
import torch
import torch.nn.functional as F
from torch import nn
import shardwise as sw

ROWS, LENGTH, HEADS, FEATURES = 2, 64, 4, 8
WIDTH = HEADS * FEATURES


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(16, WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)  # half as many K/V heads

    def forward(self, ids):
        x = self.words(ids)
        rows, length, _ = x.shape
        q = self.q(x).view(rows, length, HEADS, FEATURES).transpose(1, 2)
        k, v = self.kv(x).view(rows, length, HEADS, FEATURES).transpose(1, 2).chunk(2, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(mixed.transpose(1, 2).flatten(2), self.words.weight)


sw.init(seed=0)
model = Model()
engine = sw.Engine(model, torch.optim.AdamW(model.parameters()))
ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 16
for x, y in sw.Loader(torch.utils.data.TensorDataset(ids, ids), batch_size=ROWS):
    engine.backward(F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
    engine.step()
sw.world().print("trained")
"""


ADOPTED = """\
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 20, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
optimizer = torch.optim.AdamW(model.parameters())
rows = [{"input_ids": torch.randint(20, (32,))} for _ in range(4)]
for row in rows:
    row["labels"] = row["input_ids"]
accelerator = Accelerator()
prepared = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))
model, optimizer, loader = prepared
model.train()
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.full
@pytest.mark.parametrize("method", ["ulysses", "gathered"])
def test_observes_parts_of_sequences_that_a_library_reads(tmp_path, method):
    pytest.importorskip("accelerate", reason="the accelerate package is not there")
    script = tmp_path / "train.py"
    script.write_text(ADOPTED)
    way = Way(context=2, method=method)
    record = observe(Script((str(script),), adopt="accelerate"), way=way)
    # Two layers, each with two exchanges in both passes: to heads and to parts, or a gather of keys
    # and an exchange of queries and of results.
    assert len(record.exchanged) >= 2 * (4 if method == "ulysses" else 6)
    assert record.batch_size == 2


# tests/unit/planning/test_absent_parts.py counts the same bytes without a run.
@pytest.mark.full
def test_context_methods(tmp_path):
    script, file = tmp_path / "train.py", tmp_path / "plan.json"
    script.write_text(ATTENTION)
    command = [sys.executable, "-m", "shardwise", "plan", "--on", "2xH100", "--context", "2"]
    done = subprocess.run(
        [*command, "--json", str(file), str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads(file.read_text())["placements"]
    one = next(x for x in lines if "--zero 0" in x["command"] and "--context" not in x["command"])
    found = {
        method: next(
            x for x in lines if f"--zero 0 --context 2 --context-method {method}" in x["command"]
        )
        for method in ("ulysses", "gathered")
    }
    # Forward and backward. Ulysses sends queries, keys, values and results of the part; the other
    # method sends keys and values, and one of two chunks of queries and results.
    rows, part, features = 2, 32, 8
    both = 2 * 4 * rows * part * features / 2  # bytes of one head to the other rank, in both passes
    assert found["ulysses"]["context_bytes"] == both * (4 + 2 + 2 + 4)
    assert found["gathered"]["context_bytes"] == 2 * both * (2 + 2) + both * (4 + 4)
    assert one["context_bytes"] == 0
    # Two rows on two workers, or the halves of two rows: as many activations.
    saved = {x["command"]: x["bytes_at_peak"]["saved"] for x in (one, found["ulysses"])}
    assert len(set(saved.values())) == 1, saved
    words = [sys.executable, "-m", *shlex.split(found["ulysses"]["command"])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert "trained" in done.stdout, done.stderr


def test_says_which_meshes_a_script_excludes(tmp_path):
    found = planned(tmp_path, BARE, "--on", "2xH100")
    assert not any("--pipeline" in each["command"] for each in found["placements"])
    assert any("(...) runs them in parallel" in each for each in found["notes"])
