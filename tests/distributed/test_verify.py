"""Planted errors in small scripts: verify names each, and names nothing in correct scripts."""

from pathlib import Path

import pytest

from shardwise.tools.verify.flow import NARROW_LOSSES
from shardwise.tools.verify.placements import RunPlacement
from shardwise.tools.verify.verdicts import TrainingVerdict, sentences
from tests.distributed.verified import judged

SCRIPTS = Path(__file__).parents[1] / "system" / "scripts"

TWO = RunPlacement(size=2, settings={"zero": "2"})

MISTAKES = {
    "sampler": ("sampler", "DistributedSampler at sampler.py:"),
    "own_batch": ("draws", "a batch, or a part of it, is drawn by each worker separately"),
    "noise": ("noise", "at noise.py:12, noise.py:13, noise.py:14: after training has begun"),
    "collate": ("collate", "the collate_fn of Loader(list) draws random numbers once per"),
    "split": ("split", "random_split at split.py:"),
    "divided": ("loss", "divided by 2 (the number of workers)"),
    "batch_norm": ("batch_norm", "--sync-batch-norm"),
    "dropout": ("dropout", "dropout at"),
    "nondeterministic": ("nondeterministic", "two runs of the reference itself differ"),
    "weight": (
        "weight",
        "weight= at weight.py:15 is not the number of items that this loss is a mean over (worker",
    ),
    "reduction": ("reduction", 'reduction="ddp" at reduction.py:15 averages the losses of the'),
    "scaled_rate": ("lr", "0.02, 2 times the reference's 0.01"),
    "all_reduce": ("sum", "made by hand at all_reduce.py:"),
    "no_buffer": ("buffer", "0.mean: forward changes it"),
    "rank": ("rank", "code that depends on the rank at rank.py:"),
    "batch_size": ("size", "code that depends on the number of workers at batch_size.py:"),
}
CHEAP = ("noise", "weight")  # a cause in the data, and one in the loss


@pytest.mark.parametrize(
    "mistake",
    [each if each in CHEAP else pytest.param(each, marks=pytest.mark.full) for each in MISTAKES],
)
def test_names_the_planted_error(mistake: str, tmp_path: Path) -> None:
    script = str(SCRIPTS / "mistakes" / f"{mistake}.py")
    result = judged((script,), TWO, tmp_path, steps=5)
    assert result.verdict is TrainingVerdict.DIFFERS
    assert result.found is not None
    name, words = MISTAKES[mistake]
    said = "\n".join(sentences(result))
    assert [each.name for each in result.found.causes] == [name], said
    assert words in said
    if name != "nondeterministic":
        assert str(result.smallest) == "-n 2 --zero 0"


RIGHT = [
    ("mlp", "adamw", {"zero": "3", "micro_batch_size": "3"}),
    ("gpt", "adamw", {"zero": "2", "offload_optimizer": "cpu"}),
    ("convnet", "sgd", {"zero": "1", "sync_batch_norm": "on"}),
    ("splittable_gpt", "adamw", {"tensor": "2", "zero": "1"}),
    ("deep_gpt", "sgd", {"pipeline": "2"}),
    ("odd_mlp", "adagrad", {"zero": "3", "precision": "bf16-mixed"}),
]


@pytest.mark.parametrize(
    ("model", "optimizer", "settings"),
    [RIGHT[0], *(pytest.param(*each, marks=pytest.mark.full) for each in RIGHT[1:])],
)
def test_correct_scripts_have_no_cause(
    model: str, optimizer: str, settings: dict[str, str], tmp_path: Path
) -> None:
    words = (str(SCRIPTS / "parity_model.py"), model, optimizer)
    result = judged(words, RunPlacement(size=2, settings=settings), tmp_path, steps=6)
    said = "\n".join(sentences(result))
    assert result.verdict in (TrainingVerdict.BITS, TrainingVerdict.ROUNDING), said
    assert result.steps == 6


@pytest.mark.parametrize("method", ["ulysses", pytest.param("gathered", marks=pytest.mark.full)])
def test_parts_of_sequences_train_as_whole_ones(method: str, tmp_path: Path) -> None:
    script = str(Path(__file__).parents[2] / "examples" / "recipes" / "long_sequences.py")
    settings = {"zero": "3", "context": "2", "context_method": method}
    result = judged((script,), RunPlacement(size=2, settings=settings), tmp_path, steps=3)
    assert result.verdict is TrainingVerdict.ROUNDING, "\n".join(sentences(result))
    assert result.own.same_counts


def test_losses_in_fp32_beside_gradients_in_fp64_agree(tmp_path: Path) -> None:
    result = judged((str(SCRIPTS / "narrow_loss.py"),), RunPlacement(size=2), tmp_path, steps=4)
    assert result.verdict is TrainingVerdict.ROUNDING, "\n".join(sentences(result))
    assert result.note == NARROW_LOSSES


def test_losses_averaged_over_workers_agree(tmp_path: Path) -> None:
    result = judged((str(SCRIPTS / "ddp_loss.py"),), RunPlacement(size=2), tmp_path, steps=3)
    assert result.verdict is TrainingVerdict.ROUNDING, "\n".join(sentences(result))


SMALLEST = {
    "tier_fault": (
        *("-n 1 --zero 0 --offload-optimizer cpu", "the learning rate depends on the placement"),
    ),
    "micro_batch_fault": (
        "-n 1 --zero 0 --micro-batch-size 3",
        "is stepped 4 times in each step, once for each micro-batch",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("fault", SMALLEST)
def test_finds_the_smallest_placement(fault: str, tmp_path: Path) -> None:
    settings = {"zero": "3", "offload_optimizer": "cpu", "micro_batch_size": "3"}
    flags = RunPlacement(size=2, settings=settings)
    result = judged((str(SCRIPTS / f"{fault}.py"),), flags, tmp_path, steps=8)
    placement, words = SMALLEST[fault]
    said = "\n".join(sentences(result))
    assert result.smallest is not None
    assert sorted(result.smallest.words) == sorted(placement.split()), said
    assert words in said
