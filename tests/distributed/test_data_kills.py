"""Kills and resumes at other sizes: every sample is used once per epoch.

For more: `python -m tests.data_kills --trainings 200`. For details of a seed that fails here:
`--training SEED`.
"""

from collections import Counter

import pytest

from tests.data_kills.trying import COMMAND, EPOCHS, KINDS, Runner, draw, judged
from tests.seeded import Counts


@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 24), marks=pytest.mark.full)], ids=["few", "more"]
)
def test_every_sample_is_used_once_per_epoch(group, tmp_path, seeds):
    counts = Counts()
    assert not (told := COMMAND.failures(Runner(group, tmp_path), seeds, counts)), told
    assert counts.kinds["each sample once"], "all kills came too late"


def test_consecutive_seeds_have_all_kinds():
    assert {draw(seed).kind for seed in range(1, 9)} == {*KINDS}


def test_repeated_and_missing_samples_are_reported():
    right = Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(3))
    assert judged(right, 3, 1)[0] == "each sample once"
    assert judged(right, 3, 0)[0] == "each sample once, no kill"
    for wrong in (right + Counter([(0, 1)]), right - Counter([(1, 2)])):
        assert judged(wrong, 3, 1)[0] == "repeated or missing"
