"""`shardwise plan` as a user types it: placements, the line of the peak, and errors."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from shardwise.tools.plan.observe import Script, observe

pytestmark = pytest.mark.usefixtures("warm_programs")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

SCRIPT = """\
import torch
from torch import nn
import shardwise as sw

sw.init(seed=0)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))


def loss_of(x):
    wide = model(x)
    big = wide.repeat(1, 400).sin()
    return big.square().mean()


engine = sw.Engine(model, torch.optim.AdamW(model.parameters()))
loader = sw.Loader(torch.utils.data.TensorDataset(torch.randn(256, 64)), batch_size=128)
for _ in loader.epochs(1):
    for (x,) in loader:
        loss = loss_of(x)
        LINE
        engine.backward(loss)
        engine.step()
"""


def plan(tmp_path: Path, line: str, *flags: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("LINE", line))
    command = [sys.executable, "-m", "shardwise", "plan", *flags, str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_explains_the_peak(tmp_path):
    file = tmp_path / "plan.json"
    done = plan(tmp_path, "loss.item()", "--on", "2xH100", "--explain", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "assumed: item() = 0.0 train.py:20" in done.stdout
    # Each observation prints a line before it starts, also into a log.
    told = [line for line in done.stderr.splitlines() if line.startswith("observing ")]
    assert "run 1: its own batch, activations kept" in told[0]
    assert "run 2: half of the batch, activations kept" in told[1]
    assert f"observing {tmp_path}/train.py, run {len(told)}: " in told[-1]
    # The line that widens makes the largest tensors: 128 x 25,600 floats.
    rows = [line for line in done.stdout.splitlines() if "of sin" in line]
    assert rows, done.stdout
    assert "train.py:11" in rows[0]
    assert "64x25600" in rows[0]
    found = json.loads(file.read_text())
    assert all(each["fits"] for each in found["placements"])
    sharded = next(each for each in found["placements"] if "--zero 1 " in each["command"])
    numel = 64 * 512 + 512 + 512 * 64 + 64
    assert sharded["states_bytes"]["parameters"] >= 4 * numel
    assert sharded["states_bytes"]["optimizer"] < 8 * numel
    assert sharded["command"].startswith("shardwise run -n 2 --zero 1 ")


def test_refuses_islands():
    command = [
        sys.executable,
        "-m",
        "shardwise",
        "plan",
        "--islands",
        "2",
        "--on",
        "2xH100",
        "x.py",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "does not support --islands 2. Plan one island" in done.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("loss.detach().numpy()", "train.py:20"),
        ("raise SystemExit(0)", "ended before its first step"),
        pytest.param(
            "from torch.nn.attention import flex_attention as flex; "
            "x = torch.ones(1, 1, 8, 4, requires_grad=True); flex.flex_attention(x, x, x)",
            "Plan with scaled_dot_product_attention",
            marks=pytest.mark.full,
        ),
        ("import accelerate.nowhere", "Observe a script of accelerate with --adopt accelerate"),
    ],
)
def test_names_the_line_that_cannot_be_observed(tmp_path, line, words):
    done = plan(tmp_path, line, "--on", "2xH100")
    assert done.returncode == 2
    assert "could not be observed" in done.stderr
    assert words in done.stderr


PLAIN = """\
from pathlib import Path
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
Path("trained").touch()
"""


def test_stops_a_script_of_plain_pytorch_at_its_first_step(tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    command = [sys.executable, "-m", "shardwise", "plan", "--on", "2xH100", "plain.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert "observed at plain.py:7: SGD.step() is called without an sw.Engine" in said
    assert "docs/from_ddp.md shows the lines to change" in said
    assert "add --adopt and that name" in said
    assert not (tmp_path / "trained").exists()


ATTENTION = """\
import torch
from torch import nn
import shardwise as sw

sw.init(seed=0)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        q = self.linear(x).unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1, is_causal=True)


model = Attention()
engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
for (x,) in sw.Loader(torch.utils.data.TensorDataset(torch.randn(8, 128, 32)), batch_size=4):
    engine.backward(model(x).square().mean())
    engine.step()
"""


@pytest.mark.parametrize("fuses", [True, False])
def test_counts_scores_of_attention_with_dropout_only_without_fused_kernels(tmp_path, fuses):
    (tmp_path / "train.py").write_text(ATTENTION)
    step = observe(Script((str(tmp_path / "train.py"),), fuses=fuses))
    scores = [each for each in step.tensors if each.shape[-2:] == (128, 128)]
    assert bool(scores) != fuses
    assert step.attends == fuses


LLAMA = {"width": 64, "layers": 3, "heads": 4, "kv_heads": 2, "inner": 176, "vocabulary": 512}
ROWS, LENGTH = 4, 32


def saved_on_a_gpu():
    """Return the bytes of the tensors that a block of the Llama-like model saves, with counts.

    A list of all tensors at the peak of a step of llama-1.1b on an H200 (torch 2.11), bf16-mixed,
    in units of the model's sizes: per block of benchmarks/llama.py. Tensors of one number per token
    are left out.
    """
    tokens, width, inner = ROWS * LENGTH, LLAMA["width"], LLAMA["inner"]
    narrow = LLAMA["kv_heads"] * width // LLAMA["heads"]
    found = Counter()
    # The results of both norms, cast for each projection.
    found[2 * tokens * width] += 3 + 2
    # The residual stream, after attention and after the feed-forward block.
    found[4 * tokens * width] += 2
    # Attention: rotated queries, repeated keys and values, the result, the logarithms of its sums,
    # and the result with the heads of a token in order.
    found[2 * tokens * width] += 1 + 2 + 1 + 1
    found[4 * tokens * LLAMA["heads"]] += 1
    # The feed-forward block: gate, its SiLU, up, and the product.
    found[2 * tokens * inner] += 4
    # Weights, cast.
    found[2 * width * width] += 2
    found[2 * width * narrow] += 2
    found[2 * width * inner] += 3
    return found


def test_saves_what_a_gpu_saves():
    sizes = {"kind": "llama", "name": "x", "sequence": LENGTH, "batch": ROWS, **LLAMA}
    words = str(BENCHMARKS / "plan_step.py"), json.dumps(sizes)
    step = observe(Script(words, ("--precision", "bf16-mixed"), fuses=True))
    block = step.units.index("blocks.1")
    own = [each for each in step.tensors if each.saved and each.unit == block]
    saved = Counter(each.nbytes for each in own if each.nbytes > 4 * ROWS * LENGTH)
    assert saved == saved_on_a_gpu()
