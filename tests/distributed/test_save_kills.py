"""After a kill around a save, the next run ends with the same bits as a run without a kill.

For more: `python -m tests.save_kills --kills 200 --seed 1`. For details of a seed that fails here:
`--kill SEED`.
"""

import pytest

from tests.save_kills.trying import COMMAND, Kill, Runner, draw, judged
from tests.seeded import Counts

KILLS = (4, 14, 23, 29)
"""Seeds that kill rank 0, rank 1 and all ranks, soon after a save has started."""

KILL = Kill(victims=(0,), step=3, delay=0.001, row=0, split=5.0, keep=2)


def test_kills_lose_nothing(group, tmp_path):
    counts = Counts()
    assert not (told := COMMAND.failures(Runner(group(2), tmp_path), KILLS, counts)), told
    assert counts.kinds["same bits"], "all kills came too late"
    assert {"one rank", "all ranks"} == {*counts.by_thing}


def test_a_seed_always_gives_the_same_kill():
    assert [draw(seed) for seed in range(99)] == [draw(seed) for seed in range(99)]


@pytest.mark.parametrize(
    ("went", "left", "late", "kind"),
    [
        ([(2, "x")] * 2, [], False, "same bits"),
        ([(3, "x")] * 2, [], True, "same bits, too late to kill"),
        ([(2, "y")] * 2, [], False, "other bits"),
        ([(2, "x"), (2, "y")], [], False, "other bits"),
        ([(1, "x")] * 2, [], False, "lost more"),
        ([(2, "x")] * 2, [".step-3.gone"], False, "left behind"),
    ],
)
def test_broken_promises_are_reported(went, left, late, kind):
    assert judged(KILL, went, "x", left, late=late)[0] == kind
