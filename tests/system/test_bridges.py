"""Scripts for Accelerate and Trainer that name nothing of ours, and how they are started."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.cluster import Cluster
from tests.system.launcher import Launcher, Ran, script
from tests.system.test_launchers import SETTINGS, TORCHRUN, mpirun, run, slurm
from tests.system.warm import WarmPython

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
    pytest.mark.usefixtures("warm_library_programs"),
]
pytest.importorskip("accelerate", reason="the accelerate package is not there")

__all__ = ["slurm"]  # a fixture, which pytest looks for among a module's names

ADOPTED = script("accelerated")
LEAVES = script("accelerate_leaves")
WORDS = [sys.executable, "-m", "shardwise", "run"]


def losses(ran: Ran) -> list[str]:
    assert ran.code == 0, ran.err
    return re.findall(r"loss (\S+)", ran.out)


def stock(shardwise: Launcher) -> list[str]:
    return losses(run(shardwise, "env", "ACCELERATE_USE_CPU=true", sys.executable, ADOPTED))


def test_accelerates_scripts_run_unchanged(shardwise: Launcher) -> None:
    expected = stock(shardwise)
    assert len(expected) == 3
    ran = run(shardwise, *WORDS, "-n", "2", "--zero", "3", "--adopt", "accelerate", ADOPTED)
    assert losses(ran) == expected
    assert "by shardwise.accelerate.accelerator 2" in ran.out
    assert "from __main__ True" in ran.out


@pytest.mark.parametrize("launcher", ["openmpi", pytest.param("torchrun", marks=pytest.mark.full)])
def test_other_launchers_start_them(shardwise: Launcher, launcher: str) -> None:
    adopt = ["-m", "shardwise.adopt", "accelerate", ADOPTED]
    first = [TORCHRUN, "--standalone", "--nproc-per-node=2"]
    if launcher == "openmpi":
        first = [mpirun("openmpi"), "-n", "2", sys.executable]
    ran = run(shardwise, "env", "SHARDWISE_ZERO=2", *first, *adopt)
    assert losses(ran) == stock(shardwise)
    assert "by shardwise.accelerate.accelerator 2" in ran.out


@pytest.mark.full
@pytest.mark.parametrize("kind", ["--multi_gpu", "--cpu"])
def test_accelerates_own_launcher(shardwise: Launcher, kind: str) -> None:
    """It starts all processes, or only one, in which case a message explains how to start more."""
    launch = str(Path(sys.executable).with_name("accelerate"))
    words = [launch, "launch", kind, "--num_processes", "2", "-m", "shardwise.adopt"]
    settings = ["env", "SHARDWISE_ZERO=2", "SHARDWISE_QUIET=off"]
    ran = run(shardwise, *settings, *words, "accelerate", ADOPTED)
    assert losses(ran) == stock(shardwise)
    started = 1 if kind == "--cpu" else 2
    assert f"by shardwise.accelerate.accelerator {started}" in ran.out
    said = "accelerate launch has started one process: on the CPU without MPI it ignores"
    assert (said in ran.err) == (started == 1)


@pytest.mark.full
def test_srun_starts_them(slurm: Cluster, shardwise: Launcher, tmp_path: Path) -> None:
    """On two hosts, from a script that names nothing of ours; the first rank of each prints."""
    words = ["srun", "-N2", "-n2", sys.executable, "-m", "shardwise.adopt", "accelerate", ADOPTED]
    ran = slurm.run(*words, cwd=tmp_path, env=SETTINGS | {"SHARDWISE_ZERO": "3"})
    found = losses(Ran(ran.returncode, ran.stdout, ran.stderr))
    assert sorted(found) == sorted(2 * stock(shardwise))
    assert "by shardwise.accelerate.accelerator 2" in ran.stdout


@pytest.mark.parametrize("zero", ["3", pytest.param("1", marks=pytest.mark.full)])
def test_trainers_scripts_run_unchanged(shardwise: Launcher, zero: str) -> None:
    pytest.importorskip("transformers", reason="the transformers package is not there")
    adopt = ["--zero", zero, "--adopt", "transformers", script("hugging_trainer"), "out"]
    two = run(shardwise, *WORDS, "-n", "2", *adopt)
    assert two.code == 0, two.err
    assert "ranks 2 ['Trainer', 'Sharded']" in two.out
    assert "saved 7488" in two.out
    one = run(shardwise, *WORDS, "-n", "1", *adopt[:-1], "alone")
    assert "ranks 1 " in one.out


@pytest.mark.full
def test_a_rank_that_leaves_the_loop_is_named(shardwise: Launcher) -> None:
    """The error names the rank, its call and its line, and the run stops instead of hanging."""
    short = ["--zero", "2", "--warn-after", "4", "--timeout", "12"]
    ran = run(shardwise, *WORDS, "-n", "2", *short, "--adopt", "accelerate", LEAVES)
    assert ran.code == 1
    assert re.search(r"waited 4 s in step 2 for rank 1", ran.err), ran.err
    assert re.search(r"rank 1 is in no collective, at \S*accelerate_leaves\.py:18", ran.err), (
        ran.err
    )


def test_what_cannot_be_adopted(shardwise: Launcher) -> None:
    for words, said in (
        (
            ["--adopt", "keras", ADOPTED],
            "--adopt takes one or more of accelerate, deepspeed",
        ),
        (["--adopt", "accelerate", "absent.py"], "There is no script absent.py"),
        (["--adopt", "accelerate", "sh"], "--adopt needs a Python script, and sh is not one."),
    ):
        ran = run(shardwise, *WORDS, "-n", "2", *words)
        assert (ran.code, said in ran.err) == (2, True), ran.err


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, warm_with_libraries: WarmPython) -> str:
    """Create a folder with a text, a tokenizer and the config of a tiny model."""
    pytest.importorskip("transformers", reason="the transformers package is not there")
    folder = str(tmp_path_factory.mktemp("text"))
    environ = os.environ | dict(warm_with_libraries.environ())
    words = [sys.executable, script("clm_files"), folder]
    subprocess.run(words, check=True, timeout=120, env=environ)
    return folder


def figures(ran: Ran) -> list[str]:
    assert ran.code == 0, ran.err
    return re.findall(r"(?:perplexity|accuracy|words) (.+)", ran.out)


@pytest.mark.full
def test_a_language_model_by_the_trainer(shardwise: Launcher, text: str) -> None:
    """Train like run_clm.py: with the stock Trainer, on two processes with ZeRO 3, resumed."""
    every = ["--folder", text, "--report_to", "none", "--max_grad_norm", "0.5", "--seed", "3"]
    every += [
        "--optim",
        "sgd",
        "--learning_rate",
        "0.3",
        "--num_train_epochs",
        "1",
        "--save_steps",
        "8",
    ]
    every += ["--eval_strategy", "steps", "--eval_steps", "8", "--disable_tqdm", "true"]
    sizes = ["--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "2"]
    alone = [*every, *sizes, "--output_dir", "alone", "--use_cpu", "true"]
    expected = figures(run(shardwise, sys.executable, script("clm_trainer"), *alone))
    assert expected[0] == "32 32"
    sizes[1::2] = "2", "1"
    adopted = [*WORDS, "-n", "2", "--zero", "3", "--adopt", "transformers", script("clm_trainer")]
    ran = run(shardwise, *adopted, *every, *sizes, "--output_dir", "two")
    assert figures(ran) == expected
    assert "ranks 2 Sharded" in ran.out
    again = ["--output_dir", "again", "--resume_from_checkpoint", "two/checkpoint-8"]
    assert figures(run(shardwise, *adopted, *every, *sizes, *again)) == expected


# tests/distributed/test_context_in_bridges.py compares to 1e-8.
@pytest.mark.full
@pytest.mark.parametrize("library", ["accelerate", "transformers", "lightning"])
def test_parts_of_sequences(shardwise: Launcher, library: str) -> None:
    """Train an ordinary script on one worker, and on two that each have a half of every row."""
    pytest.importorskip(library, reason=f"the {library} package is not there")
    words = ["--adopt", library, script("long_rows"), library]
    found = []
    for flags in (["-n", "1"], ["-n", "2", "--context", "2"]):
        ran = run(shardwise, *WORDS, *flags, *words)
        assert ran.code == 0, ran.err
        found.append([float(x) for x in re.findall(r"losses (.+)", ran.out)[0].split()])
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.full
def test_a_language_model_by_a_loop(shardwise: Launcher, text: str) -> None:
    """Train like run_clm_no_trainer.py, save from all ranks, and resume.

    The results match stock Accelerate with DistributedDataParallel.
    """
    stock = [TORCHRUN, "--standalone", "--nproc-per-node=2", script("clm_loop"), text, "stock", "2"]
    expected = figures(run(shardwise, "env", "ACCELERATE_USE_CPU=true", *stock))
    assert len(expected) == 2
    adopted = [*WORDS, "-n", "2", "--zero", "3", "--adopt", "accelerate", script("clm_loop"), text]
    ran = run(shardwise, *adopted, "two", "2")
    assert figures(ran) == expected
    assert "saved True True" in ran.out, ran.err
    assert "by shardwise.accelerate.accelerator 2" in ran.out
    (second,) = figures(run(shardwise, *adopted, "again", "2", "two/epoch_0"))
    assert second == expected[1]
