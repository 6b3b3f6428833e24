"""`shardwise verify` as a user types it, and `assert_same_training` as a test calls it.

The causes that it names for errors are tested in tests/distributed/test_verify.py.
"""

import importlib.util
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import UsageError
from shardwise.testing import assert_same_training
from tests.system.launcher import Launcher, Ran, script

QUICK = {"OMP_NUM_THREADS": "1"}
WARM = pytest.mark.usefixtures("warm_programs")
"""In these tests, the warm processes of a verification are forked too."""


LIMIT = 300.0
"""Timeout in seconds of several runs, one after the other."""


def verify(shardwise: Launcher, *words: str, **options: Any) -> Ran:
    """Run `shardwise verify WORDS` to its end."""
    return shardwise.finish(shardwise.start("verify", *words, **options), LIMIT)


def out(shardwise: Launcher) -> Path:
    return shardwise.folder / "runs"


@pytest.mark.full
@WARM
def test_exact_mode_has_equal_bits_and_leaves_no_records(shardwise: Launcher) -> None:
    flags = ("-n", "2", "--zero", "3", "--exact", "2", "--steps", "3", "--out", "runs")
    ran = verify(shardwise, *flags, "--json", "-", script("exact"), env=QUICK)
    assert ran.code == 0, ran.out + ran.err
    assert "Equal to the last bit over 3 steps" in ran.err
    told = json.loads(ran.out)
    (placement,) = told["placements"]
    assert (told["verdict"], placement["largest_difference"]) == ("bits", 0.0)
    assert placement["losses"] == placement["reference_losses"]
    assert len(placement["losses"]) == 3
    assert {path.name for path in out(shardwise).iterdir()} == {
        *("verify-logs", "verify.html", "verify.json", "verify.png")
    }
    assert {path.suffix for path in (out(shardwise) / "verify-logs").iterdir()} == {".txt"}


@pytest.mark.full
def test_proves_rounding_and_names_an_error(shardwise: Launcher) -> None:
    flags = ("-n", "2", "--zero", "1", "--steps", "4", "--out", "runs")
    ran = verify(shardwise, *flags, script("measured"), env=QUICK)
    assert ran.code == 3, ran.out + ran.err
    assert "Equal within rounding over 4 steps: in fp64 the same script agrees to" in ran.out
    accepted = verify(shardwise, *flags, "--accept", "rounding", script("measured"), env=QUICK)
    assert accepted.code == 0, accepted.out + accepted.err
    ran = verify(shardwise, *flags, script("mistakes/divided"), env=QUICK)
    assert ran.code == 5, ran.out + ran.err
    assert "Cause: the loss is divided by 2 (the number of workers) by hand" in ran.out


PLAIN = """
import torch
torch.set_default_dtype(torch.float64)  # then they agree to 1e-8 as they are: two runs will do
torch.manual_seed(0)
x = torch.randn(96, 16)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in x.split(12):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(batch), batch[:, :4]).backward()
    optimizer.step()
"""
PORTED = """
import torch, shardwise as sw
torch.set_default_dtype(torch.float64)
world = sw.init(seed=0)
x = torch.randn(96, 16)
model = torch.nn.Linear(16, 4)
engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
for batch in x.split(12):
    batch = world.share(batch)
    engine.backward(torch.nn.functional.mse_loss(model(batch), batch[:, :4]))
    engine.step()
"""


@WARM
def test_compares_a_ported_script_with_its_original(shardwise: Launcher) -> None:
    for name, text in (("plain.py", PLAIN), ("ported.py", PORTED)):
        (shardwise.folder / name).write_text(text)
    flags = ("-n", "2", "--zero", "2", "--steps", "4", "--out", "runs", "--accept", "rounding")
    ran = verify(shardwise, *flags, "--against", "plain.py", "ported.py", env=QUICK)
    assert ran.code == 0, ran.out + ran.err
    told = json.loads((out(shardwise) / "verify.json").read_text())
    assert told["reference"] == "plain.py"
    assert told["placements"][0]["steps"] == 4
    assert all(loss is not None for loss in told["placements"][0]["reference_losses"])


@WARM
def test_refuses_a_script_without_an_engine(shardwise: Launcher) -> None:
    (shardwise.folder / "plain.py").write_text(PLAIN)
    ran = verify(shardwise, "-n", "2", "--steps", "2", "plain.py", env=QUICK)
    assert ran.code == 2
    assert "plain.py creates no sw.Engine" in ran.err
    assert "--against plain.py PORTED.py" in ran.err


@WARM
def test_failed_run_shows_its_traceback(shardwise: Launcher) -> None:
    flags = ("-n", "2", "--steps", "4", "--out", "runs")
    ran = verify(shardwise, *flags, script("measured"), "not-on-2", env=QUICK)
    assert ran.code == 1
    assert "ValueError: that many will not do" in ran.out
    assert "measured.py" in ran.out
    assert not list(out(shardwise).rglob("record-*"))


@pytest.mark.full  # test_verify_ranks.py checks that no forked rank is left
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_interrupt_leaves_no_process(shardwise: Launcher) -> None:
    process = shardwise.start(
        "verify", "-n", "2", "--out", "runs", script("measured"), "linger", env=QUICK
    )
    output = out(shardwise) / "verify-logs" / "01.txt"
    until = time.monotonic() + 60
    while not (output.exists() and output.read_text()) and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert shardwise.finish(process, 60).code == 130
    assert not list(out(shardwise).rglob("record-*"))
    assert not shardwise.wait_until_gone()  # the warm processes, and the ranks forked from them
    assert not shardwise.folders_left()


def test_refuses_impossible_placements_before_any_run(shardwise: Launcher) -> None:
    ran = verify(shardwise, "-n", "2", "--also", "-n 2 train.py", script("measured"))
    assert ran.code == 2
    assert "flags of shardwise run without a script" in ran.err
    flags = ("-n", "2", "--also", "-n 2 --adopt accelerate")
    ran = verify(shardwise, *flags, script("measured"))
    assert ran.code == 2
    assert "contains --adopt, which belongs to the script" in ran.err


@pytest.mark.full
def test_verifies_an_unchanged_accelerate_script(shardwise: Launcher) -> None:
    pytest.importorskip("accelerate")
    flags = ("-n", "2", "--zero", "2", "--steps", "3", "--out", "runs", "--adopt", "accelerate")
    ran = verify(shardwise, *flags, script("accelerated"), env=QUICK)
    assert ran.code == 3, ran.out + ran.err
    assert "Equal within rounding over 3 steps" in ran.out
    assert "run 1 · the reference" in ran.err


def made(name):
    spec = importlib.util.spec_from_file_location("made", script("made"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@pytest.mark.full
def test_assert_same_training() -> None:
    assert_same_training(made("make"), placements=["-n 2 --zero 3"])
    with pytest.raises(AssertionError, match="BatchNorm") as failure:
        assert_same_training(made("with_batch_norm"), placements=["-n 2"])
    assert "-n 2: differs" in str(failure.value)
    assert "first in step 0" in str(failure.value)


def test_refuses_functions_that_cannot_be_imported() -> None:
    with pytest.raises(UsageError, match="at the top level of a module"):
        assert_same_training(lambda: None)
