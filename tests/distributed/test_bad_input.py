"""A few invalid inputs: each is refused in one sentence, before any work is lost.

To try more: `python -m tests.bad_input --inputs 1000 --seed 1`. For the output of one that fails
here: `--input SEED`.
"""

import pytest

from tests.bad_input.drawing import KINDS, draw
from tests.bad_input.judging import COMMAND, Runner, judge
from tests.bad_input.trying import Seen

OFTEN = range(1, 3)
FURTHER = range(3, 31)


@pytest.mark.parametrize("seeds", [OFTEN, pytest.param(FURTHER, marks=pytest.mark.full)], ids=str)
def test_bad_input_is_refused_in_one_sentence(tmp_path, seeds):
    assert not (told := COMMAND.failures(Runner(tmp_path), seeds)), told


def test_seed_determines_input():
    several = [draw(seed) for seed in range(300)]
    assert several == [draw(seed) for seed in range(300)]
    assert {each.kind for each in several} == KINDS.keys()


SAID = "shardwise: --zero takes an integer, not 'x'.\n"
TRACE = "Traceback (most recent call last):\n  ...\nValueError: x\n"


@pytest.mark.parametrize(
    ("code", "err", "left", "kind"),
    [
        (2, SAID, (), "sentence"),
        (0, "", (), "silently taken"),
        (0, "shardwise: --microbatches 4 has no effect, because ...\n", (), "a line says so"),
        (1, TRACE, (), "traceback"),
        (1, "", (), "no word"),
        (1, "Segmentation fault\n", (), "no word"),
        (2, SAID * 9, (), "many words"),
        (2, "shardwise: \x1b[31m is none.\n", (), "many words"),
        (2, SAID, ("shardwise-x",), "left behind"),
        (None, "", (), "hang"),
    ],
)
def test_detects_wrong_results(code, err, left, kind):
    seen = Seen(code=code, out="", err=err, seconds=0.1, left=left)
    assert judge(seen)[0] == kind
