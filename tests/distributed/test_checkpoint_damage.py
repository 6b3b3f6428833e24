"""Damaged checkpoints are refused with a message, skipped with a message, or load equal values.

This runs 15 seeds, and 60 with `-m full`. For more: `python -m tests.checkpoint_damage --damages
1000 --seed 1`. For details of a seed that fails here: `--damage SEED`.
"""

import shutil
from pathlib import Path

import pytest

from tests.checkpoint_damage.damaging import Damage, damage
from tests.checkpoint_damage.judging import COMMAND, Runner, judged
from tests.checkpoint_damage.training import Seen

OFTEN = (1, 2, 3, 5, 6, 7, 9, 10, 23, 24, 25, 26, 29, 46, 50)
"""The seeds in `make test`: one of each kind of damage that occurs in seeds 1 to 60."""

FURTHER = [seed for seed in range(1, 61) if seed not in OFTEN]


@pytest.fixture(scope="module")
def runner(group, tmp_path_factory):
    return Runner(group(2), tmp_path_factory.mktemp("damage"))


@pytest.mark.parametrize(
    "seeds", [OFTEN, pytest.param(FURTHER, marks=pytest.mark.full)], ids=["often", "further"]
)
def test_no_damage_goes_unnoticed(runner, seeds):
    assert not (told := COMMAND.failures(runner, seeds)), told


def test_an_optimizer_switch_of_another_type_is_refused(runner):
    """In seed 30438, `foreach` changed from None to a dict in a document without a checksum."""
    assert not (told := COMMAND.failures(runner, [30438])), told


# -- the instrument itself ----------------------------------------------------------------------


def contents(folder: Path) -> dict[str, object]:
    return {
        path.name: path.read_bytes() if path.is_file() else path.lstat().st_mode
        for path in folder.iterdir()
    }


def test_a_seed_always_gives_the_same_damage(runner, tmp_path):
    """Two copies get equal damage, which differs from the original."""
    run = runner.runs[0][0]
    for seed in range(1, 21):
        first, second = tmp_path / f"first-{seed}", tmp_path / f"second-{seed}"
        for copy in (first, second):
            shutil.copytree(run, copy)
        told = damage(seed, first)
        assert damage(seed, second) == told
        assert contents(first / "step-3") == contents(second / "step-3"), told
        assert contents(first / "step-3") != contents(run / "step-3"), told


LINE = ["shardwise: skipped a checkpoint: it"]
GOOD = Seen(verified=1, steps=3, digest="c")


@pytest.mark.parametrize(
    ("seen", "call", "kind"),
    [
        ([GOOD, GOOD], "resume", "equal"),
        ([Seen(verified=1, steps=3, digest="?")] * 2, "resume", "silent difference"),
        ([Seen(verified=1, steps=0, digest="?")] * 2, "resume", "silent difference"),
        ([Seen(verified=1, steps=2, digest="b")] * 2, "resume", "fell back in silence"),
        (
            [Seen(verified=1, steps=2, digest="b", lines=LINE)] * 2,
            "resume",
            "fell back w",
        ),
        (
            [Seen(verified=1, steps=2, digest="b", lines=LINE)] * 2,
            "load",
            "fell back in",
        ),
        ([Seen(verified=0, steps=3, digest="c")] * 2, "load", "verify sees nothing"),
        ([Seen(verified=1, refusal="BrokenCheckpoint: it")] * 2, "load", "sentence"),
        ([GOOD, Seen(refusal="BrokenCheckpoint: it")], "load", "ranks differ"),
        ([GOOD, Seen(trace="KeyError: 3")], "load", "traceback"),
        ([Seen(verified=1, steps=3, digest="c", seconds=99)] * 2, "load", "slow"),
    ],
)
def test_broken_promises_are_reported(seen, call, kind):
    assert judged(Damage("bit", ""), seen, ["a", "b", "c"], call)[0].startswith(kind)
