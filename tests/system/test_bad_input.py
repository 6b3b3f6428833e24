"""Some bad inputs are each refused by a sentence, before any work is lost.

More of them: `python -m tests.bad_input --inputs 1000 --seed 1`; all about one that fails here:
`--input SEED`.
"""

import pytest

from tests.bad_input.drawing import KINDS, Input, draw
from tests.bad_input.judging import COMMAND, Runner, judged
from tests.bad_input.trying import Seen

OFTEN = range(1, 9)
FURTHER = range(9, 31)


@pytest.mark.parametrize("seeds", [OFTEN, pytest.param(FURTHER, marks=pytest.mark.full)], ids=str)
def test_every_bad_input_is_a_sentence(tmp_path, seeds):
    assert not (told := COMMAND.failures(Runner(tmp_path), seeds)), told


def test_a_seed_is_one_input():
    several = [draw(seed) for seed in range(300)]
    assert several == [draw(seed) for seed in range(300)]
    assert {each.kind for each in several} == KINDS.keys()


SAID = "shardwise: --zero takes a whole number, not 'x'.\n"
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
def test_what_is_not_promised_is_seen(code, err, left, kind):
    seen = Seen(code=code, out="", err=err, seconds=0.1, left=left)
    assert judged(Input(kind="setting"), seen)[0] == kind
