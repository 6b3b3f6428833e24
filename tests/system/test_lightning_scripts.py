"""Scripts for Lightning that name nothing of ours, and how they are started."""

import re
import sys

import pytest

from tests.system.launcher import Launcher, Ran, script
from tests.system.test_launchers import TORCHRUN, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
    pytest.mark.usefixtures("warm_library_programs"),
]
pytest.importorskip("lightning", reason="the lightning package is not there")

BORING = script("lightning_boring")
WORDS = [sys.executable, "-m", "shardwise", "run", "-n", "2"]


def results(ran: Ran) -> str:
    assert ran.code == 0, ran.err
    (found,) = re.findall(r"loss (.+)", ran.out)
    return str(found)


@pytest.mark.parametrize(
    ("package", "model"),
    [
        ("lightning.pytorch", "BoringModel"),
        pytest.param("lightning.pytorch", "ManualOptimBoringModel", marks=pytest.mark.full),
        pytest.param("pytorch_lightning", "ManualOptimBoringModel", marks=pytest.mark.full),
    ],
)
def test_lightnings_scripts_run_unchanged(shardwise: Launcher, package: str, model: str) -> None:
    expected = results(run(shardwise, sys.executable, BORING, package, model, "auto", "1"))
    adopted = ["--zero", "3", "--adopt", "lightning", BORING, package, model, "ddp", "2"]
    ran = run(shardwise, *WORDS, *adopted)
    assert results(ran) == expected
    assert all(float(loss) > 0.01 for loss in expected.split()[:2])
    assert "by ShardwiseStrategy 2" in ran.out
    assert "saved (2, 32)" in ran.out
    assert "strategy='ddp', accelerator='cpu', devices='2': Trainer trains by shardwise" in ran.err


@pytest.mark.full
def test_torchrun_starts_them(shardwise: Launcher) -> None:
    words = ["lightning.pytorch", "BoringModel", "fsdp", "2"]
    adopt = ["-m", "shardwise.adopt", "lightning", BORING, *words]
    start = [TORCHRUN, "--standalone", "--nproc-per-node=2"]
    ran = run(shardwise, "env", "SHARDWISE_ZERO=2", *start, *adopt)
    assert "by ShardwiseStrategy 2" in ran.out, ran.err


@pytest.mark.full
def test_devices_without_a_launcher_say_how_to_start(shardwise: Launcher) -> None:
    lines = (
        "import shardwise.lightning, lightning as L; "
        "L.Trainer(strategy='shardwise', accelerator='cpu', devices=2)"
    )
    ran = run(shardwise, sys.executable, "-W", "ignore", "-c", lines)
    assert ran.code == 1
    assert "Write: shardwise run -n 2 script.py" in ran.err
