"""The guard names the rank and the kind of tensor of random bit flips.

For more: `python -m tests.bit_flips --flips 300 --seed 1`. For details of a seed that fails here:
`--flip SEED`.
"""

import pytest

from tests.bit_flips.flipping import COMMAND, SIZE, Flip, Runner, draw, judged
from tests.seeded import Counts

FLIPS = (2, 5, 10, 174)

FLIP = Flip(
    what="parameter",
    victim=1,
    step=3,
    place=0.5,
    bit=3,
    moment="between steps",
    layer=0,
    call=None,
    transport="shared",
    recomputes=False,
    settings={"zero": 0, "guard": 2},
)


def test_flips_are_reported(group):
    counts = Counts()

    def groups(size, transport):
        return group(size, transport=transport)

    assert not (told := COMMAND.failures(Runner(groups), FLIPS, counts)), told
    assert counts.kinds["reported"] == len(FLIPS)


def test_seeds_draw_all_kinds_and_rows():
    drawn = [draw(seed) for seed in range(400)]
    assert drawn == [draw(seed) for seed in range(400)]
    assert len({(flip.what, flip.settings["zero"]) for flip in drawn}) == 6 * 4


@pytest.mark.parametrize(
    ("message", "blamed", "step", "kind"),
    [
        ("parameter first.weight is wrong", [1], 4, "reported"),
        ("optimizer state first.weight is wrong", [1], 4, "wrong kind"),
        ("parameter last.weight is wrong", [1], 4, "wrong kind"),
        ("parameter first.weight is wrong", [0], 4, "wrong rank"),
        ("parameter first.weight is wrong", [], 4, "wrong rank"),
        ("parameter first.weight is wrong", [1], 6, "late"),
        ("", [], 6, "missed"),
    ],
)
def test_broken_promises_are_counted(message, blamed, step, kind):
    error = "GuardError" if message else ""
    ranks = [(error, message, blamed, step, ["first.weight"] * (r == 1), []) for r in range(SIZE)]
    assert judged(FLIP, ranks)[0] == kind
