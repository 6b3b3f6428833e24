"""Damaged checkpoints of other libraries: equal values, or one clear sentence.

For more: `python -m tests.foreign_damage --damages 2000`. For details of a seed that fails here:
`--damage SEED`.
"""

from tests.foreign_damage import COMMAND, Runner
from tests.seeded import Counts


def test_no_damage_is_read_silently(tmp_path):
    counts = Counts()
    # The last two had bytes in names of records that are no UTF-8.
    seeds = [*range(1, 101), 2067, 2339]
    assert not (told := COMMAND.failures(Runner(tmp_path), seeds, counts)), told
    assert counts.kinds["sentence"] > 50  # most damages are noticed
